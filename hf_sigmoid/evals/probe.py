"""Needles asked of a model in memory: no folder, no tokenizer files, no generation, no cache.

    prompts, left_out = needle_prompts(text, tokenizer, [512, 1024], samples=4)
    scores = score(model, prompts[512])                  # (right, mean log-probability) of each

The samples are those of a task of `hf-sigmoid eval`, and an answer is judged as there.
A sample is read in one forward, so that processes which share a sharded model take the same
number of steps, as long as each has as many batches.
"""

from collections.abc import Sequence
from typing import Any

import torch
from tqdm import tqdm

from hf_sigmoid.evals.prefix import kept
from hf_sigmoid.evals.prompts import PromptBuilder
from hf_sigmoid.evals.samples import Sample
from hf_sigmoid.evals.scoring import filled_up, judge

DEPTHS = (0.0, 0.5, 1.0)


def needle_prompts(
    text: str,
    tokenizer: Any,
    lengths: Sequence[int],
    *,
    depths: Sequence[float] = DEPTHS,
    samples: int = 1,
    seed: int = 0,
    positions: int | None = None,
    prompt: str = "auto",
    task: str = "single",
) -> tuple[dict[int, list[Sample]], dict[int, str]]:
    """The samples of each length, `samples` at each depth, and why other lengths have none.

    Args:
        text: what the needles are hidden in.
        lengths: tokens of the prompts.
        positions: how many the model has, for a prompt and its answer; None: any number.
        prompt: `base`, `chat`, or `auto`: chat if the tokenizer has a template.
        task: of `hf-sigmoid eval`, one that has a depth.

    Raises:
        ValueError: a text that no needle can be hidden in, a tokenizer that cannot be used.
    """
    builder = PromptBuilder(tokenizer, text, prompt=prompt)
    made: dict[int, list[Sample]] = {}
    left_out: dict[int, str] = {}
    for length in lengths:
        try:
            found = [
                builder.build(task, length=length, depth=depth, seed=seed, index=index)
                for depth in depths
                for index in range(samples)
            ]
        except ValueError as error:
            left_out[length] = str(error)
            continue
        needed = length + max(len(sample.answer) for sample in found)
        if positions and needed > positions:
            left_out[length] = f"with its answer it has {needed} tokens, the model {positions}"
        else:
            made[length] = found
    return made, left_out


@torch.no_grad()
def score(
    model: Any, samples: Sequence[Sample], batch_size: int = 4, *, progress: str | None = None
) -> list[tuple[bool, float]]:
    """A verdict on each sample: is its answer right, and its tokens' mean log-probability.

    Args:
        samples: of one length.
        progress: the name of a progress bar; None: no bar.
    """
    was_training = model.training
    model.eval()
    found = []
    starts = range(0, len(samples), batch_size)
    try:
        for start in tqdm(starts, desc=progress, disable=progress is None):
            batch = samples[start : start + batch_size]
            answers = [sample.answer for sample in batch]
            rows = [sample.prompt + sample.answer[:-1] for sample in batch]
            ids = torch.tensor(filled_up(rows), device=model.device)
            size = max(map(len, answers))
            logits = model(input_ids=ids, use_cache=False, **kept(model, size)).logits[:, -size:]
            judged = judge(logits.float(), answers)
            found += [
                (right, total / len(answer))
                for (right, total), answer in zip(judged, answers, strict=True)
            ]
    finally:
        model.train(was_training)
    return found
