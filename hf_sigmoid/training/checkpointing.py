"""Checkpoints that are either complete or not there, and nothing in them but safetensors and JSON.

A checkpoint is written beside its place, flushed to disk, sealed by a manifest with the size and
the SHA-256 of every file, and renamed. Whatever a killed run left behind has no manifest or the
wrong name and is never read; whatever has changed since is found by its hash.
"""

import contextlib
import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from hf_sigmoid import fingerprints
from hf_sigmoid.errors import BadInput
from hf_sigmoid.files import rename, restore_replaced, sync_tree, take_the_place, write_text
from hf_sigmoid.training.processes import Processes

MANIFEST = "manifest.json"
DAMAGED = "damaged_"  # before a folder's name


@dataclass
class Checkpoint:
    """A complete checkpoint: `folder/model` loads with from_pretrained."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return self.manifest["step"]

    @property
    def pending(self) -> dict[str, Any] | None:
        """The values of its step, if they are not in the log yet: it was not evaluated."""
        return self.manifest.get("pending")

    @property
    def logged(self) -> int:
        return self.step - bool(self.pending)

    @property
    def is_sharded(self) -> bool:
        return self.manifest.get("state") == "sharded"


class Failed(BadInput):
    """A checkpoint or model that could not be written; what was there before still is."""


def save(
    root: Path,
    fill: Callable[[Path], None],
    processes: Processes,
    *,
    step: int,
    keep: int,
    state: dict[str, Any],
) -> None:
    """Write `root/step_N` with `state` in its manifest, then delete all but the `keep` newest.

    Args:
        fill: writes the model and the optimiser into a folder; every process calls it.

    Raises:
        Failed: no space, no permission, a file-system error.
    """

    def seal(folder: Path) -> None:
        # The files first: a manifest on disk vouches for all of them.
        sync_tree(folder)
        files = {str(p.relative_to(folder)): p for p in sorted(folder.rglob("*")) if p.is_file()}
        manifest = {
            "step": step,
            "files": {name: path.stat().st_size for name, path in files.items()},
            "sha256": {name: fingerprints.of_file(path) for name, path in files.items()},
            **state,
        }
        (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")

    publish(root / f"step_{step:08d}", fill, processes, seal=seal)
    if processes.main:
        for old in _complete(root)[:-keep]:
            # Out of sight first: what is left of it, if it cannot be deleted, is no checkpoint.
            # Windows renames no folder with an open file, as the weights that were gone on from.
            with contextlib.suppress(PermissionError):
                shutil.rmtree(rename(old.folder, old.folder.name + ".tmp"), ignore_errors=True)


def latest(root: Path) -> Checkpoint | None:
    """The newest checkpoint under `root` whose files are what they were when it was written.

    A damaged one is named on stderr, set aside as `damaged_step_N`, and the one before it is taken.

    Raises:
        BadInput: there are checkpoints, and all of them are damaged.
    """
    restore_replaced(root)
    found = sorted(p for p in root.glob("step_*") if p.is_dir() and p.suffix != ".tmp")
    for folder in reversed(found):
        try:
            manifest = _manifest(folder)
            fault = _wrong_size(folder, manifest) or _changed(folder, manifest)
            if fault is None:
                return Checkpoint(folder, manifest)
        except (OSError, ValueError, KeyError, TypeError) as error:
            fault = f"its {MANIFEST} cannot be read ({type(error).__name__}: {error})"
        print(f"WARNING: checkpoint {folder} is damaged: {fault}", file=sys.stderr, flush=True)
    if found:
        raise BadInput(
            f"{root}: all of {len(found)} checkpoints are damaged, expected a whole one to go on "
            "from: choose another output_dir to begin anew"
        )
    return None


def last_one(root: Path, done: int) -> str:
    """Where to go back to, for weights after `done` steps that cannot go on."""
    last = latest(root)
    if last is None:
        return f"There is no checkpoint in {root}"
    same = ", and holds the very weights that this step began with" if last.step >= done else ""
    return f"The last checkpoint is {last.folder}{same}"


def clean_up(root: Path, taken: Checkpoint | None) -> None:
    """Delete what a killed run was writing, and rename damaged checkpoints behind the one taken."""
    for folder in root.glob("*.tmp"):
        shutil.rmtree(folder, ignore_errors=True)
    for folder in root.glob("step_*"):
        if folder.is_dir() and taken and folder.name > taken.folder.name:
            rename(folder, DAMAGED + folder.name)


def publish(
    folder: Path,
    fill: Callable[[Path], None],
    processes: Processes,
    *,
    seal: Callable[[Path], None] = lambda folder: None,
) -> None:
    """Let every process `fill` a temporary folder, and give it its name once all is on disk.

    Raises:
        Failed: no space, no permission, a file-system error. The temporary folder is gone then,
            as it is after any other error and Ctrl-C.
    """
    temporary = folder.with_name(folder.name + ".tmp")
    try:
        if processes.main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        processes.wait()
        fill(temporary)
        processes.wait()
        if processes.main:
            seal(temporary)
            take_the_place(temporary, folder)
    except BaseException as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError | SafetensorError):
            raise Failed(f"{folder} could not be written: {error}") from error
        raise
    processes.wait()


def save_whole(folder: Path, model: Any, *, main: bool = True) -> None:
    """Write what `from_pretrained` loads; every process of a divided model calls it."""
    model.save_pretrained(folder)
    if main:
        _drop_copies(folder, getattr(model, "all_tied_weights_keys", None) or {})


def _drop_copies(folder: Path, tied: dict[str, str]) -> None:
    """Leave each tied weight once: of shards transformers 5.24 writes both its names."""
    for file in folder.glob("*.safetensors"):
        with safe_open(file, framework="pt") as tensors:
            names, metadata = set(tensors.keys()), tensors.metadata()
        if copies := {name for name in names & tied.keys() if tied[name] in names}:
            kept = load_file(file)
            for name in copies:
                assert torch.equal(kept.pop(name), kept[tied[name]]), f"{name} is not tied any more"
            save_file(kept, file, metadata)
            index = folder / f"{file.name.split('-')[0]}.safetensors.index.json"
            if index.is_file():
                known = json.loads(index.read_text(encoding="utf-8"))
                for name in copies:
                    known["weight_map"].pop(name, None)
                write_text(index, json.dumps(known, indent=2) + "\n")


def _manifest(folder: Path) -> dict[str, Any]:
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    manifest["step"], manifest["files"], manifest["sha256"]
    return manifest


def _wrong_size(folder: Path, manifest: dict[str, Any]) -> str | None:
    for name, size in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, expected {size}"
    return None


def _changed(folder: Path, manifest: dict[str, Any]) -> str | None:
    for name, expected in manifest["sha256"].items():
        if fingerprints.of_file(folder / name) != expected:
            return f"{name} has changed since it was written (SHA-256)"
    return None


def _complete(root: Path) -> list[Checkpoint]:
    """Checkpoints whose files are all there, oldest first; their contents are not read."""
    found = []
    for folder in root.glob("step_*"):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            manifest = _manifest(folder)
            if folder.suffix != ".tmp" and not _wrong_size(folder, manifest):
                found.append(Checkpoint(folder, manifest))
    return sorted(found, key=lambda checkpoint: checkpoint.step)
