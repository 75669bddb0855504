"""One summary of the samples of several folders."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hf_sigmoid.errors import BadInput
from hf_sigmoid.evals import loss, run_file
from hf_sigmoid.evals.store import Key, Store
from hf_sigmoid.evals.summary import summarise


def merged(folders: Sequence[Path]) -> dict[str, Any]:
    """The summary of all samples of some folders.

    Raises:
        BadInput: folders without samples, or of evaluations that asked otherwise.
    """
    runs = []
    for folder in folders:
        if (held := run_file.read(folder)) is None:
            raise BadInput(f"{folder}: expected a folder of an evaluation, found no run.json in it")
        runs.append((folder, held))
    first_folder, first = runs[0]
    samples: dict[Key, dict[str, Any]] = {}
    models: dict[str, dict[str, Any]] = {}
    losses: dict[str, Any] = {}
    windows: dict[str, list[str]] = {}
    for folder, held in runs:
        if held["config"] != first["config"]:
            differing = [
                f"{key} {first[key]!r} and {held[key]!r}"
                for key in ("seed", "haystack", "dtype", "device", "scores")
                if first[key] != held[key]
            ]
            raise BadInput(
                f"{first_folder} and {folder} hold evaluations that asked otherwise "
                f"({', '.join(differing) or 'prompts or decoys'}): they cannot be compared"
            )
        for model in held["models"]:
            known = models.setdefault(model["name"], model)
            if known["weights"] != model["weights"]:
                raise BadInput(
                    f"{folder}: {model['name']} has other weights than in another folder"
                )
            if known["checks"] and known["checks"]["passed"] and not model["checks"]["passed"]:
                models[model["name"]] = known | {"checks": model["checks"]}
            if model["extrapolates"]:
                models[model["name"]] = models[model["name"]] | {"extrapolates": True}
            if model["windows"] and model["name"] not in losses:
                owner = [model["name"], model["weights"], held["config"]]
                written = loss.Losses(folder, owner)
                windows[model["name"]] = written.known(model["windows"])
                losses[model["name"]] = written.read(windows[model["name"]])
        for key, sample in Store(folder, held["config"], {}).done.items():
            samples.setdefault(key, sample)
    if not samples:
        raise BadInput(f"{first_folder}: expected samples of an evaluation, found none")
    about = {key: value for key, value in first.items() if key != "models"}
    found = [model | {"windows": windows.get(name, [])} for name, model in models.items()]
    return summarise(list(samples.values()), found, about, losses)
