"""The plan of a conversion, as data: made without touching the model, printed, saved, applied."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

from transformers import PreTrainedConfig, PreTrainedModel

from hf_sigmoid import configuration, parameters, support, weights_source
from hf_sigmoid.conversions.models import find_part, part_of

# The first of each is the default.
STARTS = {
    "ssmax": ("identity", "paper", "anchored:L"),
    "sigmoid": ("calibrated-hidden", "calibrated-query", "calibrated", "minus-log-n"),
}


@dataclass(frozen=True)
class Plan:
    """The attention modules that change, their function, and the start of their per-query terms.

    ssmax, c_m = β + γ log n_m:
        identity      β 1, γ 0: the softmax model, to the last bit
        paper         β 0, γ 1 / mean of log n (Nakanishi 2025)
        anchored:L    c_m = 1 up to n = L, then log n / log L
    sigmoid, b_m = β + γ log n_m (+ w·q_m) (+ u·x_m):
        minus-log-n        β 0, γ −1 (Ramapuram et al. 2024)
        calibrated         β and γ of every head fitted to its rows' log-sum-exp
        calibrated-query   and w, linear in the query
        calibrated-hidden  and u, linear in what the attention module gets
    """

    function: str
    init: str
    layers: tuple[int, ...] | None  # None: all
    model_type: str
    converted: tuple[str, ...]  # names of attention modules in the model
    kept: tuple[str, ...]  # those that stay softmax
    numbers: int  # parameters that are added
    part: str | None = None  # of a composite model: the name of its config

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=2)

    @classmethod
    def from_json(cls, text: str) -> "Plan":
        fields = json.loads(text)
        lists = ("layers", "converted", "kept")
        return cls(
            **{k: tuple(v) if k in lists and v is not None else v for k, v in fields.items()}
        )

    def __str__(self) -> str:
        layers = "all layers" if self.layers is None else f"layers {ranges(self.layers)}"
        kept = f", {len(self.kept)} stay softmax" if self.kept else ""
        part = f" ({self.part})" if self.part else ""
        return (
            f"{self.model_type}{part} to {self.function} from {self.init!r}: {layers}, "
            f"{len(self.converted)} attention modules change{kept}, {self.numbers} parameters "
            "are added"
        )


def plan(
    model: PreTrainedModel,
    function: str,
    *,
    layers: Sequence[int] | None = None,
    init: str | None = None,
    part: str | None = None,
) -> Plan:
    """Plan a conversion. The model may be on the meta device; it is not changed.

    Args:
        function: "ssmax" or "sigmoid".
        layers: indices of the layers to convert, in both stacks of an encoder-decoder; None
            converts all.
        init: one of `STARTS`, the first if None.
        part: of a composite model, by the name of its config as "text_config"; None takes the part
            that reads and writes text. The others stay softmax.

    Raises:
        ValueError: an unknown function or start, a part or layer that does not exist, a model that
            is converted already or cannot be.
    """
    if function not in STARTS:
        raise ValueError(f"--to must be one of {', '.join(STARTS)}, got {function!r}")
    init = STARTS[function][0] if init is None else init
    check_init(function, init)
    part, layers = check_config(model.config, layers, part)
    support.check_softmax_model(part_of(model, part), function, layers)
    indices = layer_indices(model, part)
    if missing := sorted(set(layers or ()) - set(indices.values())):
        raise ValueError(
            f"layers {missing} have no attention to convert, those that have: "
            f"{ranges(sorted(set(indices.values()) - {None}))}"
        )
    converted, kept, numbers = [], [], 0
    for name, module in parameters.attention_modules(model):
        if name not in indices or (layers is not None and indices[name] not in layers):
            kept.append(name)
            continue
        converted.append(name)
        width = 2 + sum(parameters.widths(module)[name] or 0 for name in weights_of(init))
        numbers += parameters.head_count(module) * width
    model_type = model.config.model_type
    return Plan(function, init, layers, model_type, tuple(converted), tuple(kept), numbers, part)


def layer_indices(model: PreTrainedModel, part: str | None) -> dict[str, int | None]:
    """The layer, within the part that is converted, of each of its attention modules."""
    modules = parameters.attention_modules(part_of(model, part))
    indices = {module: parameters.layer_index(name, module) for name, module in modules}
    return {name: indices[m] for name, m in parameters.attention_modules(model) if m in indices}


def check_config(
    config: PreTrainedConfig, layers: Sequence[int] | None, part: str | None = None
) -> tuple[str | None, tuple[int, ...] | None]:
    """The part and its layers, sorted; ValueError for a converted model, or no such part or layer.

    Of an encoder-decoder, a layer that either stack has.
    """
    if section := configuration.find_section(config):
        raise ValueError(
            f"the model must run softmax, got one already converted to {section['function']}: "
            "hf-sigmoid revert writes it back"
        )
    part, config = find_part(config, part)
    if layers is None:
        return part, None
    if not layers:
        raise ValueError("expected at least one layer to convert, got none")
    return part, tuple(configuration.check_layers(layers, config))


def apply(model: PreTrainedModel, plan: Plan, fits: dict | None = None) -> dict[str, dict]:
    """Convert a model in place as planned; `fits` (`calibrate`) for a calibrated start.

    Returns:
        For each attention module that changed, by name: "offset" and "slope" as smallest and
        largest over its heads, and of a calibrated start "r_squared", the mean share of the
        log-sum-exp's variance that the fit explains.

    Raises:
        ValueError: a plan of another model, a calibrated start without fits of its modules, or a
            model that would not compute what was planned; it is left as it was then.
    """
    names = {name for name, _ in parameters.attention_modules(model)}
    if names != {*plan.converted, *plan.kept}:
        raise ValueError(f"the plan is of another model than this {type(model).__name__}")
    calibrated = plan.init.startswith("calibrated")
    if calibrated and fits is None:
        raise ValueError(f"the start {plan.init!r} needs fits of {len(plan.converted)} modules")
    if calibrated:
        check_reached(name for name in plan.converted if name not in fits)
    weights = dict.fromkeys(weights_of(plan.init), True)
    numbers: dict = {}
    if plan.init == "paper":
        numbers = {"offset": 0.0, "slope": "paper"}
    elif plan.init.startswith("anchored:"):
        anchor = check_init(plan.function, plan.init)
        numbers = {"offset": 1.0, "slope": 1 / math.log(anchor), "anchor": anchor}
    weights_source.remember_source(model, None)  # its numbers will fit its weights
    with support.unchanged_on_error(model):
        configuration.configure(
            part_of(model, plan.part), plan.function, learn=True, layers=plan.layers,
            **weights, **numbers,
        )  # fmt: skip
        support.check_model(model, support.wishes(model.config))
    report: dict[str, dict] = {}
    for name, module in parameters.holders(model):
        holder = module.log_length
        if holder.function == "softmax":
            continue
        if calibrated:
            fits[name].copy_to(holder)
        report[name] = {
            number: [value.min().item(), value.max().item()]
            for number, value in holder.named_parameters()
            if number in ("offset", "slope") and not value.is_meta
        }
        if calibrated:
            report[name]["r_squared"] = fits[name].r_squared.mean().item()
    return report


def weights_of(init: str) -> tuple[str, ...]:
    """What a start is linear in, beside log n: "query", "hidden"."""
    return {"calibrated-query": ("query",), "calibrated-hidden": ("query", "hidden")}.get(init, ())


def check_reached(missing: Iterable[str]) -> None:
    """Raise ValueError for modules that a text did not get to: nothing is known of them."""
    if missing := list(missing):
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise ValueError(
            f"text never gets to {', '.join(missing[:3])}{more}: leave these layers out, or "
            "calibrate on batches of the model's other inputs in Python"
        )


def check_init(function: str, init: str) -> int | None:
    """The length L of "anchored:L", else None; ValueError if it is no start of this function."""
    starts = STARTS[function]
    name, _, length = init.partition(":")
    if name == "anchored" and function == "ssmax":
        if not length.isdigit() or int(length) < 2:
            raise ValueError(f"anchored:L needs a length L of at least 2 keys, got {init!r}")
        return int(length)
    if init not in starts:
        raise ValueError(f"{function} starts from {', '.join(starts)}, got {init!r}")
    return None


def parse_layers(given: str, count: int | None = None) -> list[int]:
    """ "0-15,not:3" -> layers 0 to 15 without 3. "not:3" alone needs the `count` of all layers.

    "!3" and "^3" are the same; many shells read them otherwise.

    Raises:
        ValueError: not numbers and ranges.
    """
    chosen: set[int] | None = None
    left_out: set[int] = set()
    for part in given.split(","):
        span_of = part.strip().removeprefix("not:").lstrip("!^")
        first, _, last = span_of.partition("-")
        if not first.isdigit() or (last and not last.isdigit()):
            raise ValueError(f"expected numbers and ranges as 0-15,not:3, got {given!r}")
        if last and int(last) < int(first):
            raise ValueError(f"expected ranges that rise, got {part!r}")
        span = range(int(first), int(last or first) + 1)
        if span_of != part.strip():
            left_out.update(span)
        else:
            chosen = (chosen or set()) | set(span)
    if chosen is None:
        if count is None:
            raise ValueError(f"expected layers to convert beside those left out, got {given!r}")
        chosen = set(range(count))
    return sorted(chosen - left_out)


def ranges(layers: Sequence[int]) -> str:
    """[0, 1, 2, 7] -> "0-2,7" """
    parts: list[list[int]] = []
    for layer in layers:
        if parts and layer == parts[-1][1] + 1:
            parts[-1][1] = layer
        else:
            parts.append([layer, layer])
    return ",".join(f"{a}-{b}" if a != b else f"{a}" for a, b in parts)
