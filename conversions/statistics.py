"""The sums of a calibration in a file, so that other fits need no second pass over the text."""

import json
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from hf_sigmoid.conversions.calibrate import NormalEquations
from hf_sigmoid.files import write_file

PARTS = ("gram", "moment", "square")


def save(
    sums: dict[str, NormalEquations],
    path: str | Path,
    *,
    weights: str,
    tokens: int,
    text: str | None,
) -> None:
    """Write the sums of a model with this fingerprint, of so many tokens of the text of a hash."""
    tensors = {
        f"{name}.{part}": getattr(each, part) for name, each in sums.items() for part in PARTS
    }
    metadata = {
        "format": "pt",
        "weights_sha256": weights,
        "tokens": str(tokens),
        **({} if text is None else {"text_sha256": text}),
        "rows": json.dumps({name: each.rows for name, each in sums.items()}),
    }
    write_file(Path(path), lambda place: save_file(tensors, place, metadata))


def load(path: str | Path, *, weights: str) -> tuple[dict[str, NormalEquations], int, str | None]:
    """The sums, how many tokens they are of, and the SHA-256 of the text.

    Raises:
        ValueError: not such a file, or one of a model with other weights.
    """
    if not Path(path).is_file():
        raise ValueError(f"the statistics must be a file, got {path}, which does not exist")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            names = list(file.keys())
            tensors = {name: file.get_tensor(name) for name in names}
    except SafetensorError as error:
        raise ValueError(f"{path}: cannot be read as statistics: {error}") from error
    if "weights_sha256" not in metadata:
        raise ValueError(f"{path} holds no calibration statistics")
    if metadata["weights_sha256"] != weights:
        raise ValueError(
            f"{path} is of another model: its weights have the SHA-256 "
            f"{metadata['weights_sha256'][:12]}…, these have {weights[:12]}…"
        )
    rows = json.loads(metadata["rows"])
    sums = {
        name: NormalEquations(*(tensors[f"{name}.{part}"] for part in PARTS), rows[name])
        for name in rows
    }
    return sums, int(metadata["tokens"]), metadata.get("text_sha256")
