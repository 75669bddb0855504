"""Back to softmax, exactly where nothing but the row numbers was trained."""

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_sigmoid import configuration, fingerprints, parameters
from hf_sigmoid.checkpoint_files import files_sha256
from hf_sigmoid.conversions import folding
from hf_sigmoid.conversions.models import weights
from hf_sigmoid.rope import restore_rope

REPORT = "report.json"  # what a conversion leaves in its folder


def revert(model: PreTrainedModel) -> PreTrainedModel:
    """Take the function, its row numbers and a changed RoPE out of a model; its weights stay.

    Raises:
        ValueError: the model is not converted.
    """
    holds = any(True for _ in parameters.holders(model))
    if not holds and not configuration.find_section(model.config):
        raise ValueError(
            f"the model must be a converted one, got {type(model).__name__} on softmax"
        )
    restore_rope(model)
    configuration.configure(model, "softmax")
    return model


def fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 of a model's weights without its row numbers: that of the softmax model in it."""
    return hashed(model, without=f".{parameters.HOLDER}.")


def hashed(model: PreTrainedModel, *, without: str | None = None) -> str:
    """SHA-256 of a model's weights: names, types, shapes and bytes."""
    named = weights(model)
    return fingerprints.of_tensors((n, t) for n, t in named if without is None or without not in n)


def restore_weights(model: PreTrainedModel, folder: str | Path) -> dict[str, Tensor]:
    """Take what was folded into the projections of a reverted model back out, in place.

    If projections were trained, gains and temperatures are divided out of whatever they are now.

    Returns:
        The tensors that were put back as they were before the folding, by name.

    Raises:
        ValueError: the folder does not say what was folded into its projections, or a file in it is
            damaged.
    """
    folded = folding.Folded.load(folder)
    if folded is None and getattr(model.config, folding.RECORD, False):
        raise ValueError(
            f"{folder}: gains and temperatures were folded into its projections, and the file that "
            f"says which, {folding.FILE}, is missing: it is in the folder that was distilled"
        )
    if hasattr(model.config, folding.RECORD):
        delattr(model.config, folding.RECORD)
    if folded is None:
        return {}
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"{folder} has {folding.FILE}: revert it without --device-map")
    if folded.originals and folded.untouched(model):
        folding.restore(model, folded)
        return folded.originals
    places = folding.find_places(model, torch.arange(4)[None])
    folding.unfold(model, places, folded)
    return {}


def check_untrained(
    model: PreTrainedModel, folder: str | Path, written: str | Path | None = None
) -> bool:
    """Are the weights of a converted checkpoint those that it was converted from?

    Args:
        model: the softmax model that is left of it.
        folder: the converted checkpoint.
        written: where the model has been written, to compare its files with the source's, which
            may mix dtypes; None compares the weights in memory.

    Raises:
        ValueError: the folder does not say what it was converted from.
    """
    report = Path(folder) / REPORT
    known = json.loads(report.read_text(encoding="utf-8")) if report.is_file() else {}
    if "weights_sha256" not in known:
        raise ValueError(
            f"{folder} has no {REPORT} that says what its weights were: it was not written by "
            "`hf-sigmoid convert`, or trained and saved elsewhere since"
        )
    if written is not None and "files_sha256" in known:  # earlier releases did not record it
        return files_sha256(written) == known["files_sha256"]
    return fingerprint(model) == known["weights_sha256"]
