"""Loss of every token of some windows of a text, by its position.

A window is read in chunks, each behind the keys and values of those before it, so that no more
than a chunk's logits exist at once. Loss is −log p of each token but the first, in nats.
"""

import hashlib
import os
import random
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from hf_sigmoid.errors import BadInput
from hf_sigmoid.evals.prefix import Prefix, kept

CHUNK = 512  # tokens, whose logits are made together
FOLDER = "loss"


def windows(ids: list[int], length: int, count: int, seed: int) -> list[list[int]]:
    """`count` windows of `length` ids that do not overlap, at random places of a text.

    Raises:
        BadInput: a text that has fewer.
    """
    available = len(ids) // length
    if available < count:
        raise BadInput(
            f"--loss: {count} windows of {length} tokens were asked for, the haystack has "
            f"{available} of its {len(ids)}: ask for fewer, shorter ones, or give a longer text"
        )
    rng = random.Random(f"{seed}/loss/{length}")
    chosen = sorted(rng.sample(range(available), count))
    return [ids[at * length : (at + 1) * length] for at in chosen]


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


class Losses:
    """The windows' losses of each model in a folder: a file for each, so that a run can go on."""

    def __init__(self, folder: Path, config: str):
        self.folder, self.config = folder / FOLDER, config

    def file(self, name: str, number: int) -> Path:
        """Of a model's window. Names may hold anything, so the folder is named by their hash."""
        digest = hashlib.sha256(name.encode()).hexdigest()[:12]
        return self.folder / digest / f"window_{number}.safetensors"

    def has(self, name: str, number: int) -> bool:
        return self.file(name, number).exists()

    def write(self, name: str, number: int, losses: Tensor, weights: str | None) -> None:
        """Whole or not at all."""
        file = self.file(name, number)
        file.parent.mkdir(parents=True, exist_ok=True)
        about = {"name": name, "config": self.config, "weights": str(weights)}
        temporary = file.with_name(f".{file.name}")
        save_file({"loss": losses}, temporary, metadata=about)
        os.replace(temporary, file)

    def read(self, name: str, count: int) -> Tensor | None:
        """Losses `[count, L − 1]` of a model, None if a window is missing."""
        files = [self.file(name, number) for number in range(count)]
        if not count or not all(file.exists() for file in files):
            return None
        try:
            return torch.stack([load_file(file)["loss"] for file in files])
        except (SafetensorError, KeyError, RuntimeError) as error:
            raise BadInput(f"{files[0].parent}: damaged losses, delete them: {error}") from error
