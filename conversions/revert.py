"""Back to softmax, exactly where nothing but the row numbers was trained."""

import hashlib
import json
from pathlib import Path

import torch
from transformers import PreTrainedModel

from hf_sigmoid import configuration, parameters

REPORT = "report.json"  # what a conversion leaves in its folder


def revert(model: PreTrainedModel) -> PreTrainedModel:
    """Take the function and its row numbers out of a model, in place; its weights stay.

    Raises:
        ValueError: the model is not converted.
    """
    if not any(True for _ in parameters.holders(model)) and not getattr(
        model.config, "hf_sigmoid", None
    ):
        raise ValueError(
            f"the model must be a converted one, got {type(model).__name__} on softmax"
        )
    configuration.configure(model, "softmax")
    return model


def fingerprint(model: PreTrainedModel) -> str:
    """SHA-256 of a model's weights: names, types, shapes and bytes, row numbers left out."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        if f".{parameters.HOLDER}." not in name:
            digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
            digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


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
