"""Conversion in the middle of training: the weights change their attention, the optimiser goes on.

Old parameters keep their moments, the row numbers start without any, the step count goes on. Two
kinds of checkpoint are known:

* a checkpoint of `recipes/continue_pretrain.py` (`RUN/checkpoints/step_N`) becomes a run of its
  own, that the recipe resumes;
* a folder of accelerate's `save_state` becomes another one, for a program that adds the row
  numbers to its optimiser as a last group: `optimizer.add_param_group({"params": …})`.
"""

import json
import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoTokenizer

from hf_sigmoid import parameters
from hf_sigmoid.conversions.convert import check_target, convert, written
from hf_sigmoid.conversions.embedded import checkpoint

MANIFEST, CONFIG, LOG = "manifest.json", "config.yaml", "log.jsonl"  # of continue_pretrain.py
OPTIMIZER, SCHEDULER = "optimizer.bin", "scheduler.bin"  # of accelerate
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")


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
    source, target = Path(source), Path(target).resolve()
    check_target(target)
    if (source / MANIFEST).is_file():
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
    run = source.parents[1]
    for file in (CONFIG, LOG):
        if not (run / file).is_file():
            raise ValueError(f"{source} must be in its run's folder, got {run} without {file}")
    config = yaml.safe_load((run / CONFIG).read_text(encoding="utf-8"))
    with written(target) as folder:
        step = folder / "checkpoints" / source.name
        step.parent.mkdir()
        report = convert(source / "model", step / "model", function, **options)
        for path in source.iterdir():
            if path.name not in ("model", MANIFEST):
                shutil.copy2(path, step / path.name)
        sizes = {
            str(path.relative_to(step)): path.stat().st_size
            for path in sorted(step.rglob("*"))
            if path.is_file()
        }
        (step / MANIFEST).write_text(json.dumps({**manifest, "files": sizes}, indent=1))
        config.update(attn=None, output_dir=str(target))  # null: what the checkpoint says
        (folder / CONFIG).write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")
        lines = (run / LOG).read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / LOG).write_text("".join(lines[: manifest["step"]]), encoding="utf-8")
    return report


def _convert_state(source: Path, target: Path, function: str, base: str, options: dict) -> dict:
    weights = next((source / name for name in WEIGHTS if (source / name).is_file()), None)
    if weights is None:
        raise ValueError(
            f"{source} must hold {' or '.join(WEIGHTS)}, got none: pickles are not read"
        )
    optimizer = torch.load(source / OPTIMIZER, map_location="cpu", weights_only=True)
    names = _names(source)
    held = sum(len(group["params"]) for group in optimizer["param_groups"])
    if held > len(names):
        raise ValueError(
            f"{source / OPTIMIZER} is of {held} parameters, the weights are {len(names)}"
        )
    with tempfile.TemporaryDirectory() as temporary:
        model = Path(temporary) / "model"
        model.mkdir()
        AutoConfig.from_pretrained(base).save_pretrained(model)
        AutoTokenizer.from_pretrained(base).save_pretrained(model)
        for file in source.glob("model*.safetensors*"):
            (model / file.name).symlink_to(file.resolve())
        with written(target) as folder:
            report = convert(model, folder / "model", function, **options)
            added = [name for name in _names(folder / "model") if _is_number(name)]
            for file in source.iterdir():
                if not file.name.startswith("model") and file.is_file():
                    shutil.copy2(file, folder / file.name)
            for file in (folder / "model").glob("model*.safetensors*"):
                os.link(file, folder / file.name)
            _add_group(optimizer, len(added))
            torch.save(optimizer, folder / OPTIMIZER)
            if (source / SCHEDULER).is_file():
                scheduler = torch.load(source / SCHEDULER, map_location="cpu", weights_only=True)
                for key in ("base_lrs", "_last_lr", "lr_lambdas"):
                    if scheduler.get(key):
                        scheduler[key].append(scheduler[key][0])
                torch.save(scheduler, folder / SCHEDULER)
    return report


def _add_group(optimizer: dict, count: int) -> None:
    """A last group of `count` parameters without moments: the first's rate, no decay."""
    groups = optimizer["param_groups"]
    following = 1 + max(index for group in groups for index in group["params"])
    new = {**groups[0], "params": list(range(following, following + count))}
    if "weight_decay" in new:
        new["weight_decay"] = 0.0
    groups.append(new)


def _names(folder: Path) -> list[str]:
    """The names of the tensors in a folder's safetensors files."""
    names = []
    for file in sorted(folder.glob("model*.safetensors")):
        with safe_open(file, "pt") as tensors:
            names += tensors.keys()
    return names


def _is_number(name: str) -> bool:
    return f".{parameters.HOLDER}." in name
