"""Attention of an answer's words to the needle, by layer and head.

Of the rows that predict the answer's tokens (the prompt's last id, and the answer's but its last),
with weights w_n of one head, and the keys S of the needles that the answer follows from:

    mass    Σ_{n in S} w_n               total    Σ_n w_n           share   mass / total
    n_eff   exp(−Σ p_n log p_n)          n_eff_2  1 / Σ p_n²        p_n = w_n / total

Rows of softmax sum to one, those of sigmoid attention do not: both mass and share say something.
n_eff is how many keys a row attends to, to be held against how many it sees. Only these few rows
are computed, against keys in the cache: [heads, answer, keys] of one layer at a time, on any
backend and at any length. Softmax models compute them by transformers' eager function, ours by
`hf_sigmoid/reference.py`.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hf_sigmoid import parameters
from hf_sigmoid.attention import ROWS
from hf_sigmoid.evals.samples import Sample
from hf_sigmoid.replace_attention import replaced

FIELDS = ("mass", "share", "total", "n_eff", "n_eff_2")


class Observer:
    """Sees the weights of forwards behind a cache.

    Raises:
        ValueError: a model without attention modules on transformers' interface.
    """

    def __init__(self, model: Any):
        self.model = model
        self.modules = [module for _, module in parameters.attention_modules(model)]
        if not self.modules:
            raise ValueError(f"{type(model).__name__} has no attention module that can be observed")
        # A composite model has a config for each part.
        self.configs = list({id(m.config): m.config for m in self.modules}.values())

    @contextmanager
    def watching(self, samples: Sequence[Sample]) -> Iterator[list[dict[str, Any]]]:
        """Observe one forward, whose rows are the samples' answers behind their prompts.

        Yields:
            A list that is filled on leaving: for each sample the `FIELDS`, each `[layers][heads]`,
            `layers`, the model's numbers of those that gave weights, and `keys`, the mean number
            that a row has before it (of which a sliding window hides some).
        """
        found: list[dict[str, Any]] = []
        layers: list[dict[str, Tensor] | None] = [None] * len(self.modules)
        with ExitStack() as stack:
            for config in self.configs:
                if config._attn_implementation not in parameters.FUNCTIONS:
                    stack.enter_context(replaced([config], "eager"))
            for number, module in enumerate(self.modules):
                note = partial(_note, layers, number, samples)
                stack.callback(module.register_forward_hook(note).remove)
                stack.callback(delattr, module, ROWS)
                setattr(module, ROWS, True)
            yield found
        seen = [number for number, layer in enumerate(layers) if layer is not None]
        numbers = [getattr(self.modules[number], "layer_idx", number) for number in seen]
        for row, sample in enumerate(samples):
            each = {f: [_rounded(layers[number][f][row]) for number in seen] for f in FIELDS}
            keys = len(sample.prompt) + (len(sample.answer) - 1) / 2
            found.append({**each, "layers": numbers, "keys": keys})


def statistics(weights: Tensor, needle: Tensor, asked: Tensor) -> dict[str, Tensor]:
    """The `FIELDS` `[rows, heads]`, means over the queries that are asked.

    Args:
        weights: `[rows, heads, queries, keys]`, not negative.
        needle: `[rows, keys]`, whether a key is one of the needle's.
        asked: `[rows, queries]`, whether a query predicts a token of the answer.
    """
    weights = weights.float()
    total = weights.sum(-1)
    mass = torch.einsum("bhmn,bn->bhm", weights, needle.to(weights.dtype))
    # A row without any weight attends to nothing: no share, no keys.
    p = weights / total.clamp(min=torch.finfo(torch.float32).tiny)[..., None]
    entropy, square = -torch.xlogy(p, p).sum(-1), p.square().sum(-1)
    some = total > 0
    each = {
        "mass": mass,
        "share": torch.where(some, mass / total, 0.0),
        "total": total,
        "n_eff": torch.where(some, entropy.exp(), 0.0),
        "n_eff_2": torch.where(some, 1 / square, 0.0),
    }
    part = asked / asked.sum(-1, keepdim=True)
    return {name: torch.einsum("bhm,bm->bh", value, part) for name, value in each.items()}


def _note(
    layers: list[dict[str, Tensor] | None], number: int, samples: Sequence[Sample],
    module: Any, given: Any, output: Any,
) -> None:  # fmt: skip
    """A forward hook: reduce a layer's weights to what is kept of them."""
    weights = output[1] if isinstance(output, tuple) and len(output) > 1 else None
    if not isinstance(weights, Tensor) or weights.dim() != 4:
        return
    queries, keys = weights.shape[-2:]
    # A sliding window's cache has forgotten the keys before.
    first = len(samples[0].prompt) - 1 + queries - keys
    needle = torch.zeros(len(samples), keys, dtype=torch.bool, device=weights.device)
    asked = torch.zeros(len(samples), queries, device=weights.device)
    for row, sample in enumerate(samples):
        asked[row, : len(sample.answer)] = 1
        for start, stop in sample.support:
            needle[row, max(0, start - first) : max(0, stop - first)] = True
    layers[number] = {k: v.cpu() for k, v in statistics(weights, needle, asked).items()}


def _rounded(values: Tensor) -> list[float]:
    """With as many digits as mean something."""
    return [float(f"{each:.5g}") for each in values.tolist()]
