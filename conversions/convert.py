"""A softmax checkpoint in, an ssmax or sigmoid checkpoint out.

ssmax starts as the identity (multiplier 1 + 0·log n), so the converted model computes what the
original did,
and that is verified before anything is written. sigmoid starts from a fit to the log-sum-exp
(`calibrate.py`): near, not equal; it needs healing by further training.
"""

import json
import os
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_sigmoid import configuration, parameters, text
from hf_sigmoid.conversions.calibrate import Fit, calibrate
from hf_sigmoid.conversions.compare import perplexity, token_windows
from hf_sigmoid.conversions.embedded import checkpoint

# Equal logits: the same sums in the same order, or (padding takes another path) another order in
# float32.
IDENTITY_TOLERANCE = 1e-5


def convert(
    source: str | Path,
    target: str | Path,
    function: str,
    *,
    calibration: str | Path | None = None,
    evaluation: str | Path | None = None,
    query: bool = False,
    layers: Sequence[int] | None = None,
    window: int = 512,
    windows: int = 32,
    progress: bool = True,
) -> dict:
    """Convert a causal language model and write it as a folder that `from_pretrained` loads.

    Args:
        source: checkpoint folder, hub id, or "smollm2" for the embedded one.
        target: folder to write; must not exist or be empty. Written under another name, then
            renamed.
        function: "ssmax" or "sigmoid".
        calibration: text file that sigmoid's row numbers are fitted on; None takes the built-in
            text.
        evaluation: text file for the perplexities; None takes the built-in text's held-out
            chapters.
        query: sigmoid only: also fit w, the part of the row number that is linear in the query.
        layers: indices of the layers to convert; None converts all.
        window, windows: length in tokens and number of the windows of both texts.

    Returns:
        The report, also written as `conversion.json`: perplexity before and after, and the
            residuals of the fit.

    Raises:
        ValueError: bad arguments, an unsupported or already converted model, or a failed identity
            check; nothing has been written then.
    """
    # Resolved, so that a link or "." is replaced by name like any other empty folder.
    target = Path(target).resolve()
    if function not in parameters.FUNCTIONS:
        raise ValueError(f"--to must be one of {', '.join(parameters.FUNCTIONS)}, got {function!r}")
    if query and function != "sigmoid":
        raise ValueError(f"a query term is fitted for sigmoid only, got {function!r}")
    if window < 2 or windows < 1:
        raise ValueError(
            f"expected a window of at least 2 tokens and 1 window, got {window} and {windows}"
        )
    if layers is not None and not layers:
        raise ValueError("expected at least one layer to convert, got none")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(
            f"the output must be a new or empty folder, got {target}, which exists and is not empty"
        )
    _check_writable(target)
    calibration_text = _read(calibration, text.train, "calibration")
    evaluation_text = _read(evaluation, text.held_out, "evaluation")

    path = checkpoint(source)
    config = AutoConfig.from_pretrained(path)
    _check_source(config, function, layers)
    tokenizer = AutoTokenizer.from_pretrained(path)
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and window > longest:
        raise ValueError(f"window must be at most the model's {longest} positions, got {window}")
    evaluation_ids = token_windows(tokenizer, evaluation_text, window, windows)
    calibration_ids = token_windows(tokenizer, calibration_text, window, windows)

    model = _load(path)
    report = {"source": str(source), "function": function, "window": window, "layers": layers}
    report["perplexity_before"] = perplexity(
        model, evaluation_ids, name="perplexity before", progress=progress
    )
    if function == "ssmax":
        report["largest_logit_difference"] = _to_ssmax(
            model, layers, evaluation_ids[:2, : min(window, 256)]
        )
    else:
        fits = calibrate(model, calibration_ids.split(4), query=query, progress=progress)
        to_sigmoid(model, fits, layers)
        report["calibration_tokens"] = calibration_ids.numel()
        report["residual_nats"] = {
            name: round(fit.residual.mean().item(), 4) for name, fit in fits.items()
        }
    report["perplexity_after"] = perplexity(
        model, evaluation_ids, name="perplexity after", progress=progress
    )
    _write(model, tokenizer, report, target)
    return report


def to_sigmoid(
    model: PreTrainedModel, fits: dict[str, Fit], layers: Sequence[int] | None = None
) -> None:
    """Switch a softmax model to sigmoid attention; the fitted row numbers are trainable."""
    query = next(iter(fits.values())).query is not None
    configuration.configure(model, "sigmoid", learn=True, query=query, layers=layers)
    with torch.no_grad():
        for name, module in parameters.holders(model):
            holder = module.log_length
            if holder.function == "softmax":
                continue
            holder.offset.copy_(fits[name].offset)
            holder.slope.copy_(fits[name].slope)
            if query:
                holder.query.copy_(fits[name].query)


@torch.no_grad()
def _to_ssmax(model: PreTrainedModel, layers: Sequence[int] | None, ids: torch.Tensor) -> float:
    """Switch to ssmax at its identity; the largest difference of a logit, plain or left-padded."""
    ids = ids.to(model.device)
    padding = torch.ones_like(ids)
    padding[0, : ids.shape[1] // 4] = 0
    inputs = [{"input_ids": ids}, {"input_ids": ids, "attention_mask": padding}]
    before = [model(**batch, use_cache=False).logits for batch in inputs]
    configuration.configure(model, "ssmax", layers=layers)
    worst = 0.0
    for batch, expected in zip(inputs, before, strict=True):
        real = batch.get("attention_mask", torch.ones_like(ids)).bool()
        difference = (model(**batch, use_cache=False).logits - expected)[real].abs().max()
        worst = max(worst, difference.item())
    largest = max(logits.abs().max().item() for logits in before)
    allowed = max(IDENTITY_TOLERANCE, torch.finfo(model.dtype).eps) * largest
    if not worst <= allowed:
        raise ValueError(
            "ssmax at its identity must not change logits by more than "
            f"{allowed:.1e}, got {worst:.1e}"
        )
    return worst


def _check_source(config, function: str, layers: Sequence[int] | None) -> None:
    """Everything that can be said against the model from its config alone."""
    if parts := configuration.sub_configs(config):
        raise ValueError(
            f"the model must be a plain language model, got {config.model_type!r}, "
            f"which is composed of {', '.join(parts)}"
        )
    if getattr(config, "hf_sigmoid", None):
        raise ValueError(
            "the model must run softmax, got one already converted to "
            f"{config.hf_sigmoid['function']}"
        )
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(
            f"the model must be a causal language model, got model type {config.model_type!r}"
        )
    cls = AutoModelForCausalLM._model_mapping[type(config)]
    configuration.check_supported(cls, config, function)
    if layers is not None:
        configuration.check_layers(layers, config)


def _load(path: str) -> PreTrainedModel:
    """The model, from safetensors only."""
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype="auto", use_safetensors=True).eval()
    except SafetensorError as error:
        raise ValueError(f"{path}: a safetensors file cannot be read: {error}") from error


def _check_writable(target: Path) -> None:
    """The nearest folder above the target that exists must be one, and writable."""
    parent = next(folder for folder in target.parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"the output must be in a folder that can be written, got {target}")


def _read(path: str | Path | None, default, what: str) -> str:
    if path is None:
        return default()
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"the {what} text must be a file, got {path}, which does not exist")
    content = path.read_text(encoding="utf-8")
    if not content.strip():
        raise ValueError(f"the {what} text must not be empty, got {path}")
    return content


def _write(model, tokenizer, report: dict, target: Path) -> None:
    """All files, then one rename: the folder is complete or not there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        model.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        (temporary / "conversion.json").write_text(json.dumps(report, indent=2) + "\n")
        temporary.chmod(0o755)
        temporary.replace(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
