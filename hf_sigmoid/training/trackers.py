"""accelerate's trackers: the values of `log.jsonl` where a team looks at them."""

import json
import uuid
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hf_sigmoid.errors import BadInput
from hf_sigmoid.files import write_text
from hf_sigmoid.training.run_config import flat
from hf_sigmoid.training.run_keys import Distil, Run

FILE = "trackers.json"  # what a resumed run needs to go on in the same place


def need(package: str, key: str) -> None:
    """Refuse before the work what would fail, or be left out, without a package.

    Raises:
        BadInput: names it.
    """
    if find_spec(package) is None:
        raise BadInput(f"{key}: {package} is not installed: pip install {package}")


class Trackers:
    """The trackers of a run; none asked for is none touched."""

    def __init__(self, accelerator: Any, run: Run | Distil, folder: Path, done: int):
        self.accelerator = accelerator
        if not isinstance(run, Run) or not run.log.trackers:
            return
        config = {key: _plain(value) for key, value in flat(run).items()}
        # Trackers are the main process's; the others must not write its file.
        options = _continued(folder, done) if accelerator.is_main_process else {}
        accelerator.init_trackers(run.log.project, config=config, init_kwargs=options)

    def log(self, step: int, values: dict[str, Any]) -> None:
        if self.accelerator.trackers:
            self.accelerator.log(numbers(values), step=step)

    def close(self) -> None:
        for tracker in self.accelerator.trackers:
            tracker.finish()


def numbers(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """Nested values by path; a list (of layers) by its mean and its largest."""
    found: dict[str, float] = {}
    for key, value in values.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict):
            found |= numbers(value, f"{name}/")
        elif isinstance(value, list):
            known = [v for v in value if isinstance(v, int | float)]
            if known:
                found |= {f"{name}/mean": sum(known) / len(known), f"{name}/max": max(known)}
        elif isinstance(value, int | float):
            found[name] = float(value)
    return found


def _continued(folder: Path, done: int) -> dict[str, dict[str, Any]]:
    """Options with which each tracker goes on behind step `done` instead of beginning anew."""
    file = folder / FILE
    try:
        name = json.loads(file.read_text(encoding="utf-8"))["run"]
    except (OSError, ValueError, KeyError):
        name = f"{folder.name}-{uuid.uuid4().hex[:8]}"
        write_text(file, json.dumps({"run": name}) + "\n")
    return {
        # Steps that a killed run had logged and that are taken again are dropped.
        "tensorboard": {"purge_step": done + 1},
        "wandb": {"id": name, "name": name, "resume": "allow"},
        "trackio": {"name": name, "resume": "allow"},
    }


def _plain(value: Any) -> int | float | str | bool:
    """TensorBoard takes nothing else."""
    return value if isinstance(value, int | float | str | bool) else json.dumps(value)
