"""Layers that stay softmax in a sigmoid model: which, and how many.

    auto      by the relative error of the layer's output, on what it gets in the softmax model
    kl        by what making the layer softmax again takes off KL(softmax model ‖ sigmoid model)
              on a text; all other layers are sigmoid then
    needle    the same on the tokens that answer needle prompts

Few layers and heads look things up (arXiv:2404.15574, 2602.11374); the last ranking finds them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_sigmoid import parameters
from hf_sigmoid.conversions.plan import Plan, layer_indices
from hf_sigmoid.conversions.reading import feed, kind
from hf_sigmoid.evals.probe import needle_prompts
from hf_sigmoid.evals.scoring import filled_up

RANKINGS = ("auto", "needle", "kl")
SAMPLES, SEED = 2, 1  # needles at each depth; none of those that a report asks


@dataclass(frozen=True)
class Keep:
    """So many layers, or as many as take away a share of the divergence, by one ranking."""

    ranking: str
    count: int | None = None
    share: float | None = None

    def __str__(self) -> str:
        return f"{self.ranking}:{self.count if self.share is None else f'{self.share:.4g}%'}"


def parse(given: str | int) -> Keep | None:
    """ "needle:4" -> 4 layers, "kl:90%" -> as many as take away 90 %; 0 -> none; 4 -> "auto:4".

    Raises:
        ValueError: anything else.
    """
    if isinstance(given, int) and not isinstance(given, bool) and given >= 0:
        return Keep("auto", given) if given else None
    ranking, _, number = str(given).partition(":")
    if ranking in RANKINGS and number.isdigit() and int(number) >= 1:
        return Keep(ranking, int(number))
    share = number.removesuffix("%")
    if ranking in RANKINGS[1:] and share != number and share.isdigit() and 0 < int(share) < 100:
        return Keep(ranking, share=int(share))
    raise ValueError(
        "--keep-softmax: expected auto:K, needle:K or kl:K with K of at least 1 layer, or "
        f"needle:P% or kl:P% of the divergence, got {given!r}"
    )


@dataclass(frozen=True)
class Asked:
    """Token ids `[B, T]` and the places of the logits that count, `[B, T]`."""

    ids: Tensor
    counts: Tensor


def rows(ranking: str, tokenizer: PreTrainedTokenizerBase, text: str, ids: Tensor) -> Asked:
    """What a ranking reads.

    Args:
        text: that needles are hidden in.
        ids: windows of it `[B, T]`.

    Raises:
        ValueError: no needle can be hidden at this length.
    """
    if ranking == "kl":
        return Asked(ids, torch.ones_like(ids, dtype=torch.bool))
    length = ids.shape[1]
    made, why = needle_prompts(text, tokenizer, [length], samples=SAMPLES, seed=SEED)
    if not made:
        raise ValueError(
            f"--keep-softmax needle: no prompt of {length} tokens can be made: {why[length]}; "
            "expected a longer --window, or the ranking kl"
        )
    samples = made[length]
    prompts = torch.tensor(filled_up([each.prompt + each.answer[:-1] for each in samples]))
    counts = torch.zeros_like(prompts, dtype=torch.bool)
    for row, sample in zip(counts, samples, strict=True):
        row[length - 1 : length - 1 + len(sample.answer)] = True
    return Asked(prompts, counts)


@torch.no_grad()
def log_probs(model: PreTrainedModel, asked: Asked) -> Tensor:
    """`[places, vocabulary]` of the places that count, on the CPU.

    Raises:
        ValueError: a model that is no causal language model.
    """
    if kind(model) != "causal":
        raise ValueError(
            "--keep-softmax needle and kl compare next-token distributions, "
            f"{type(model).__name__} has none: expected auto:K"
        )
    found = []
    for ids, counts in zip(asked.ids.split(2), asked.counts.split(2), strict=True):
        logits = model(**feed(model, ids)).logits
        found.append(logits[counts.to(logits.device)].float().log_softmax(-1).cpu())
    return torch.cat(found)


def best(
    model: PreTrainedModel, chosen: Plan, keep: Keep, asked: Asked, softmax: Tensor, *,
    progress: bool,
) -> tuple[list[int], dict]:  # fmt: skip
    """The layers to keep, the best first, and figures for the report.

    Args:
        model: sigmoid in every layer of the plan; it is left so.
        softmax: `log_probs` of the softmax model.
    """
    indices = layer_indices(model, chosen.part)
    layers = sorted({indices[name] for name in chosen.converted})
    check_leaves_one(keep, len(layers))

    def divergence(kept: list[int]) -> float:
        with _softmax_in(model, indices, kept):
            found = log_probs(model, asked)
        return (softmax.exp() * (softmax - found)).sum(-1).mean().item()

    every = divergence([])
    bar = tqdm(layers, desc=f"layers by {keep.ranking}", disable=not progress)
    gains = {layer: every - divergence([layer]) for layer in bar}
    ranked = sorted(layers, key=lambda layer: -gains[layer])
    kept, left = ranked[: keep.count], None
    if keep.share is None:
        left = divergence(kept)
    else:
        for count in range(1, len(ranked)):
            kept, left = ranked[:count], divergence(ranked[:count])
            if every - left >= keep.share / 100 * every:
                break
    return kept, {
        "ranking": keep.ranking, "kept": kept, "divergence_without": every,
        "divergence_with": left, "taken_off_by_each": {str(k): v for k, v in gains.items()},
    }  # fmt: skip


def check_leaves_one(keep: Keep, layers: int) -> None:
    if keep.count is not None and keep.count >= layers:
        raise ValueError(f"--keep-softmax must leave a layer of {layers}, got {keep.count}")


@contextmanager
def _softmax_in(
    model: PreTrainedModel, indices: dict[str, int | None], kept: list[int]
) -> Iterator[None]:
    """While it lasts these layers run softmax."""
    held = [
        parameters.holder_of(module)
        for name, module in parameters.holders(model)
        if indices.get(name) in kept
    ]
    functions = [holder.function for holder in held]
    try:
        for holder in held:
            holder.function = "softmax"
        yield
    finally:
        for holder, function in zip(held, functions, strict=True):
            holder.function = function
