"""Perplexity of a model on fixed windows of a text."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hf_sigmoid.conversions.reading import METRICS, feed, kind, losses, outputs, reader


def token_windows(
    tokenizer: PreTrainedTokenizerBase,
    text: str,
    length: int,
    count: int,
    *,
    seed: int | None = None,
    what: str = "text",
) -> Tensor:
    """`count` windows of `length` tokens, `[count, length]`, in the order of the text.

    They do not overlap; a text that has fewer windows gives those that it has.

    Args:
        seed: chooses them at random; None spreads them evenly over the text.
        what: what an error calls the text.

    Raises:
        ValueError: the text has fewer than `length` tokens.
    """
    ids = torch.tensor(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])
    available = len(ids) // length
    if available == 0:
        raise ValueError(
            f"the {what} must have at least {length} tokens, got {len(ids)}, less than one window"
        )
    if seed is None:
        chosen = torch.linspace(0, available - 1, min(count, available)).round().long()
    else:
        generator = torch.Generator().manual_seed(seed)
        chosen = torch.randperm(available, generator=generator)[:count].sort().values
    return ids[: available * length].view(available, length)[chosen]


def perplexity(
    model: PreTrainedModel,
    windows: Tensor,
    *,
    mask_token: int | None = None,
    batch_size: int = 4,
    name: str = "perplexity",
    progress: bool = True,
) -> float:
    """exp of the mean cross entropy of every token but the first of each window, in float32.

    Of another kind of model than a causal one, what `reading.losses` asks it.
    """
    length = windows.shape[1]
    return perplexities(
        model, windows, [length], mask_token=mask_token, batch_size=batch_size, name=name,
        progress=progress,
    )[length]  # fmt: skip


@torch.no_grad()
def perplexities(
    model: PreTrainedModel,
    windows: Tensor,
    lengths: Sequence[int],
    *,
    mask_token: int | None = None,
    batch_size: int = 4,
    name: str = "perplexity",
    progress: bool = True,
) -> dict[int, float]:
    """The perplexity of the first L tokens of each window, for every L of `lengths`.

    In one pass for a causal model, whose losses do not depend on what follows (but for RoPE types
    whose frequencies depend on the length of the whole run).

    Args:
        mask_token: of a masked language model, which is asked about masked tokens.
    """
    training = model.training
    model.eval()

    def means(ids: Tensor) -> Tensor:
        batches = tqdm(ids.split(batch_size), desc=name, disable=not progress)
        sums = (losses(model, batch, mask_token).cpu().double().sum(0) for batch in batches)
        return sum(sums) / len(ids)

    if kind(model) == "causal":
        each = means(windows)
        found = {length: each[: length - 1].mean().item() for length in lengths}
    else:
        found = {length: means(windows[:, :length]).mean().item() for length in lengths}
    model.train(training)
    return {length: math.exp(min(loss, 700.0)) for length, loss in found.items()}


class Measure:
    """The figure that a conversion is judged by, of the model's kind: `reading.METRICS`.

    Args:
        model: of this kind; its weights are not used.
        mask_token: of a masked language model.
    """

    ROWS = 8  # windows of which last hidden states are kept

    def __init__(
        self, model: PreTrainedModel, part: str | None, mask_token: int | None, progress: bool
    ):
        self.name = METRICS[kind(model)]
        self.of_features = kind(model) == "features"
        self.part, self.mask_token, self.progress = part, mask_token, progress
        self._hidden: dict[int, Tensor] = {}  # by length, of the model as it was

    def __call__(self, model: PreTrainedModel, windows: Tensor, name: str) -> float:
        """The less, the better; of features 0 the first time, with the model as it was."""
        if not self.of_features:
            return perplexity(
                model, windows, mask_token=self.mask_token, name=name, progress=self.progress
            )
        found = self._last_hidden(model, windows)
        before = self._hidden.setdefault(windows.shape[1], found)
        return ((found - before).norm() / before.norm()).item()

    @torch.no_grad()
    def _last_hidden(self, model: PreTrainedModel, windows: Tensor) -> Tensor:
        text = reader(model, self.part)
        batches = windows[: self.ROWS].split(4)
        return torch.cat([outputs(text(**feed(text, ids))).float().cpu() for ids in batches])
