"""run.json: what a folder's samples were asked of, and what the models' checks found."""

import json
from pathlib import Path
from typing import Any

from hf_sigmoid import files
from hf_sigmoid.errors import BadInput
from hf_sigmoid.evals import store
from hf_sigmoid.files import write_file
from hf_sigmoid.run_lock import RunLock

FILE, SUMMARY = "run.json", "summary.json"


def check_folder(folder: Path) -> None:
    """Refuse an --out that cannot be written, or that holds others' files.

    Raises:
        BadInput: there is something in it, and no evaluation or report of ours.
    """
    files.check_folder(folder, "--out")
    held = {file.name for file in folder.iterdir()} if folder.is_dir() else set()
    if read(folder) is None:
        read(folder, SUMMARY)  # of `eval report`
    # What a run may leave that was killed before it had written anything else.
    begun = {RunLock.FILE, f".{FILE}", *(part.name for part in folder.glob(store.PARTS))}
    if held - begun and not held & {FILE, SUMMARY, store.FILE}:
        raise BadInput(
            f"--out {folder} is not empty and holds no evaluation: expected a new or empty folder, "
            "or one that an evaluation has written"
        )


def write(folder: Path, about: dict[str, Any], models: list[dict[str, Any]]) -> None:
    """The models of earlier runs that asked the same are kept, those of the same name replaced."""
    held = read(folder)
    if held is None or held["config"] != about["config"]:
        held = {"models": []}
    known = {model["name"]: model for model in held["models"]}
    known |= {model["name"]: model for model in models}
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**about, "models": list(known.values())}, indent=1) + "\n"
    write_file(folder / FILE, lambda file: file.write_text(text, encoding="utf-8"))


def read(folder: Path, name: str = FILE) -> dict[str, Any] | None:
    """None of a folder without one.

    Raises:
        BadInput: a file that is not ours.
    """
    file = folder / name
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(held["config"], str) and all(each["name"] for each in held["models"]):
            return held
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise BadInput(f"{file}: expected what an evaluation writes there: choose another folder")
