"""Whether a folder holds an earlier part of this very run."""

from pathlib import Path

import checkpointing
import run_config
from errors import BadInput
from run_config import Run

CHECKPOINTS, CONFIG = "checkpoints", "config.yaml"

# What may differ between a run and its resumption. With other steps the cosine is another one.
MAY_CHANGE = {"output_dir", "resume", "checkpoint.every", "checkpoint.keep", "train.steps"}


def find(folder: Path, run: Run) -> checkpointing.Checkpoint | None:
    """The checkpoint in `folder` to go on from; refuses a folder that is not this run's."""
    if folder.exists() and not folder.is_dir():
        raise BadInput(f"output_dir {folder} is a file, expected a folder")
    # A run killed at its very start leaves no more than an unfinished file.
    present = [p for p in folder.iterdir() if p.suffix != ".tmp"] if folder.exists() else []
    if not present:
        return None
    if run.resume == "none":
        raise BadInput(
            f"output_dir {folder} is not empty: expected a new or empty folder with resume=none"
        )
    saved_file = folder / CONFIG
    if not saved_file.is_file():
        raise BadInput(f"output_dir {folder} is not empty and holds no run of this recipe")
    saved = run_config.flat(run_config.load(saved_file, []))
    for key, value in run_config.flat(run).items():
        if value != saved[key] and key not in MAY_CHANGE:
            raise BadInput(
                f"output_dir {folder} holds a run with {key}={saved[key]}, not {value}: "
                "resume it with its own values or choose another output_dir"
            )
    return checkpointing.latest(folder / CHECKPOINTS)


def check(
    checkpoint: checkpointing.Checkpoint, run: Run, *, blocks_per_step: int, corpus_sha256: str
) -> None:
    """Refuse to go on from a checkpoint that this run would not have written."""
    folder, manifest = checkpoint.folder, checkpoint.manifest
    if manifest["blocks_per_step"] != blocks_per_step:
        raise BadInput(
            f"{folder} took {manifest['blocks_per_step']} blocks a step, expected the same of "
            "processes × train.batch_size × train.grad_accumulation, got "
            f"{blocks_per_step}"
        )
    if manifest["corpus_sha256"] != corpus_sha256:
        raise BadInput(f"data.path: the text is not the one that {folder} was trained on")
    if checkpoint.step > run.train.steps:
        raise BadInput(
            f"train.steps: expected at least the {checkpoint.step} steps of {folder}, got "
            f"{run.train.steps}"
        )
