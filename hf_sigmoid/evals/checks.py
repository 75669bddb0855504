"""Checks that a model gives one answer by every way that a run takes, before a score is believed.

On one sample, probabilities p [answer, vocabulary] of the answer behind its prompt

    plain      one forward, no cache, no other row, no mask: what the others are held to
    cached     the answer behind the prompt's keys and values: of one row, and of two whose prompt
               is read in two parts; twice each, the cache is cropped between
    batched    beside another sample
    padded     behind ids that the attention mask hides
    generated  the model's own greedy decoding, held to what `plain` finds likeliest

Each is given as Σ p |Δ log p| in nats, the largest of the answer's tokens; `generated` as what its
tokens fall short of the likeliest. An attention function that counts n wrongly under a cache, for
queries that come alone, or under padding, fails here; so does a cache that is not what it was
after being cropped. What is wrong in the same way everywhere is not seen.
"""

import inspect
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hf_sigmoid.evals.prefix import Prefix, kept
from hf_sigmoid.evals.samples import Sample
from hf_sigmoid.evals.scoring import generated

# Nats. On SmolLM2 rounding moves it by 5e-7 to 7e-6 in float32, by 0.01 to 0.03 in bfloat16; ten
# times that and more is room for deeper models. What is wrong moves it by tenths or whole nats.
TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.3}
PADDING, TAIL = 64, 40  # ids that are hidden; that come behind a part of the prompt


@dataclass(frozen=True)
class Checks:
    """Differences in nats, None of what was not done, and how large they may be."""

    cached: float
    batched: float | None
    padded: float | None  # None also of a model that takes no attention mask
    generated: float
    tolerance: float

    @property
    def failed(self) -> dict[str, float]:
        """Those that are too large, or no numbers."""
        each = {name: value for name, value in vars(self).items() if value is not None}
        # Not `>`, which NaN escapes.
        return {name: value for name, value in each.items() if not value <= self.tolerance}

    def record(self) -> dict[str, Any]:
        return {**vars(self), "passed": not self.failed}


def worst(each: Sequence[Checks]) -> Checks:
    """The largest of each difference."""
    columns = zip(*(vars(checks).values() for checks in each), strict=True)
    return Checks(*(_largest(column) for column in columns))


def _largest(values: Iterable[float | None]) -> float | None:
    """NaN is larger than any, None is none."""
    known = [value for value in values if value is not None]
    return max(known, key=lambda value: math.inf if math.isnan(value) else value, default=None)


@torch.no_grad()
def check(model: Any, sample: Sample, other: Sample, *, brief: bool = False) -> Checks:
    """Compare the ways on one sample; `other`, of the same length, stands beside it.

    Args:
        brief: without `batched`, `padded` and the second row, which do not depend on the length.

    Raises:
        NoCache: the model cannot go on from a prompt.
    """
    size = len(sample.answer)
    ids = torch.tensor([sample.prompt + sample.answer[:-1]], device=model.device)
    plain = _logprobs(model, ids, size)

    def differs(logprobs: Tensor) -> float:
        return (plain.exp() * (logprobs - plain).abs()).sum(-1).max().item()

    length = len(sample.prompt)
    beside = (other.prompt + other.answer)[: ids.shape[1]]
    rows = torch.cat([ids, ids.new_tensor([beside + beside[-1:] * (ids.shape[1] - len(beside))])])
    cached = []
    prefix = None
    # At long prompts no more rows at a time than a run has.
    for some, part in ((ids if brief else rows, length - 1 - TAIL), (ids, length - 1)):
        del prefix
        prefix = Prefix.read(model, some[:, :part])
        with prefix.longer(some[:, part : length - 1]) as longer:
            logits = [longer.logits(some[:, length - 1 :]) for _ in range(2)]
        del longer
        cached += [differs(each[0].log_softmax(-1)) for each in logits]
    return Checks(
        cached=_largest(cached),
        batched=None if brief else differs(_logprobs(model, rows, size)),
        padded=None if brief else _padded(model, ids, size, differs),
        generated=_regret(model, prefix, ids[:, :length], sample.answer, plain),
        tolerance=TOLERANCE[str(model.dtype).removeprefix("torch.")],
    )


def _padded(model: Any, ids: Tensor, size: int, differs: Any) -> float | None:
    known = inspect.signature(model.forward).parameters
    if "attention_mask" not in known:
        return None
    before = ids[:, :1].expand(-1, PADDING)
    mask = torch.ones(1, PADDING + ids.shape[1], dtype=torch.long, device=ids.device)
    mask[:, :PADDING] = 0
    options = {"attention_mask": mask}
    if "position_ids" in known:
        options["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)
    return differs(_logprobs(model, torch.cat([before, ids], 1), size, **options))


def _regret(model: Any, prefix: Prefix, prompt: Tensor, answer: list[int], plain: Tensor) -> float:
    """The most that a token of greedy decoding falls short of the likeliest one."""
    new, logprobs = generated(model, prefix, prompt, len(answer)), plain
    if new[0].tolist() != answer:
        logprobs = _logprobs(model, torch.cat([prompt, new[:, :-1]], 1), new.shape[1])
    return (logprobs.amax(-1) - logprobs.gather(-1, new[0][:, None])[:, 0]).max().item()


def _logprobs(model: Any, ids: Tensor, size: int, **options: Any) -> Tensor:
    """Log-probabilities `[size, vocabulary]` at the last positions of the first row."""
    logits = model(input_ids=ids, use_cache=False, **options, **kept(model, size)).logits
    return logits[0, -size:].float().log_softmax(-1)
