"""The folder of a run: what lies where, and whether it is of this very run."""

import json
from dataclasses import dataclass
from pathlib import Path

from hf_sigmoid.errors import BadInput
from hf_sigmoid.files import check_folder, is_unfinished, restore_replaced
from hf_sigmoid.run_lock import RunLock
from hf_sigmoid.training import checkpointing, run_config, run_log
from hf_sigmoid.training.run_keys import Distil, Run

RECORD = "training.json"  # in the final model's folder: how it was trained

# What may differ between a run and its resumption. With other steps the cosine is another one; how
# the blocks of a step are divided is up to the machines, as long as there are as many.
MAY_CHANGE = {
    "output_dir", "resume", "data.streams", "train.steps", "train.max_skipped",
    "train.batch_size", "train.grad_accumulation", "log.trackers",
    "log.project", *(f"checkpoint.{key}" for key in ("every", "keep", "state")),
}  # fmt: skip


@dataclass(frozen=True)
class RunFolder:
    """`output_dir`."""

    root: Path

    @classmethod
    def of(cls, run: Run | Distil) -> "RunFolder":
        return cls(Path(run.output_dir))

    @property
    def config(self) -> Path:
        return self.root / "config.yaml"

    @property
    def log(self) -> Path:
        return self.root / "log.jsonl"

    @property
    def checkpoints(self) -> Path:
        return self.root / "checkpoints"

    @property
    def final(self) -> Path:
        return self.root / "final"

    def finished_steps(self) -> int | None:
        """The steps of the final model, None if there is none."""
        if not self.final.exists():
            return None
        try:
            return int(json.loads((self.final / RECORD).read_text(encoding="utf-8"))["step"])
        except (OSError, ValueError, KeyError, TypeError):
            raise BadInput(
                f"{self.final}: expected the final model of a run with its {RECORD}, got one "
                "without: choose another output_dir"
            ) from None


def find(folder: RunFolder, run: Run | Distil) -> checkpointing.Checkpoint | None:
    """The checkpoint to go on from; refuses a folder that is not this run's."""
    root = folder.root
    check_folder(root, "output_dir")
    held = {file.name for file in root.iterdir()} if root.is_dir() else set()
    # A run killed at its very start leaves no more than its lock and an unfinished file.
    if all(name == RunLock.FILE or is_unfinished(name, folder.config) for name in held):
        return None
    if run.resume == "none":
        raise BadInput(
            f"output_dir {root} is not empty: expected a new or empty folder with resume=none"
        )
    if not folder.config.is_file():
        raise BadInput(f"output_dir {root} is not empty and holds no run of this recipe")
    try:
        saved = run_config.flat(run_config.load(folder.config, [], type(run)))
    except BadInput as error:
        raise BadInput(
            f"output_dir {root}: {folder.config} is not of a run of this recipe: {error}"
        ) from error
    for key, value in run_config.flat(run).items():
        if value != saved[key] and key not in MAY_CHANGE:
            raise BadInput(
                f"output_dir {root} holds a run with {key}={saved[key]}, not {value}: "
                "resume it with its own values or choose another output_dir"
            )
    restore_replaced(root)
    checkpoint = checkpointing.latest(folder.checkpoints)
    finished, asked = folder.finished_steps(), run.steps
    if finished is None or finished == asked:
        return checkpoint
    # A run that goes on replaces the finished model, one that starts again would lose it.
    if checkpoint is None:
        raise BadInput(
            f"output_dir {root} holds the final model of {finished} steps and no checkpoint to "
            f"go on from: expected train.steps={finished} or another output_dir, got {asked} steps"
        )
    if asked < finished:
        raise BadInput(
            f"train.steps: expected at least the {finished} steps of {folder.final}, got {asked}"
        )
    return checkpoint


def check(checkpoint: checkpointing.Checkpoint, run: Run | Distil, now: dict[str, object]) -> None:
    """Refuse to go on from a checkpoint that this run would not have written.

    Args:
        now: what the manifest would say: blocks_per_step, corpus_sha256, streams, layout, sources.
    """
    folder, was = checkpoint.folder, checkpoint.manifest
    if "streams" not in was:
        raise BadInput(f"{folder}: expected a checkpoint of this version, got an older one")
    changed = [name for name, value in was["sources"].items() if now["sources"][name] != value]
    for said, met in {
        f"{folder} took {was['blocks_per_step']} blocks a step, expected the same of processes × "
        f"train.batch_size × train.grad_accumulation, got "
        f"{now['blocks_per_step']}": was["blocks_per_step"] != now["blocks_per_step"],
        f"data.path: the text is not the one that {folder} was trained on": was["corpus_sha256"]
        != now["corpus_sha256"],
        f"data.streams: expected the {was['streams']} of {folder}, got {now['streams']}": was[
            "streams"
        ]
        != now["streams"],
        # Parts lie as the processes that wrote them held them.
        f"{folder} has a sharded state: expected the layout that wrote it, {was['layout']}, got "
        f"{now['layout']} (checkpoint.state=full fits every "
        "layout)": checkpoint.is_sharded and was["layout"] != now["layout"],
        f"model {run.model}: its {' and '.join(changed)} has changed since {folder} was written, "
        "expected the same": changed,
    }.items():
        if met:
            raise BadInput(said)
    run_log.check(folder.parents[1] / "log.jsonl", after=checkpoint.logged)
    if checkpoint.step > run.steps:
        raise BadInput(
            f"train.steps: expected at least the {checkpoint.step} steps of {folder}, got "
            f"{run.steps}"
        )
