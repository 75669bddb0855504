"""Back to softmax, exactly where nothing but the row numbers was trained."""

import hashlib
import json
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_sigmoid import configuration, parameters
from hf_sigmoid.conversions import folding
from hf_sigmoid.conversions.models import weights
from hf_sigmoid.conversions.rope import restore_rope

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
    digest = hashlib.sha256()
    for name, tensor in weights(model):
        if without is None or without not in name:
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def restore_weights(
    model: PreTrainedModel, folder: str | Path, *, approximate: bool = False
) -> bool:
    """Take what was folded into the projections of a reverted model back out, in place.

    Args:
        approximate: also of a folder that does not say what it was converted from.

    Returns:
        Are the weights those of the softmax model that `folder` was converted from? If projections
        were trained, gains and temperatures are divided out of whatever they are now.

    Raises:
        ValueError: the folder does not say what it was converted from, or what was folded into its
            projections, or a file in it is damaged.
    """
    folded = folding.Folded.load(folder)
    if folded is None and getattr(model.config, folding.RECORD, False):
        raise ValueError(
            f"{folder}: gains and temperatures were folded into its projections, and the file that "
            f"says which, {folding.FILE}, is missing: it is in the folder that was distilled"
        )
    if hasattr(model.config, folding.RECORD):
        delattr(model.config, folding.RECORD)
    unknown = approximate and not (Path(folder) / REPORT).is_file()
    if folded is None:
        return not unknown and check_untrained(model, folder)
    if any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(f"{folder} has {folding.FILE}: revert it without --device-map")
    if folded.originals and folded.untouched(model):
        folding.restore(model, folded)
        return not unknown and check_untrained(model, folder)
    places = folding.find_places(model, torch.arange(4)[None])
    folding.unfold(model, places, folded)
    return False


def check_untrained(model: PreTrainedModel, folder: str | Path) -> bool:
    """Are the weights of a converted checkpoint those that it was converted from?

    Raises:
        ValueError: the folder does not say what it was converted from.
    """
    report = Path(folder) / REPORT
    recorded = json.loads(report.read_text()).get("weights_sha256") if report.is_file() else None
    if recorded is None:
        raise ValueError(
            f"{folder} has no {REPORT} that says what its weights were: it was not written by "
            "`hf-sigmoid convert`, or trained and saved elsewhere since"
        )
    return fingerprint(model) == recorded
