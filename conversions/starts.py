"""The start of each function: ssmax as the identity, verified; sigmoid fitted to its softmax."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_sigmoid.conversions import statistics
from hf_sigmoid.conversions.calibrate import Fit, NormalEquations, collect, layer_errors, solve
from hf_sigmoid.conversions.evaluation import Evaluation
from hf_sigmoid.conversions.plan import Plan, apply, check_init, check_reached, layer_indices, plan
from hf_sigmoid.conversions.reading import reader
from hf_sigmoid.conversions.revert import revert
from hf_sigmoid.conversions.stages import Stages
from hf_sigmoid.conversions.verify import differences, runs, unreached
from hf_sigmoid.text.sources import Text

# Equal logits: the same sums in the same order, or (padding takes another path) another order in
# float32.
IDENTITY_TOLERANCE = 1e-5
EAGER_ROUNDINGS = 8  # of the inputs' dtype, one after another, in a model without another softmax


@torch.no_grad()
def to_ssmax(model: PreTrainedModel, chosen: Plan, ids: Tensor) -> dict[str, float]:
    """Switch to ssmax; at its identity no logit may change, in whatever way the model is run."""
    anchor = check_init(chosen.function, chosen.init)
    text_model = reader(model, chosen.part)
    check_reached(unreached(text_model, ids[:1], chosen.converted, model))
    try:
        before = runs(text_model, ids)
    except Exception as error:  # whatever a model raises that is not run in these ways
        reason = (str(error).strip().splitlines() or [""])[0]
        raise ValueError(
            f"{type(model).__name__} cannot be run as the verification does: "
            f"{type(error).__name__}: {reason}"
        ) from error
    apply(model, chosen)
    found = differences(before, runs(text_model, ids))
    identity = chosen.init == "identity" or (anchor is not None and anchor >= ids.shape[1])
    largest = max(logits.abs().max().item() for logits in before.values())
    # Eager attention in 16 bits rounds its scores, sinks and weights; ours does not.
    roundings = 1 if text_model._supports_sdpa else EAGER_ROUNDINGS
    allowed = max(IDENTITY_TOLERANCE, roundings * torch.finfo(model.dtype).eps) * largest
    if identity and not max(found.values()) <= allowed:
        raise ValueError(
            "ssmax at its identity must not change logits by more than "
            f"{allowed:.1e}, got {max(found.values()):.1e}"
        )
    return found


@dataclass
class Calibration:
    """The sums of a text that sigmoid's row numbers are fitted to, and where they are from."""

    sums: dict[str, NormalEquations]
    batches: list[Tensor]  # of the text, on which layers are compared
    weights: str  # the fingerprint of the model
    tokens: int
    text_sha256: str | None

    def save(self, path: Path) -> None:
        statistics.save(
            self.sums, path, weights=self.weights, tokens=self.tokens, text=self.text_sha256
        )


def calibration_sums(
    model: PreTrainedModel,
    chosen: Plan,
    text: Text,
    ids: Tensor,
    *,
    stats: str | Path | None,
    weights: str,
    stages: Stages,
    progress: bool,
) -> Calibration:
    """Collect the sums of a text, or read those of an earlier conversion."""
    batches = list(ids[:4].split(4))
    if stats is not None:
        sums, tokens, text_sha256 = statistics.load(stats, weights=weights)
    else:
        with stages("calibration", ids.numel()):
            sums = collect(model, ids.split(4), part=chosen.part, progress=progress)
        tokens, text_sha256 = ids.numel(), text.sha256
    check_reached(name for name in chosen.converted if name not in sums)
    return Calibration(sums, batches, weights, tokens, text_sha256)


def to_sigmoid(
    model: PreTrainedModel,
    chosen: Plan,
    calibration: Calibration,
    evaluation: Evaluation,
    *,
    init: str | None,
    keep_softmax: int,
    progress: bool,
) -> tuple[Plan, dict]:
    """Switch to sigmoid; the plan as it was carried out, and figures for the report."""
    stages = evaluation.stages
    sums, batches = calibration.sums, calibration.batches
    fits, chosen, figures = _choose(model, chosen, sums, init, evaluation)
    analytic = _analytic(sums)
    with stages("layer errors", 2 * sum(ids.numel() for ids in batches)):
        errors, before = (
            layer_errors(model, each, batches, part=chosen.part, progress=progress)
            for each in (fits, analytic)
        )
    if keep_softmax:
        chosen = _keep(model, chosen, errors, keep_softmax)
    apply(model, chosen, fits)
    figures["modules"] = {
        name: {
            "residual_nats": round(fits[name].residual.mean().item(), 4),
            "r_squared": round(fits[name].r_squared.mean().item(), 4),
            "relative_before": round(before[name].relative, 4),
            **{key: round(value, 4) for key, value in asdict(errors[name]).items()},
        }
        for name in chosen.converted
    }
    return chosen, figures


def _choose(model, chosen: Plan, sums, init: str | None, evaluation: Evaluation):
    """Fits of the planned start; of the better one on held-out text if none was asked for."""
    if init == "minus-log-n":
        return _analytic(sums), chosen, {}
    if init is not None:
        return solve(sums, query=chosen.init == "calibrated-query"), chosen, {}
    candidates = {}
    for name in ("calibrated-query", "calibrated"):
        fits = solve(sums, query=name == "calibrated-query")
        candidate = plan(model, "sigmoid", layers=chosen.layers, init=name, part=chosen.part)
        apply(model, candidate, fits)
        result = evaluation.start(model, f"start {name}")
        revert(model)
        candidates[result, name] = fits, candidate
    features = evaluation.measure.of_features
    starts = "hidden_state_change_of_starts" if features else "perplexity_of_starts"
    figures = {starts: {name: result for result, name in candidates}}
    return *candidates[min(candidates)], figures


def _analytic(sums) -> dict[str, Fit]:
    """b = −log n as a fit, to measure its errors."""
    fits = solve(sums, query=False)
    for fit in fits.values():
        fit.offset, fit.slope = torch.zeros_like(fit.offset), -torch.ones_like(fit.slope)
    return fits


def _keep(model, chosen: Plan, errors, count: int) -> Plan:
    """The plan without the layers whose output sigmoid changes most."""
    indices = layer_indices(model, chosen.part)
    worst: dict[int, float] = {}
    for name in chosen.converted:
        layer = indices[name]
        worst[layer] = max(worst.get(layer, 0.0), errors[name].relative)
    if count >= len(worst):
        raise ValueError(f"--keep-softmax must leave a layer of {len(worst)}, got {count}")
    kept = sorted(worst, key=lambda layer: -worst[layer])[:count]
    layers = [layer for layer in sorted(worst) if layer not in kept]
    return plan(model, chosen.function, layers=layers, init=chosen.init, part=chosen.part)
