"""Held-out loss and a small needle probe while a model trains, shared out over the processes."""

import math
from pathlib import Path
from typing import Any

import torch

from hf_sigmoid import text
from hf_sigmoid.conversions.compare import token_windows
from hf_sigmoid.errors import BadInput
from hf_sigmoid.evals.loss import summed_loss
from hf_sigmoid.evals.probe import needle_prompts, score
from hf_sigmoid.evals.samples import Sample
from hf_sigmoid.text.formats import title
from hf_sigmoid.text.sources import joined
from hf_sigmoid.training.job import Job
from hf_sigmoid.training.run_keys import Watch

BUILTIN = "builtin"


def read_texts(given: str | list[str] | None) -> dict[str, str]:
    """The texts of `evaluate.path` by the files' names.

    Raises:
        BadInput: for one that cannot be read, or two of one name.
    """
    given = [] if given is None else [given] if isinstance(given, str) else given
    found = {}
    for path in given:
        name = BUILTIN if path == BUILTIN else Path(title(path)).stem
        if name in found:
            raise BadInput(f"evaluate.path: expected files of different names, got two {name}")
        found[name] = text.held_out() if path == BUILTIN else joined(path, "evaluate.path")
    return found


def windows(
    texts: dict[str, str], number: int, tokenizer: Any, block_size: int
) -> dict[str, torch.Tensor]:
    """Windows `[number, block_size]` of each text.

    Raises:
        BadInput: for a text that is too short.
    """
    found = {}
    for name, content in texts.items():
        try:
            found[name] = token_windows(tokenizer, content, block_size, number)
        except ValueError as error:
            raise BadInput(f"evaluate.path {name}: {error}") from None
    return found


class HeldOut:
    """Windows of text and prompts, made before the model is loaded.

    Raises:
        BadInput: a file that is missing or too short, two of one name, or no needle that fits.
    """

    def __init__(self, asked: Watch, tokenizer: Any, block_size: int, positions: int | None):
        if asked.path == []:
            raise BadInput("evaluate.path: expected files, got an empty list (null is none)")
        texts = read_texts(asked.path)
        self.windows = windows(texts, asked.windows, tokenizer, block_size)
        self.prompts: dict[int, list[Sample]] = {}
        if asked.needle:
            try:
                self.prompts, why = needle_prompts(
                    "\n\n".join(texts.values()) or text.held_out(), tokenizer, asked.needle,
                    samples=asked.needle_samples, positions=positions, prompt="base",
                )  # fmt: skip
            except ValueError as error:
                raise BadInput(f"evaluate.needle: {error}") from None
            if why:
                raise BadInput(f"evaluate.needle: {'; '.join(f'{n}: {w}' for n, w in why.items())}")

    def __bool__(self) -> bool:
        return bool(self.windows or self.prompts)

    @torch.no_grad()
    def measure(self, model: Any, job: Job) -> dict[str, Any] | None:
        """`held_out` (nats a token, by text) and `needle` (share found, by length).

        None if a process was asked to stop meanwhile: all of them leave together.
        """
        processes, was_training = job.processes, model.training
        model.eval()
        found: dict[str, Any] = {}
        try:
            sets_of = {"held_out": (self.windows, _loss), "needle": (self.prompts, _needle)}
            for kind, (sets, scored) in sets_of.items():
                for name, items in sets.items():
                    sums = [0.0, 0.0]
                    # Every process takes part in every round: sharded weights are gathered in it.
                    for start in range(0, len(items), processes.layout.data_ranks):
                        mine = start + processes.layout.data_rank
                        with processes.accelerator.autocast():
                            values = scored(model, items[min(mine, len(items) - 1)])
                        if mine < len(items):
                            sums = [a + b for a, b in zip(sums, values, strict=True)]
                        if job.asked_to_stop():
                            return None
                    of, count = processes.total(*sums)
                    value = of / count
                    found.setdefault(kind, {})[str(name)] = value if math.isfinite(value) else None
        finally:
            model.train(was_training)
        return found


def _loss(model: Any, window: torch.Tensor) -> tuple[float, float]:
    return summed_loss(model, window.to(model.device))


def _needle(model: Any, sample: Sample) -> tuple[float, float]:
    return float(score(model, [sample])[0][0]), 1.0


def brief(found: dict[str, Any]) -> str:
    """For the progress line."""
    losses = found.get("held_out", {}).items()
    # The perplexity; a model that has diverged has none that can be written down.
    parts = [f"{name} {math.exp(min(loss, 99)):.2f}" for name, loss in losses if loss is not None]
    parts += [f"needle {n} {share:.0%}" for n, share in found.get("needle", {}).items()]
    return ", ".join(parts)
