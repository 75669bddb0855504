"""The weights in a checkpoint's safetensors files, by name, as they lie there.

A model in memory has one dtype; the files that it was loaded from may mix them (float32 norms,
routers or heads in a bfloat16 model). What a command leaves alone is written as it came.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME
from transformers.utils.hub import cached_file

from hf_sigmoid import fingerprints
from hf_sigmoid.files import write_file, write_text
from hf_sigmoid.layer_types import HOLDER

FLOATING = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
}  # fmt: skip


def weight_files(source: str | Path) -> list[Path]:
    """The safetensors files of a folder, or of a hub id in the cache, sorted; there may be none."""
    names = (SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME)
    found = (
        cached_file(str(source), name, _raise_exceptions_for_missing_entries=False)
        for name in names
    )
    first = next((Path(file) for file in found if file is not None), None)
    if first is None or first.name == SAFE_WEIGHTS_NAME:
        return [] if first is None else [first]
    shards = json.loads(first.read_text(encoding="utf-8"))["weight_map"].values()
    return [Path(cached_file(str(source), shard)) for shard in sorted({*shards})]


def weights_of(source: str | Path) -> dict[str, tuple[Path, str]]:
    """File and dtype, as safetensors names it, of every weight; per-query terms left out."""
    found = {}
    for file in weight_files(source):
        with safe_open(file, "pt") as tensors:
            for name in list(tensors.keys()):
                if f".{HOLDER}." not in name:
                    found[name] = (file, tensors.get_slice(name).get_dtype())
    return found


def dtypes_of(source: str | Path) -> set[torch.dtype]:
    """The floating dtypes of a checkpoint's weights."""
    kinds = {kind for _, kind in weights_of(source).values()}
    return {FLOATING[kind] for kind in kinds if kind in FLOATING}


def saved_dtype(source: str | Path) -> torch.dtype | None:
    """The one dtype of a checkpoint's weights, None if it has several.

    Its config may name another, which transformers' "auto" would round the weights to.
    """
    found = dtypes_of(source)
    return next(iter(found)) if len(found) == 1 else None


def files_sha256(source: str | Path) -> str:
    """SHA-256 of the weights as they lie in the files: names, types, shapes and bytes."""
    return fingerprints.of_tensors(_tensors(source))


def give_back(
    folder: Path,
    source: str | Path,
    *,
    cast: bool = False,
    originals: dict[str, Tensor] | None = None,
    unused: Sequence[str] = (),
) -> None:
    """Write every weight of `folder` that a command left alone as it lies in its source's files.

    A weight was left alone if it is the source's, in the dtype that it was held in meanwhile. Where
    all have the source's dtypes in the end, config.json goes on naming the source's.

    Args:
        cast: also give those that changed the dtype of the source's.
        originals: by name, of weights that the source itself holds changed.
        unused: names of weights of the source that the model has no place for.
    """
    originals = originals or {}
    places = weights_of(source)
    _carry_over(folder, [name for name in unused if name in places], places)
    total = 0
    for file in weight_files(folder):
        written, changed = load_file(file), False
        for name, tensor in written.items():
            if name not in places and name not in originals:
                continue
            original = originals.get(name)
            if original is None:
                place, kind = places[name]
                if FLOATING.get(kind, tensor.dtype) == tensor.dtype:
                    continue  # nothing to give back, so its bytes are not read
                original = _tensor(place, name)
            if original.dtype == tensor.dtype or original.shape != tensor.shape:
                continue
            if _same_bits(original.to(tensor.dtype), tensor):
                written[name], changed = original, True
            elif cast:
                written[name], changed = tensor.to(original.dtype), True
        total += sum(tensor.nbytes for tensor in written.values())
        if changed:
            _replace(file, written)
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        content = json.loads(index.read_text(encoding="utf-8"))
        content.setdefault("metadata", {})["total_size"] = total
        write_text(index, json.dumps(content, indent=2, sort_keys=True) + "\n")

    if len(dtypes_of(source)) > 1 and dtypes_of(folder) <= dtypes_of(source):
        _keep_dtype_names(folder, source)


def _carry_over(folder: Path, names: list[str], places: dict[str, tuple[Path, str]]) -> None:
    """Add weights to the last of a folder's files, as they lie in theirs."""
    files = weight_files(folder)
    if not names or not files:
        return
    tensors = load_file(files[-1])
    tensors |= {name: _tensor(places[name][0], name) for name in names}
    _replace(files[-1], tensors)
    index = folder / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        content = json.loads(index.read_text(encoding="utf-8"))
        content["weight_map"] |= dict.fromkeys(names, files[-1].name)
        write_text(index, json.dumps(content, indent=2, sort_keys=True) + "\n")


def _keep_dtype_names(folder: Path, source: str | Path) -> None:
    """The dtypes that a source's config names, also of parts, in the folder's; none if it has none.

    The model may have been held in the widest of several.
    """
    file = folder / CONFIG_NAME
    origin = cached_file(str(source), CONFIG_NAME, _raise_exceptions_for_missing_entries=False)
    if not file.is_file() or origin is None:
        return
    config = json.loads(file.read_text(encoding="utf-8"))
    pending = [(config, json.loads(Path(origin).read_text(encoding="utf-8")))]
    while pending:
        ours, theirs = pending.pop()
        ours.pop("dtype", None)
        name = theirs.get("dtype", theirs.get("torch_dtype"))
        ours |= {"dtype": name} if name is not None else {}
        pending += [
            (value, theirs[key])
            for key, value in ours.items()
            if isinstance(value, dict) and isinstance(theirs.get(key), dict)
        ]
    write_text(file, json.dumps(config, indent=2, sort_keys=True) + "\n")


def _tensors(source: str | Path) -> Iterator[tuple[str, Tensor]]:
    for name, (file, _) in sorted(weights_of(source).items()):
        yield name, _tensor(file, name)


def _tensor(file: Path, name: str) -> Tensor:
    with safe_open(file, "pt") as tensors:
        return tensors.get_tensor(name)


def _same_bits(one: Tensor, other: Tensor) -> bool:
    one, other = (t.contiguous().flatten().view(torch.uint8) for t in (one, other))
    return torch.equal(one, other)


def _replace(file: Path, tensors: dict[str, Tensor]) -> None:
    write_file(file, lambda place: save_file(tensors, place, {"format": "pt"}))
