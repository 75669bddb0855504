"""A softmax checkpoint in, an ssmax or sigmoid checkpoint out.

ssmax starts as the identity (multiplier 1 + 0·log n), so the converted model computes what the
original did, and that is verified before anything is written. sigmoid starts from a fit to the
log-sum-exp (`calibrate.py`): near, not equal; it needs healing by further training.
"""

import json
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from hf_sigmoid import parameters, support, text
from hf_sigmoid.conversions import report as reports
from hf_sigmoid.conversions import statistics
from hf_sigmoid.conversions.calibrate import Fit, collect, layer_errors, solve
from hf_sigmoid.conversions.compare import perplexity, token_windows
from hf_sigmoid.conversions.embedded import checkpoint
from hf_sigmoid.conversions.plan import Plan, apply, check_config, check_init, parse_layers, plan
from hf_sigmoid.conversions.revert import REPORT, check_untrained, fingerprint, revert
from hf_sigmoid.conversions.verify import differences, runs

# Equal logits: the same sums in the same order, or (padding takes another path) another order in
# float32.
IDENTITY_TOLERANCE = 1e-5
STATISTICS = "stats.safetensors"


def convert(
    source: str | Path,
    target: str | Path,
    function: str,
    *,
    init: str | None = None,
    layers: Sequence[int] | str | None = None,
    keep_softmax: int = 0,
    calibration: str | Path | None = None,
    evaluation: str | Path | None = None,
    stats: str | Path | None = None,
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
        init: what the row numbers start from, see `Plan`. None: ssmax starts as the identity,
            sigmoid from the better on the evaluation text of "calibrated-query" and "calibrated".
        layers: indices of the layers to convert, or text as "0-15,!3"; None converts all.
        keep_softmax: sigmoid only: so many layers, those farthest from their softmax output, stay
            softmax.
        calibration: text file that sigmoid's row numbers are fitted on; None takes the built-in
            text.
        evaluation: text file for the perplexities; None takes the built-in text's held-out
            chapters.
        stats: `stats.safetensors` of an earlier conversion of the same model, instead of another
            pass over the calibration text.
        window, windows: length in tokens and number of the windows of both texts.

    Returns:
        The report, also written as `report.json` and, to read, `report.md`.

    Raises:
        ValueError: bad arguments, an unsupported or already converted model, or a failed identity
            check; nothing has been written then.
    """
    start = time.perf_counter()
    # Resolved, so that a link or "." is replaced by name like any other empty folder.
    target = Path(target).resolve()
    check_arguments(function, init, keep_softmax, window, windows)
    check_target(target)
    calibration_text = read_text(calibration, text.train, "calibration")
    evaluation_text = read_text(evaluation, text.held_out, "evaluation")

    path = checkpoint(source)
    config = AutoConfig.from_pretrained(path)
    layers = check_source(config, function, layers)
    tokenizer = AutoTokenizer.from_pretrained(path)
    longest = getattr(config, "max_position_embeddings", None)
    if longest is not None and window > longest:
        raise ValueError(f"window must be at most the model's {longest} positions, got {window}")
    evaluation_ids = token_windows(tokenizer, evaluation_text, window, windows)
    calibration_ids = token_windows(tokenizer, calibration_text, window, windows)

    model = load(path)
    check_disk(target, model)
    weights = fingerprint(model)
    chosen = plan(model, function, layers=layers, init=init)
    report: dict = {"source": str(source), "weights_sha256": weights, "window": window}
    report["perplexity_before"] = perplexity(
        model, evaluation_ids, name="perplexity before", progress=progress
    )
    sums = None
    if function == "ssmax":
        check_ids = evaluation_ids[:2, : min(window, 256)]
        report["largest_logit_difference"] = _to_ssmax(model, chosen, check_ids)
    else:
        if stats is not None:
            sums, tokens = statistics.load(stats, weights=weights)
        else:
            sums = collect(model, calibration_ids.split(4), progress=progress)
            tokens = calibration_ids.numel()
        report["calibration_tokens"] = tokens
        fits, chosen = _choose(model, chosen, sums, init, evaluation_ids, report, progress)
        batches = calibration_ids[:4].split(4)
        errors = layer_errors(model, fits, batches, progress=progress)
        if keep_softmax:
            chosen = _keep(model, chosen, errors, keep_softmax)
        apply(model, chosen, fits)
        report["modules"] = {
            name: {
                "residual_nats": round(fits[name].residual.mean().item(), 4),
                "r_squared": round(fits[name].r_squared.mean().item(), 4),
                **{key: round(value, 4) for key, value in asdict(errors[name]).items()},
            }
            for name in chosen.converted
        }
    report["plan"] = json.loads(chosen.to_json())
    report["perplexity_after"] = perplexity(
        model, evaluation_ids, name="perplexity after", progress=progress
    )
    report["seconds"] = round(time.perf_counter() - start, 1)
    with written(target) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / REPORT).write_text(json.dumps(report, indent=2) + "\n")
        (folder / "report.md").write_text(reports.markdown(report, chosen))
        (folder / "README.md").write_text(reports.card(report, chosen, target.name))
        if sums is not None:
            statistics.save(sums, folder / STATISTICS, weights=weights, tokens=tokens)
    return report


def dry_run(
    source: str | Path,
    function: str,
    *,
    init: str | None = None,
    layers: Sequence[int] | str | None = None,
) -> Plan:
    """What `convert` would do, from the config alone: no weights are loaded, nothing is written.

    Raises:
        ValueError: as `convert`, where the config alone tells.
    """
    check_arguments(function, init, keep_softmax=0, window=4, windows=1)
    config = AutoConfig.from_pretrained(checkpoint(source))
    layers = check_source(config, function, layers)
    return plan(skeleton(config), function, layers=layers, init=init)


def revert_checkpoint(source: str | Path, target: str | Path, *, approximate: bool = False) -> bool:
    """Write a converted checkpoint back as a softmax model.

    Args:
        approximate: also if its weights were trained since, so that the result is not the original.

    Returns:
        Are the weights those of the original, bit for bit?

    Raises:
        ValueError: not a converted checkpoint, weights that were trained since, a target that is
            not empty; nothing has been written then.
    """
    target = Path(target).resolve()
    check_target(target)
    config = AutoConfig.from_pretrained(source)
    if not getattr(config, "hf_sigmoid", None):
        raise ValueError(f"the model must be a converted one, got {source} on softmax")
    model = revert(load(str(source)))
    if approximate and not (Path(source) / REPORT).is_file():
        exact = False  # nothing says what the weights were
    else:
        exact = check_untrained(model, source)
    if not exact and not approximate:
        raise ValueError(
            f"the weights of {source} were trained since the conversion, so that softmax would not "
            "give back the original: --approximate writes it all the same"
        )
    tokenizer = AutoTokenizer.from_pretrained(source)
    with written(target) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    return exact


def merge_adapter(adapter: str | Path, base: str | Path, target: str | Path) -> None:
    """Write base and PEFT adapter as one checkpoint, trained row numbers included.

    Raises:
        ValueError: an adapter with row numbers on a base without (`Unsupported`), a target that is
            not empty; nothing has been written then.
    """
    from peft import PeftModel

    target = Path(target).resolve()
    check_target(target)
    model = PeftModel.from_pretrained(load(checkpoint(base)), str(adapter)).merge_and_unload()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint(base))
    with written(target) as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


def _choose(model, chosen: Plan, sums, init: str | None, ids, report: dict, progress: bool):
    """Fits of the planned start; of the better one on held-out text if none was asked for."""
    if init == "minus-log-n":
        return _analytic(sums), chosen
    if init is not None:
        return solve(sums, query=chosen.init == "calibrated-query"), chosen
    candidates = {}
    for name in ("calibrated-query", "calibrated"):
        fits = solve(sums, query=name == "calibrated-query")
        candidate = plan(model, "sigmoid", layers=chosen.layers, init=name)
        apply(model, candidate, fits)
        result = perplexity(model, ids, name=name, progress=progress)
        revert(model)
        candidates[result, name] = fits, candidate
    report["perplexity_of_starts"] = {name: result for result, name in candidates}
    return candidates[min(candidates)]


def _analytic(sums) -> dict[str, Fit]:
    """b = −log n as a fit, to measure its errors."""
    fits = solve(sums, query=False)
    for fit in fits.values():
        fit.offset, fit.slope = torch.zeros_like(fit.offset), -torch.ones_like(fit.slope)
    return fits


def _keep(model, chosen: Plan, errors, count: int) -> Plan:
    """The plan without the layers whose output sigmoid changes most."""
    modules = dict(parameters.attention_modules(model))
    worst: dict[int, float] = {}
    for name in chosen.converted:
        layer = parameters.layer_index(name, modules[name])
        worst[layer] = max(worst.get(layer, 0.0), errors[name].relative)
    if count >= len(worst):
        raise ValueError(f"--keep-softmax must leave a layer of {len(worst)}, got {count}")
    kept = sorted(worst, key=lambda layer: -worst[layer])[:count]
    layers = [layer for layer in sorted(worst) if layer not in kept]
    return plan(model, chosen.function, layers=layers, init=chosen.init)


@torch.no_grad()
def _to_ssmax(model: PreTrainedModel, chosen: Plan, ids: torch.Tensor) -> dict[str, float]:
    """Switch to ssmax; at its identity no logit may change, in whatever way the model is run."""
    anchor = check_init(chosen.function, chosen.init)
    before = runs(model, ids)
    apply(model, chosen)
    found = differences(before, runs(model, ids))
    identity = chosen.init == "identity" or (anchor is not None and anchor >= ids.shape[1])
    largest = max(logits.abs().max().item() for logits in before.values())
    allowed = max(IDENTITY_TOLERANCE, torch.finfo(model.dtype).eps) * largest
    if identity and not max(found.values()) <= allowed:
        raise ValueError(
            "ssmax at its identity must not change logits by more than "
            f"{allowed:.1e}, got {max(found.values()):.1e}"
        )
    return found


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


def check_source(config, function: str, layers: Sequence[int] | str | None) -> Sequence[int] | None:
    """Everything that can be said against a model from its config; the layers as numbers."""
    if isinstance(layers, str):
        layers = parse_layers(layers, getattr(config, "num_hidden_layers", None))
    layers = check_config(config, layers)
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(
            f"the model must be a causal language model, got model type {config.model_type!r}"
        )
    support.check_class(AutoModelForCausalLM._model_mapping[type(config)], config, function)
    return layers


def skeleton(config) -> PreTrainedModel:
    """The model without weights, on the meta device."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


def load(path: str) -> PreTrainedModel:
    """The model, from safetensors only."""
    try:
        return AutoModelForCausalLM.from_pretrained(path, dtype="auto", use_safetensors=True).eval()
    except SafetensorError as error:
        raise ValueError(f"{path}: a safetensors file cannot be read: {error}") from error


def check_target(target: Path) -> None:
    """A new or empty folder, in one that can be written."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(
            f"the output must be a new or empty folder, got {target}, which exists and is not empty"
        )
    parent = next(folder for folder in target.parents if folder.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise ValueError(f"the output must be in a folder that can be written, got {target}")


def check_disk(target: Path, model: PreTrainedModel) -> None:
    """Room for a copy of the model, before the work and not after it."""
    parent = next(folder for folder in target.parents if folder.exists())
    needed = sum(tensor.nbytes for tensor in model.state_dict().values())
    free = shutil.disk_usage(parent).free
    if free < needed:
        raise ValueError(
            f"the output needs {needed / 1e9:.2f} GB, {parent} has {free / 1e9:.2f} GB"
        )


def read_text(path: str | Path | None, default, what: str) -> str:
    if path is None:
        return default()
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"the {what} text must be a file, got {path}, which does not exist")
    content = path.read_text(encoding="utf-8")
    if not content.strip():
        raise ValueError(f"the {what} text must not be empty, got {path}")
    return content


@contextmanager
def written(target: Path):
    """A temporary folder that gets the target's name at the end: complete or not there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield temporary
        temporary.chmod(0o755)
        temporary.replace(target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
