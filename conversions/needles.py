"""Needles found: how often, and how surely, a model gives the code that its prompt hides.

Every prompt is made before the first model is run, so that all models see the same.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_sigmoid.conversions.haystack import Haystack, Sample
from hf_sigmoid.evals.prefix import kept

DEPTHS = (0.0, 0.5, 1.0)


def prompts(
    haystack: Haystack,
    lengths: Sequence[int],
    count: int,
    positions: int | None,
    *,
    depths: Sequence[float] = DEPTHS,
) -> tuple[dict[int, list[Sample]], dict[int, str]]:
    """`count` prompts at each depth by length, and why there are none of other lengths."""
    made: dict[int, list[Sample]] = {}
    left_out: dict[int, str] = {}
    for length in lengths:
        try:
            samples = [
                haystack.sample(length=length, depth=depth, seed=0, index=index)
                for depth in depths
                for index in range(count)
            ]
        except ValueError as error:
            left_out[length] = str(error)
            continue
        needed = length + max(len(sample.answer) for sample in samples)
        if positions and needed > positions:
            left_out[length] = f"with its answer it has {needed} tokens, the model {positions}"
        else:
            made[length] = samples
    return made, left_out


def found(
    model: PreTrainedModel,
    samples: Sequence[Sample],
    *,
    batch_size: int = 4,
    name: str = "needles",
    progress: bool = True,
) -> dict[str, float]:
    """Accuracy and mean log-probability of the answers to prompts of one length."""
    starts = range(0, len(samples), batch_size)
    scores = [
        score
        for start in tqdm(starts, desc=name, disable=not progress)
        for score in score_answers(model, samples[start : start + batch_size])
    ]
    return {
        "accuracy": sum(score["correct"] for score in scores) / len(scores),
        "logprob": math.fsum(score["logprob"] for score in scores) / len(scores),
    }


@torch.no_grad()
def score_answers(model: Any, samples: Sequence[Sample]) -> list[dict[str, Any]]:
    """For each of some samples of one length: `logprob` (mean over the answer) and `correct`."""
    scores: dict[int, dict[str, Any]] = {}
    # Most tokenizers give every code the same number of tokens, but it is not a law.
    for size in {len(sample.answer) for sample in samples}:
        group = [i for i, sample in enumerate(samples) if len(sample.answer) == size]
        # The last answer token is predicted, never read.
        ids = torch.tensor(
            [samples[i].prompt + samples[i].answer[:-1] for i in group], device=model.device
        )
        answers = torch.tensor([samples[i].answer for i in group], device=model.device)
        logits = (
            model(input_ids=ids, use_cache=False, **kept(model, size)).logits[:, -size:].float()
        )
        logprobs = logits.log_softmax(-1).gather(-1, answers[..., None])[..., 0].mean(-1)
        correct = (logits.argmax(-1) == answers).all(-1)
        for i, logprob, right in zip(group, logprobs.tolist(), correct.tolist(), strict=True):
            scores[i] = {"logprob": logprob, "correct": right}
    return [scores[i] for i in range(len(samples))]
