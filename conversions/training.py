"""Conversion in the middle of training: the weights change their attention, the optimiser goes on.

Old parameters keep their moments, the per-query terms start without any, the step count goes on.
Two kinds of checkpoint are known:

* a checkpoint of `recipes/continue_pretrain.py` (`RUN/checkpoints/step_N`) becomes a run of its
  own, that the recipe resumes;
* a folder of accelerate's `save_state` becomes another one, for a program that adds the row
  numbers to its optimiser as a last group: `optimizer.add_param_group({"params": …})`.
"""

import json
import os
import pickle
import re
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from hf_sigmoid import fingerprints, parameters
from hf_sigmoid.conversions.companions import copy_companions
from hf_sigmoid.conversions.convert import convert
from hf_sigmoid.conversions.revert import REPORT
from hf_sigmoid.embedded import checkpoint
from hf_sigmoid.files import check_new_folder, new_folder

MANIFEST, CONFIG, LOG = "manifest.json", "config.yaml", "log.jsonl"  # of continue_pretrain.py
OPTIMIZER, SCHEDULER = "optimizer.bin", "scheduler.bin"  # of accelerate
WEIGHTS = "model.safetensors"


def is_training(source: str | Path) -> bool:
    """Is this folder a training checkpoint, rather than a model?"""
    folder = Path(source)
    return (folder / MANIFEST).is_file() or (folder / OPTIMIZER).is_file()


def convert_training(
    source: str | Path,
    target: str | Path,
    function: str,
    *,
    base: str | Path | None = None,
    **options,
) -> dict:
    """Convert a training checkpoint with its optimiser's state.

    Args:
        source: `RUN/checkpoints/step_N` of continue_pretrain.py, or a folder of accelerate's
            `save_state`.
        target: folder to write; must not exist or be empty. Of the first kind: a run, resumed by
            `continue_pretrain.py --config TARGET/config.yaml output_dir=TARGET`. Of the second: a
            state folder, and in it `model/`, which `from_pretrained` builds the model from.
        function: "ssmax" or "sigmoid".
        base: the second kind only: the checkpoint that training started from, for its config and
            tokenizer.
        options: of `convert`.

    Returns:
        The report of `convert`.

    Raises:
        ValueError: as `convert`; a folder that is no such checkpoint, an optimiser of another
            model; nothing has been written then.
    """
    source, target = Path(source).resolve(), Path(target).resolve()
    check_new_folder(target)
    if (source / MANIFEST).is_file():
        if base is not None:
            raise ValueError(f"--base is of an accelerate state folder, got {source}")
        return _convert_run(source, target, function, options)
    if (source / OPTIMIZER).is_file():
        if base is None:
            raise ValueError(
                f"{source} holds weights and an optimiser but no config: --base names the "
                "checkpoint that training started from"
            )
        return _convert_state(source, target, function, checkpoint(base), options)
    raise ValueError(
        f"expected a checkpoint of continue_pretrain.py ({MANIFEST}) or of accelerate "
        f"({OPTIMIZER}), got {source}"
    )


def _convert_run(source: Path, target: Path, function: str, options: dict) -> dict:
    import yaml

    manifest = json.loads((source / MANIFEST).read_text(encoding="utf-8"))
    for name, size in manifest["files"].items():
        found = (source / name).stat().st_size if (source / name).is_file() else 0
        if found != size:
            raise ValueError(f"{source} is damaged: {name} has {found} bytes, expected {size}")
    run = source.parents[1]
    for file in (CONFIG, LOG):
        if not (run / file).is_file():
            raise ValueError(f"{source} must be in its run's folder, got {run} without {file}")
    config = yaml.safe_load((run / CONFIG).read_text(encoding="utf-8"))
    with new_folder(target) as folder:
        step = folder / "checkpoints" / source.name
        step.parent.mkdir()
        report = convert(source / "model", step / "model", function, **options)
        for path in source.iterdir():
            if path.name not in ("model", MANIFEST):
                shutil.copy2(path, step / path.name)
        files = {str(p.relative_to(step)): p for p in sorted(step.rglob("*")) if p.is_file()}
        sizes = {name: path.stat().st_size for name, path in files.items()}
        hashes = {name: fingerprints.of_file(path) for name, path in files.items()}
        sealed = {**manifest, "files": sizes, "sha256": hashes}
        (step / MANIFEST).write_text(json.dumps(sealed, indent=1), encoding="utf-8")
        config.update(attn=None, output_dir=str(target))  # null: what the checkpoint says
        (folder / CONFIG).write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        lines = (run / LOG).read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / LOG).write_text("".join(lines[: manifest["step"]]), encoding="utf-8")
    return report


def _convert_state(source: Path, target: Path, function: str, base: str, options: dict) -> dict:
    optimizer = _read_state(source)
    scheduler = source / SCHEDULER
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / source.name  # the card's title
        model.mkdir()
        AutoConfig.from_pretrained(base).save_pretrained(model)
        AutoTokenizer.from_pretrained(base).save_pretrained(model)
        copy_companions(base, model)
        _link(source / WEIGHTS, model / WEIGHTS)
        with new_folder(target) as folder:
            report = convert(model, folder / "model", function, **options)
            report["source"] = str(source)  # not the folder that is gone in a moment
            for name in (REPORT, "report.md", "README.md"):
                file = folder / "model" / name
                file.write_text(file.read_text("utf-8").replace(str(model), str(source)), "utf-8")
            if not (folder / "model" / WEIGHTS).is_file():
                raise ValueError(f"{source}: its model is too large for the one file of accelerate")
            _link(folder / "model" / WEIGHTS, folder / WEIGHTS)
            for file in source.iterdir():
                if file.is_file() and file.name not in (WEIGHTS, OPTIMIZER, SCHEDULER):
                    shutil.copy2(file, folder / file.name)
            names = _shapes(folder / WEIGHTS)
            _add_group(optimizer, sum(f".{parameters.HOLDER}." in name for name in names))
            torch.save(optimizer, folder / OPTIMIZER)
            if scheduler.is_file():
                torch.save(_grown(_read(scheduler)), folder / SCHEDULER)
    return report


def _link(file: Path, target: Path) -> None:
    """The same file under another name; a copy where the file system or the platform has none."""
    try:
        os.link(file, target)
    except OSError:
        shutil.copyfile(file, target)


def _read_state(source: Path) -> dict:
    """The optimiser's state of one model that accelerate saved, checked against its weights."""
    names = sorted(path.name for path in source.iterdir())
    if several := [name for name in names if re.search(r"_\d+\.(safetensors|bin)$", name)]:
        raise ValueError(f"{source} must hold one model, optimiser and schedule, got {several}")
    if not (source / WEIGHTS).is_file():
        raise ValueError(f"{source} must hold {WEIGHTS}, got none: pickles are not read as weights")
    optimizer = _read(source / OPTIMIZER)
    shapes = {*_shapes(source / WEIGHTS).values()}
    for state in optimizer["state"].values():
        for slot, tensor in state.items():
            if isinstance(tensor, torch.Tensor) and tensor.dim() and (*tensor.shape,) not in shapes:
                raise ValueError(
                    f"{source / OPTIMIZER} is of another model: {slot} has the shape "
                    f"{list(tensor.shape)}, which no weight has"
                )
    return optimizer


def _read(file: Path) -> dict:
    """A state dict; only tensors and plain values are read of it, no code."""
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"{file} cannot be read: {reason}") from error


def _add_group(optimizer: dict, count: int) -> None:
    """A last group of `count` parameters without moments: the first's rate, no decay."""
    groups = optimizer["param_groups"]
    following = 1 + max(index for group in groups for index in group["params"])
    new = {**groups[0], "params": list(range(following, following + count))}
    if "weight_decay" in new:
        new["weight_decay"] = 0.0
    groups.append(new)


def _grown(scheduler: dict) -> dict:
    """A schedule's state, and of the schedules inside it, with the first group's entries again."""
    for key in ("base_lrs", "_last_lr", "lr_lambdas"):
        if scheduler.get(key):
            scheduler[key].append(scheduler[key][0])
    for inner in scheduler.get("_schedulers", []):
        _grown(inner)
    return scheduler


def _shapes(file: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors in a safetensors file."""
    with safe_open(file, "pt") as tensors:
        return {name: (*tensors.get_slice(name).get_shape(),) for name in list(tensors.keys())}
