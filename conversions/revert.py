"""Back to softmax, exactly where nothing but the per-query terms was trained."""

import json
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel

from hf_sigmoid import configuration, fingerprints, parameters
from hf_sigmoid.checkpoint_files import files_sha256
from hf_sigmoid.conversions import folding
from hf_sigmoid.conversions.companions import copy_companions
from hf_sigmoid.conversions.models import check_disk, load, save, weights
from hf_sigmoid.embedded import checkpoint
from hf_sigmoid.files import check_new_folder, existing_parent, new_folder
from hf_sigmoid.loading import load_tokenizer
from hf_sigmoid.rope import restore_rope

REPORT = "report.json"  # what a conversion leaves in its folder


def revert(model: PreTrainedModel) -> PreTrainedModel:
    """Take the function, its per-query terms and a changed RoPE out of a model; its weights stay.

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
    """SHA-256 of a model's weights without its per-query terms: that of the softmax model in it."""
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


def revert_checkpoint(
    source: str | Path,
    target: str | Path,
    *,
    approximate: bool = False,
    device_map: str | dict | None = None,
) -> bool:
    """Write a converted checkpoint back as a softmax model.

    Args:
        approximate: also if its weights were trained since, so that the result is not the original.
        device_map: where the weights are kept meanwhile, as for `convert`.

    Returns:
        Are the weights those of the original, bit for bit?

    Raises:
        ValueError: not a converted checkpoint, weights that were trained since, a target that is
            not empty; nothing has been written then.
    """
    target = Path(target).resolve()
    check_new_folder(target)
    source = checkpoint(source)
    config = AutoConfig.from_pretrained(source)
    if not configuration.find_section(config):
        raise ValueError(f"the model must be a converted one, got {source} on softmax")
    near = existing_parent(target)
    model = revert(load(source, device_map=device_map, offload_near=near))
    check_disk(target, model)
    tokenizer = load_tokenizer(source)
    originals = restore_weights(model, source)
    unknown = approximate and not (Path(source) / REPORT).is_file()
    with new_folder(target) as folder:
        save(model, folder, source, originals=originals)
        exact = not unknown and check_untrained(model, source, folder)
        if not exact and not approximate:
            raise ValueError(
                f"the weights of {source} were trained since the conversion, so that softmax would "
                "not give back the original: --approximate writes it all the same"
            )
        tokenizer.save_pretrained(folder)
        copy_companions(source, folder)
    return exact
