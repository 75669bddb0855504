"""Checkpoints that are either complete or not there, and nothing in them but safetensors and JSON.

A checkpoint is written beside its place, flushed to disk, sealed by a manifest that lists its
files, and renamed. Whatever a killed run left behind has no manifest or the wrong name and is
never read.
"""

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

MANIFEST = "manifest.json"
OPTIMIZER = "optimizer.safetensors"


@dataclass
class Checkpoint:
    """A complete checkpoint: `folder/model` loads with from_pretrained."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return self.manifest["step"]


def save(
    root: Path,
    *,
    step: int,
    keep: int,
    fill: Callable[[Path], None],
    state: dict[str, Any],
) -> None:
    """Write `root/step_N` with `state` in its manifest, then delete all but the `keep` newest.

    Args:
        fill: writes the model and the optimiser into a folder.
    """

    def write(folder: Path) -> None:
        fill(folder)
        sizes = {
            str(path.relative_to(folder)): path.stat().st_size
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
        # The files first: a manifest on disk vouches for all of them.
        sync_tree(folder)
        manifest = {"step": step, "files": sizes, **state}
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")

    publish(root / f"step_{step:08d}", write)
    for old in _complete(root)[:-keep]:
        shutil.rmtree(old.folder)


def latest(root: Path) -> Checkpoint | None:
    """The newest complete checkpoint under `root`."""
    complete = _complete(root)
    return complete[-1] if complete else None


def remove_unfinished(root: Path) -> None:
    """Delete what a killed run was writing."""
    for folder in root.glob("*.tmp"):
        shutil.rmtree(folder)


def save_model(folder: Path, model: Any, tokenizer: Any) -> None:
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def publish(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder and give it its name once everything is on disk."""
    temporary = folder.with_name(folder.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    write(temporary)
    sync_tree(temporary)
    # An incomplete checkpoint, or the final model of fewer steps.
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(temporary, folder)
    _sync(folder.parent)


def write_text(file: Path, content: str) -> None:
    """Replace a file in one piece."""
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text(content, encoding="utf-8")
    os.replace(temporary, file)


def save_optimizer(folder: Path, optimizer: torch.optim.Optimizer, model: Any) -> None:
    save_file(optimizer_tensors(optimizer, model), folder / OPTIMIZER)


def optimizer_tensors(optimizer: torch.optim.Optimizer, model: Any) -> dict[str, torch.Tensor]:
    """The optimiser's state as `parameter name/slot` -> tensor."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    return {
        f"{names[parameter]}/{slot}": tensor.detach().contiguous().cpu()
        for parameter, slots in optimizer.state.items()
        for slot, tensor in slots.items()
    }


def load_optimizer(file: Path, optimizer: torch.optim.Optimizer, model: Any) -> None:
    """Put back what `optimizer_tensors` took out."""
    names = {parameter: name for name, parameter in model.named_parameters()}
    with safe_open(file, framework="pt") as tensors:
        slots: dict[str, list[str]] = {}
        for key in tensors.keys():  # noqa: SIM118 (a safetensors file is not iterable)
            name, slot = key.rsplit("/", 1)
            slots.setdefault(name, []).append(slot)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                name = names[parameter]
                # A parameter that never had a gradient has no state.
                state = {s: tensors.get_tensor(f"{name}/{s}") for s in slots.get(name, [])}
                if not state:
                    continue
                # AdamW counts its steps on the CPU; the moments live with their parameter.
                optimizer.state[parameter] = {
                    slot: tensor if slot == "step" else tensor.to(parameter.device)
                    for slot, tensor in state.items()
                }


def sync_tree(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _complete(root: Path) -> list[Checkpoint]:
    """Complete checkpoints, oldest first."""
    found = []
    for folder in root.glob("step_*"):
        if folder.suffix == ".tmp":
            continue
        try:
            manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            sizes = {name: (folder / name).stat().st_size for name in manifest["files"]}
        except (OSError, ValueError):
            continue
        if sizes == manifest["files"]:
            found.append(Checkpoint(folder, manifest))
    return sorted(found, key=lambda checkpoint: checkpoint.step)
