"""The start of each function: ssmax as the identity, verified; sigmoid fitted to its softmax."""

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hf_sigmoid.conversions import hybrid, statistics
from hf_sigmoid.conversions.calibrate import Fit, NormalEquations, collect, layer_errors, solve
from hf_sigmoid.conversions.compare import Measure
from hf_sigmoid.conversions.evaluation import Stages
from hf_sigmoid.conversions.hybrid import Keep
from hf_sigmoid.conversions.plan import (
    STARTS,
    Plan,
    apply,
    check_init,
    check_reached,
    layer_indices,
    plan,
    weights_of,
)
from hf_sigmoid.conversions.reading import reader
from hf_sigmoid.conversions.revert import revert
from hf_sigmoid.conversions.verify import differences, runs, unreached
from hf_sigmoid.text.sources import Text

# Equal logits: the same sums in the same order, or (padding takes another path) another order in
# float32.
IDENTITY_TOLERANCE = 1e-5
CALIBRATED = [init for init in STARTS["sigmoid"] if init.startswith("calibrated")]
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
    """The sums of a text that sigmoid's query biases are fitted to, and where they are from."""

    sums: dict[str, NormalEquations]
    batches: list[Tensor]  # of the text, on which layers are compared
    weights: str  # the fingerprint of the model
    tokens: int
    text_name: str
    text_sha256: str | None

    def save(self, path: Path) -> None:
        statistics.save(
            self.sums, path, weights=self.weights, tokens=self.tokens, text=self.text_sha256
        )


def calibration_sums(
    model: PreTrainedModel, chosen: Plan, text: Text, ids: Tensor, *, stats: str | Path | None,
    weights: str, stages: Stages, progress: bool,
) -> Calibration:  # fmt: skip
    """Collect the sums of a text, or read those of an earlier conversion."""
    name, tokens, text_sha256 = text.name, ids.numel(), text.sha256
    if stats is not None:
        name = Path(stats).name
        sums, tokens, text_sha256 = statistics.load(stats, weights=weights)
    else:
        with stages("calibration", tokens):
            sums = collect(
                model, ids.split(4), hidden="hidden" in weights_of(chosen.init), part=chosen.part,
                progress=progress,
            )  # fmt: skip
    check_reached(module for module in chosen.converted if module not in sums)
    return Calibration(sums, list(ids[:4].split(4)), weights, tokens, name, text_sha256)


def to_sigmoid(
    model: PreTrainedModel, chosen: Plan, calibration: Calibration, windows: Tensor,
    measure: Measure, stages: Stages, *, init: str | None, measured: bool, keep: Keep | None,
    ranked_on: hybrid.Asked | None, progress: bool,
) -> tuple[Plan, dict]:  # fmt: skip
    """Switch to sigmoid; the plan as it was carried out, and figures for the report.

    Args:
        init: the start that was asked for. None: the best of the calibrated ones on the windows if
            they are `measured`, else the first that the sums allow.
        keep: which layers stay softmax, of those that the plan converts.
        ranked_on: what a ranking by divergence reads.
    """
    sums, batches = calibration.sums, calibration.batches
    figures: dict = {}
    softmax = hybrid.log_probs(model, ranked_on) if ranked_on else None
    # Of a module that does not get one row a query, and in a file, the sums are without its inputs.
    inputs_known = all(each.hidden_gram is not None for each in sums.values())
    starts = [name for name in CALIBRATED if inputs_known or "hidden" not in weights_of(name)]
    if init is None and measured:
        fits, chosen, found = _choose(model, chosen, starts, sums, windows, measure, stages)
        kind = "hidden_state_change" if measure.of_features else "perplexity"
        figures[f"{kind}_of_starts"] = found
    else:
        first = init or starts[0]
        chosen = plan(model, "sigmoid", layers=chosen.layers, init=first, part=chosen.part)
        fits = _fits(sums, chosen.init)
    with stages("layer errors", 2 * sum(ids.numel() for ids in batches)):
        errors, before = (
            layer_errors(model, each, batches, part=chosen.part, progress=progress)
            for each in (fits, _fits(sums, "minus-log-n"))
        )
    if keep and ranked_on:
        apply(model, chosen, fits)
        with stages(f"layers by {keep.ranking}"):
            kept, figures["keep_softmax"] = hybrid.best(
                model, chosen, keep, ranked_on, softmax, progress=progress
            )
        revert(model)
        chosen = _without(model, chosen, kept)
    elif keep:
        chosen = _without(model, chosen, _worst(model, chosen, errors, keep))
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


def _choose(
    model: PreTrainedModel, chosen: Plan, names: list[str], sums: dict, windows: Tensor,
    measure: Measure, stages: Stages,
) -> tuple[dict[str, Fit], Plan, dict[str, float]]:  # fmt: skip
    """Fits and plan of the best start on held-out text, and the measure of each."""
    candidates = {}
    for name in names:
        fits = _fits(sums, name)
        candidate = plan(model, "sigmoid", layers=chosen.layers, init=name, part=chosen.part)
        apply(model, candidate, fits)
        with stages(f"start {name}", windows.numel()):
            candidates[measure(model, windows, f"start {name}"), name] = fits, candidate
        revert(model)
    return *candidates[min(candidates)], {name: result for result, name in candidates}


def _fits(sums: dict[str, NormalEquations], init: str) -> dict[str, Fit]:
    """The fits of a start; "minus-log-n" is b = −log n as one, to measure its errors."""
    fits = solve(sums, **{name: name in weights_of(init) for name in ("query", "hidden")})
    if init == "minus-log-n":
        for fit in fits.values():
            fit.offset, fit.slope = torch.zeros_like(fit.offset), -torch.ones_like(fit.slope)
    return fits


def _worst(model, chosen: Plan, errors, keep: Keep) -> list[int]:
    """The layers whose output sigmoid changes most."""
    indices = layer_indices(model, chosen.part)
    worst: dict[int, float] = {}
    for name in chosen.converted:
        layer = indices[name]
        worst[layer] = max(worst.get(layer, 0.0), errors[name].relative)
    hybrid.check_leaves_one(keep, len(worst))
    return sorted(worst, key=lambda layer: -worst[layer])[: keep.count]


def _without(model, chosen: Plan, kept: list[int]) -> Plan:
    """The plan without these layers."""
    indices = layer_indices(model, chosen.part)
    layers = sorted({indices[name] for name in chosen.converted} - {*kept})
    return plan(model, chosen.function, layers=layers, init=chosen.init, part=chosen.part)
