"""run.json: what a folder's samples were asked of, and what the models' checks found."""

import json
from pathlib import Path
from typing import Any

from hf_sigmoid.errors import BadInput
from hf_sigmoid.evals.whole_file import write_whole

FILE = "run.json"


def write(folder: Path, about: dict[str, Any], models: list[dict[str, Any]]) -> None:
    """The models of earlier runs that asked the same are kept, those of the same name replaced."""
    held = read(folder)
    if held is None or held["config"] != about["config"]:
        held = {"models": []}
    known = {model["name"]: model for model in held["models"]}
    known |= {model["name"]: model for model in models}
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps({**about, "models": list(known.values())}, indent=1) + "\n"
    write_whole(folder / FILE, lambda file: file.write_text(text, encoding="utf-8"))


def read(folder: Path) -> dict[str, Any] | None:
    """None of a folder without one.

    Raises:
        BadInput: a file that is not ours.
    """
    file = folder / FILE
    try:
        held = json.loads(file.read_text(encoding="utf-8"))
        if isinstance(held["config"], str) and all(each["name"] for each in held["models"]):
            return held
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError):
        pass
    raise BadInput(f"{file}: expected what an evaluation writes there: choose another folder")
