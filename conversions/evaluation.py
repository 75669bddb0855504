"""The same questions to a model before its conversion and after it."""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_sigmoid.conversions.compare import Measure, token_windows
from hf_sigmoid.conversions.reading import kind
from hf_sigmoid.evals.probe import needle_prompts, score
from hf_sigmoid.evals.samples import Sample


class Stages:
    """Seconds and tokens of a conversion by stage; a stage that is entered again adds up."""

    def __init__(self):
        self._spent: dict[str, dict] = {}

    @contextmanager
    def __call__(self, name: str, tokens: int = 0) -> Iterator[None]:
        """Time what happens inside; `tokens` are those that run through the model there."""
        start = time.perf_counter()
        try:
            yield
        finally:
            spent = self._spent.setdefault(name, {"stage": name, "seconds": 0.0, "tokens": 0})
            spent["seconds"] += time.perf_counter() - start
            spent["tokens"] += tokens

    def rows(self) -> list[dict]:
        return [{**row, "seconds": round(row["seconds"], 1)} for row in self._spent.values()]


@dataclass(frozen=True)
class Questions:
    """Windows of a text and prompts that hide a needle in it, made before any model is run."""

    window: int
    lengths: list[int]  # that are reported
    windows: dict[int, Tensor]  # length -> [count, length], the window's own too
    needles: dict[int, list[Sample]]
    without_needle: dict[int, str]  # length -> why it has none


@dataclass(frozen=True)
class Answers:
    """The measure, and accuracy and log-probability of needles, by length."""

    measured: dict[int, float]
    needles: dict[int, dict[str, float]]


def questions(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    *,
    window: int,
    windows: int,
    lengths: Sequence[int] | None = None,
    needle: int = 0,
    positions: int | None = None,
) -> Questions:
    """Make the questions.

    Args:
        lengths: in tokens; None takes 128, 256, 512 … up to `window`. Those up to `window` are the
            beginnings of the same windows, each longer one has windows of its own.
        needle: prompts at each of three depths for every length; 0 asks for no needle.
        positions: how many the converted model has; needles need room for their answer.

    Raises:
        ValueError: a text that is too short, or not one length at which a needle can be hidden.
    """
    lengths = default_lengths(window) if lengths is None else sorted({*lengths})
    of_text = token_windows(tokenizer, text, window, windows, what="evaluation text")
    ids = {
        length: of_text[:, :length]
        if length <= window
        else token_windows(tokenizer, text, length, windows, what="evaluation text")
        for length in sorted({*lengths, window})
    }
    needles, without = {}, {}
    if needle:
        needles, without = needle_prompts(
            text, tokenizer, lengths, samples=needle, positions=positions
        )
        if not needles:
            raise ValueError(f"no needle can be hidden: {'; '.join(without.values())}")
    return Questions(window, lengths, ids, needles, without)


def ask(
    model: PreTrainedModel, asked: Questions, measure: Measure, stages: Stages, when: str
) -> Answers:
    """Ask a model; `when`, "before" or "after", is in the progress and the stages.

    Raises:
        ValueError: a needle cannot be asked of this kind of model.
    """
    if asked.needles and kind(model) != "causal":
        raise ValueError(f"--needle asks causal language models, got {type(model).__name__}")
    measured, needles = {}, {}
    for length, ids in asked.windows.items():
        with stages(f"evaluation {when}", ids.numel()):
            measured[length] = measure(model, ids, f"{when}, {length} tokens")
    for length, samples in asked.needles.items():
        with stages(f"needles {when}", length * len(samples)):
            bar = f"needles {when}" if measure.progress else None
            right, logprobs = zip(*score(model, samples, progress=bar), strict=True)
        needles[length] = {
            "accuracy": sum(right) / len(right), "logprob": math.fsum(logprobs) / len(logprobs),
        }  # fmt: skip
    return Answers(measured, needles)


def figures(asked: Questions, measure: Measure, before: Answers, after: Answers) -> dict[str, Any]:
    """The report's figures of a model as it was and as it is converted."""
    found: dict[str, Any] = {}
    if measure.of_features:
        found["hidden_state_change"] = after.measured[asked.window]
    else:
        found["perplexity_before"] = before.measured[asked.window]
        found["perplexity_after"] = after.measured[asked.window]
    found["lengths"] = [
        {"tokens": length, "before": before.measured[length], "after": after.measured[length]}
        for length in asked.lengths
    ]
    if asked.needles:
        found["needle"] = [
            {
                "tokens": length,
                "samples": len(samples),
                **{f"{name}_before": value for name, value in before.needles[length].items()},
                **{f"{name}_after": value for name, value in after.needles[length].items()},
            }
            for length, samples in asked.needles.items()
        ]
        found["without_needle"] = {str(n): why for n, why in asked.without_needle.items()}
    return found


def default_lengths(window: int) -> list[int]:
    """Powers of two from 128 below the window, and the window."""
    return [*(2**k for k in range(7, window.bit_length()) if 2**k < window), window]
