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
from hf_sigmoid.parameters import divided_like
from hf_sigmoid.training.parallel import local, whole

MANIFEST = "manifest.json"
OPTIMIZER = "optimizer.safetensors"
DAMAGED = "damaged_"  # before a folder's name


@dataclass
class Checkpoint:
    """A complete checkpoint: `folder/model` loads with from_pretrained."""

    folder: Path
    manifest: dict[str, Any]

    @property
    def step(self) -> int:
        return self.manifest["step"]


class Failed(BadInput):
    """A checkpoint or model that could not be written; what was there before still is."""


def save(
    root: Path,
    *,
    step: int,
    keep: int,
    fill: Callable[[Path], None],
    state: dict[str, Any],
    main: bool = True,
    wait: Callable[[], None] = lambda: None,
) -> None:
    """Write `root/step_N` with `state` in its manifest, then delete all but the `keep` newest.

    Args:
        fill: writes the model and the optimiser into a folder; every process calls it.
        main: whether this process makes the folder and seals it.
        wait: a barrier of all processes.

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

    publish(root / f"step_{step:08d}", fill, seal=seal, main=main, wait=wait)
    if main:
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
            if (fault := _fault(folder, manifest)) is None:
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


def set_aside_damaged(root: Path, taken: Checkpoint | None) -> None:
    """Rename what is newer than the checkpoint that is gone on from: it was damaged."""
    for folder in root.glob("step_*"):
        if folder.is_dir() and taken and folder.name > taken.folder.name:
            rename(folder, DAMAGED + folder.name)


def remove_unfinished(root: Path) -> None:
    """Delete what a killed run was writing."""
    for folder in root.glob("*.tmp"):
        shutil.rmtree(folder, ignore_errors=True)


def publish(
    folder: Path,
    fill: Callable[[Path], None],
    *,
    seal: Callable[[Path], None] | None = None,
    main: bool = True,
    wait: Callable[[], None] = lambda: None,
) -> None:
    """Let every process `fill` a temporary folder, and give it its name once all is on disk.

    Raises:
        Failed: no space, no permission, a file-system error. The temporary folder is gone then,
            as it is after Ctrl-C.
    """
    temporary = folder.with_name(folder.name + ".tmp")
    try:
        if main:
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir(parents=True)
        wait()
        fill(temporary)
        wait()
        if main:
            if seal:
                seal(temporary)
            take_the_place(temporary, folder)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise Failed(f"{folder} could not be written: {error}") from error
    except KeyboardInterrupt:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def save_model(folder: Path, model: Any, tokenizer: Any) -> None:
    save_whole(folder, model)
    tokenizer.save_pretrained(folder)


def save_whole(folder: Path, model: Any, *, main: bool = True) -> None:
    """What `from_pretrained` loads; every process of a divided model calls it."""
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


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, model: Any, *, keep: bool = True
) -> dict[str, torch.Tensor]:
    """The optimiser's state as `parameter name/slot` -> whole tensor; every process must ask.

    Args:
        keep: False takes part in gathering and holds none of it.
    """
    names = {parameter: name for name, parameter in model.named_parameters()}
    tensors = {}
    for parameter, slots in optimizer.state.items():
        for slot, tensor in slots.items():
            gathered = whole(tensor.detach())
            if keep:
                tensors[f"{names[parameter]}/{slot}"] = gathered.contiguous().cpu()
    return tensors


def save_optimizer(folder: Path, optimizer: torch.optim.Optimizer, model: Any) -> None:
    save_file(optimizer_tensors(optimizer, model), folder / OPTIMIZER)


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
                if state:
                    optimizer.state[parameter] = {
                        slot: _as_kept(slot, tensor, parameter, group)
                        for slot, tensor in state.items()
                    }


def save_parts(file: Path, optimizer: torch.optim.Optimizer, model: Any) -> None:
    """What this process holds of parameters and optimiser state, as it is divided."""
    parts = {f"{name}/": local(p.detach()) for name, p in model.named_parameters()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for parameter, slots in optimizer.state.items():
        for slot, tensor in slots.items():
            parts[f"{names[parameter]}/{slot}"] = local(tensor.detach())
    save_file({key: part.contiguous().cpu() for key, part in parts.items()}, file)


@torch.no_grad()
def load_parts(file: Path, optimizer: torch.optim.Optimizer, model: Any) -> None:
    """Put back what `save_parts` wrote in the same layout."""
    parts = load_file(file)
    groups = {p: group for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        local(parameter).copy_(parts.pop(f"{name}/"))
        slots = {k.rsplit("/", 1)[1]: k for k in parts if k.rsplit("/", 1)[0] == name}
        state = {}
        for slot, key in slots.items():
            part = parts.pop(key)
            if part.shape == local(parameter).shape and slot != "step":
                part = _like_local(part, parameter)
            else:
                part = _as_kept(slot, part, parameter, groups[parameter])
            state[slot] = part
        if state:
            optimizer.state[parameter] = state


def _as_kept(
    slot: str, tensor: torch.Tensor, parameter: torch.Tensor, group: dict[str, Any]
) -> torch.Tensor:
    """A state tensor where its optimiser keeps it."""
    if slot == "step":
        # AdamW counts its steps on the CPU, unless one kernel does the whole update.
        return tensor.to(local(parameter).device) if group.get("fused") else tensor
    return divided_like(tensor, parameter)


def _like_local(part: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    part = part.to(local(parameter).device)
    if not hasattr(parameter, "placements"):
        return part
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        part, parameter.device_mesh, parameter.placements,
        run_check=False, shape=parameter.shape, stride=parameter.stride(),
    )  # fmt: skip


def _manifest(folder: Path) -> dict[str, Any]:
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    manifest["step"], manifest["files"], manifest["sha256"]
    return manifest


def _fault(folder: Path, manifest: dict[str, Any]) -> str | None:
    """What is wrong with the files of a checkpoint."""
    for name, size in manifest["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, expected {size}"
    for name, expected in manifest["sha256"].items():
        if fingerprints.of_file(folder / name) != expected:
            return f"{name} has changed since it was written (SHA-256)"
    return None


def _complete(root: Path) -> list[Checkpoint]:
    """Checkpoints whose files are all there, oldest first; their contents are not read."""
    found = []
    for folder in root.glob("step_*"):
        if folder.suffix == ".tmp":
            continue
        try:
            manifest = _manifest(folder)
            sizes = {name: (folder / name).stat().st_size for name in manifest["files"]}
        except (OSError, ValueError, KeyError, TypeError):
            continue
        if sizes == manifest["files"]:
            found.append(Checkpoint(folder, manifest))
    return sorted(found, key=lambda checkpoint: checkpoint.step)
