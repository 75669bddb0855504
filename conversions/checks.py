"""Objections to a conversion, made before its work."""

import shutil
from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedModel

from hf_sigmoid import parameters, support
from hf_sigmoid.checkpoint_files import files_sha256, weights_of
from hf_sigmoid.conversions.models import find_part, model_class
from hf_sigmoid.conversions.plan import check_config, check_init, parse_layers
from hf_sigmoid.conversions.reading import check_reads_text
from hf_sigmoid.files import existing_parent
from hf_sigmoid.layer_types import layer_count


def check_arguments(
    function: str, init: str | None, keep_softmax: int, window: int, windows: int
) -> None:
    """What can be said against arguments alone."""
    if function not in parameters.FUNCTIONS:
        raise ValueError(f"--to must be one of {', '.join(parameters.FUNCTIONS)}, got {function!r}")
    if init is not None:
        check_init(function, init)
    if keep_softmax and (function != "sigmoid" or keep_softmax < 0):
        raise ValueError(
            f"--keep-softmax ranks layers for sigmoid, auto:1 or more, got {keep_softmax} for "
            f"{function!r}"
        )
    if window < 4 or windows < 1:
        raise ValueError(
            f"expected a window of at least 4 tokens and 1 window, got {window} and {windows}"
        )


def check_fitting(function: str, calibration: object, stats: object, seed: int | None) -> None:
    """What only sigmoid's start reads is refused for ssmax, which would not look at it."""
    fitting = {"--calibrate": calibration, "--stats": stats, "--seed": seed}
    given = [name for name, value in fitting.items() if value is not None]
    if given and function == "ssmax":
        raise ValueError(f"{' and '.join(given)} fit sigmoid's row numbers, got --to ssmax")


def check_questions(lengths: Sequence[int] | None, needle: int, longest: int | None) -> None:
    """Lengths that a model can read, and a number of needles."""
    if needle < 0:
        raise ValueError(f"--needle must be a number of needles, got {needle}")
    for length in lengths or ():
        if length < 4 or (longest is not None and length > longest):
            most = "" if longest is None else f" and at most the model's {longest} positions"
            raise ValueError(f"--lengths must be at least 4 tokens{most}, got {length}")


def check_source(
    config, function: str, layers: Sequence[int] | str | None, part: str | None
) -> tuple[str | None, Sequence[int] | None]:
    """Everything that can be said against a model from its config; the part, layers as numbers."""
    cls = model_class(config)
    check_reads_text(cls)
    if isinstance(layers, str):
        layers = parse_layers(layers, layer_count(find_part(config, part)[1]))
    part, layers = check_config(config, layers, part)
    if part is None:
        support.check_class(cls, config, function)
    return part, layers


def check_disk(target: Path, model: PreTrainedModel) -> None:
    """Room for a copy of the model, before the work and not after it."""
    parent = existing_parent(target)
    needed = sum(tensor.nbytes for tensor in model.state_dict().values())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise ValueError(
            f"the output needs {needed / 1e9:.2f} GB, {parent} has {free / 1e9:.2f} GB"
        )


def check_weights_left_alone(folder: Path, source: str) -> str:
    """The hash of the weights in a converted folder's files, row numbers left out.

    Raises:
        ValueError: a weight lies there in other bits than in the source's files.
    """
    ours = files_sha256(folder)
    # A model may call its weights otherwise than old files do: names say nothing there.
    if weights_of(folder).keys() == weights_of(source).keys() and ours != files_sha256(source):
        raise ValueError(f"the weights of {source} must not change, and would: nothing was written")
    return ours
