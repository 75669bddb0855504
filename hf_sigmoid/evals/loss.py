"""Loss of every token of some windows of a text, by its position.

A window is read in chunks, each behind the keys and values of those before it, so that no more
than a chunk's logits exist at once. Loss is −log p of each token but the first, in nats.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_sigmoid.errors import BadInput
from hf_sigmoid.evals.prefix import Prefix, kept
from hf_sigmoid.files import write_file

CHUNK = 512  # tokens, whose logits are made together
FOLDER = "loss"


def windows(
    ids: list[int], length: int, count: int, seed: int, start: Sequence[int] = ()
) -> list[list[int]]:
    """`count` windows of `length` ids that do not overlap, at random places of a text.

    Args:
        start: ids that each window begins with, such as BOS; they are of its length.

    Raises:
        BadInput: a text that has fewer.
    """
    own = length - len(start)
    if own < 2:
        raise BadInput(f"--loss-length: expected at least {len(start) + 2}, got {length}")
    available = len(ids) // own
    if available < count:
        raise BadInput(
            f"--loss: {count} windows of {length} tokens were asked for, the haystack has "
            f"{available} of its {len(ids)}: ask for fewer, shorter ones, or give a longer text"
        )
    rng = random.Random(f"{seed}/loss/{length}")
    chosen = sorted(rng.sample(range(available), count))
    return [[*start, *ids[at * own : (at + 1) * own]] for at in chosen]


@torch.no_grad()
def losses(model: Any, ids: list[int]) -> Tensor:
    """Loss `[L − 1]` in float32 of one window of L ids, on the CPU.

    Raises:
        NoCache: the model cannot go on from what it has read.
    """
    row = torch.tensor([ids], device=model.device)
    first = row[:, :CHUNK]
    result = model(input_ids=first, use_cache=True, **kept(model, first.shape[1]))
    logits, prefix = result.logits, Prefix.after(model, result, first)
    found = []
    for start in range(0, len(ids), CHUNK):
        targets = row[0, start + 1 : start + 1 + CHUNK]
        if start:
            logits = prefix.extend(row[:, start : start + CHUNK], keep=CHUNK)
        found.append(
            torch.nn.functional.cross_entropy(
                logits[0, : len(targets)].float(), targets, reduction="none"
            ).cpu()
        )
    return torch.cat(found)


def token_losses(model: Any, ids: Tensor) -> Tensor:
    """Cross entropy `[B, T − 1]` of every token of ids `[B, T]` but the first of each row.

    In float32, on the device of the model's logits, in one forward without a cache.
    """
    return _cross_entropy(model, ids, "none").view(len(ids), -1)


@torch.no_grad()
def summed_loss(model: Any, ids: Tensor) -> tuple[float, int]:
    """Nats of all tokens of windows `[B, T]`, or of one `[T]`, and how many tokens those are.

    The mean over many windows, however they are shared out, is all nats by all tokens.
    """
    ids = ids if ids.dim() == 2 else ids[None]
    return _cross_entropy(model, ids, "sum").item(), ids[:, 1:].numel()


def _cross_entropy(model: Any, ids: Tensor, reduction: str) -> Tensor:
    # The first weight of an offloaded model has no device of its own; hooks move what it gets.
    ids = ids.to("cpu" if model.device.type == "meta" else model.device)
    logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float().flatten(0, 1)
    return torch.nn.functional.cross_entropy(
        logits, ids[:, 1:].flatten().to(logits.device), reduction=reduction
    )


class Losses:
    """Losses of windows by their digests, a file for each, so that a run can go on.

    Args:
        folder: of the run.
        owner: everything that a loss depends on but the window: model, weights, dtype.
    """

    def __init__(self, folder: Path, owner: Sequence[str | None]):
        self.owner = list(owner)
        # Names may hold anything.
        self.folder = folder / FOLDER / digest(self.owner)

    def known(self, digests: Iterable[str]) -> list[str]:
        """Those of some windows that have been read."""
        return [each for each in digests if self._file(each).exists()]

    def write(self, window: str, losses: Tensor) -> None:
        """Whole or not at all."""
        self.folder.mkdir(parents=True, exist_ok=True)
        about = {"owner": json.dumps(self.owner)}
        write_file(
            self._file(window), lambda file: save_file({"loss": losses}, file, metadata=about)
        )

    def read(self, digests: Sequence[str]) -> Tensor | None:
        """Losses `[windows, L − 1]`; None of no windows.

        Raises:
            BadInput: one that is missing or damaged.
        """
        if not digests:
            return None
        try:
            return torch.stack([load_file(self._file(each))["loss"] for each in digests])
        except (OSError, SafetensorError, KeyError, RuntimeError) as error:
            raise BadInput(f"{self.folder}: missing or damaged losses: {error}") from error

    def _file(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"


def digest(value: Sequence) -> str:
    """The hash of a window's ids, or of an owner."""
    return hashlib.sha256(json.dumps(list(value)).encode()).hexdigest()[:16]
