"""The earlier part of a run in its folder: found, and checked to be of this very run."""

import json
from pathlib import Path

from hf_sigmoid import files
from hf_sigmoid.errors import BadInput
from hf_sigmoid.files import restore_replaced
from hf_sigmoid.run_lock import RunLock
from hf_sigmoid.training import checkpointing, run_config, run_log
from hf_sigmoid.training.run_keys import Distil, Run

CHECKPOINTS, FINAL, CONFIG, LOG = "checkpoints", "final", "config.yaml", "log.jsonl"
RECORD = "training.json"  # in the final model's folder: how it was trained

# What may differ between a run and its resumption. With other steps the cosine is another one; how
# the blocks of a step are divided is up to the machines, as long as there are as many.
MAY_CHANGE = {
    "output_dir", "resume", "data.streams", "train.steps", "train.max_skipped",
    "train.batch_size", "train.grad_accumulation", "log.trackers",
    "log.project", *(f"checkpoint.{key}" for key in ("every", "keep", "state")),
}  # fmt: skip


def find(folder: Path, run: Run | Distil) -> checkpointing.Checkpoint | None:
    """The checkpoint in `folder` to go on from; refuses a folder that is not this run's."""
    files.check_folder(folder, "output_dir")
    held = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    # A run killed at its very start leaves no more than its lock and an unfinished file.
    if not held - {RunLock.FILE, f"{CONFIG}.tmp"}:
        return None
    if run.resume == "none":
        raise BadInput(
            f"output_dir {folder} is not empty: expected a new or empty folder with resume=none"
        )
    saved_file = folder / CONFIG
    if not saved_file.is_file():
        raise BadInput(f"output_dir {folder} is not empty and holds no run of this recipe")
    try:
        saved = run_config.flat(run_config.load(saved_file, [], type(run)))
    except BadInput as error:
        raise BadInput(
            f"output_dir {folder}: {saved_file} is not of a run of this recipe: {error}"
        ) from error
    for key, value in run_config.flat(run).items():
        if value != saved[key] and key not in MAY_CHANGE:
            raise BadInput(
                f"output_dir {folder} holds a run with {key}={saved[key]}, not {value}: "
                "resume it with its own values or choose another output_dir"
            )
    restore_replaced(folder)
    checkpoint = checkpointing.latest(folder / CHECKPOINTS)
    finished, asked = finished_steps(folder), run.steps
    if finished is None or finished == asked:
        return checkpoint
    # A run that goes on replaces the finished model, one that starts again would lose it.
    if checkpoint is None:
        raise BadInput(
            f"output_dir {folder} holds the final model of {finished} steps and no checkpoint to "
            f"go on from: expected train.steps={finished} or another output_dir, got {asked} steps"
        )
    if asked < finished:
        raise BadInput(
            f"train.steps: expected at least the {finished} steps of {folder / FINAL}, got {asked}"
        )
    return checkpoint


def finished_steps(folder: Path) -> int | None:
    """The steps of the final model in `folder`, None if there is none."""
    final = folder / FINAL
    if not final.exists():
        return None
    try:
        return int(json.loads((final / RECORD).read_text(encoding="utf-8"))["step"])
    except (OSError, ValueError, KeyError, TypeError):
        raise BadInput(
            f"{final}: expected the final model of a run with its {RECORD}, got one without: "
            "choose another output_dir"
        ) from None


def check(
    checkpoint: checkpointing.Checkpoint,
    run: Run | Distil,
    *,
    blocks_per_step: int,
    corpus_sha256: str,
    streams: int,
    layout: str,
    sources: dict[str, str],
) -> None:
    """Refuse to go on from a checkpoint that this run would not have written."""
    folder, manifest = checkpoint.folder, checkpoint.manifest
    if "streams" not in manifest:
        raise BadInput(
            f"{folder}: expected a checkpoint of this version of the recipe, got an older one"
        )
    if manifest["blocks_per_step"] != blocks_per_step:
        raise BadInput(
            f"{folder} took {manifest['blocks_per_step']} blocks a step, expected the same of "
            "processes × train.batch_size × train.grad_accumulation, got "
            f"{blocks_per_step}"
        )
    if manifest["corpus_sha256"] != corpus_sha256:
        raise BadInput(f"data.path: the text is not the one that {folder} was trained on")
    if manifest["streams"] != streams:
        raise BadInput(
            f"data.streams: expected the {manifest['streams']} of {folder}, got {streams}"
        )
    # Parts lie as the processes that wrote them held them.
    if manifest.get("state") == "sharded" and manifest["layout"] != layout:
        raise BadInput(
            f"{folder} has a sharded state: expected the layout that wrote it, "
            f"{manifest['layout']}, got {layout} (checkpoint.state=full fits every layout)"
        )
    for what, expected in manifest["sources"].items():
        if sources[what] != expected:
            raise BadInput(
                f"model {run.model}: its {what} has changed since {folder} was written, expected "
                "the same"
            )
    run_log.check(folder.parents[1] / LOG, after=checkpoint.step - bool(manifest.get("pending")))
    if checkpoint.step > run.steps:
        raise BadInput(
            f"train.steps: expected at least the {checkpoint.step} steps of {folder}, got "
            f"{run.steps}"
        )
