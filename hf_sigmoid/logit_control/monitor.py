"""Is attention well while a model trains? Figures on a fixed probe; `record` for every call.

Logits x are final ones, what the weights p are made of: z + b of sigmoid attention, c z of SSMax,
z of softmax, with z = τ q·k and what the model adds to it. By head, over rows m and keys n that see
each other:

    max_logit    max x             mean_change   mean |x − x of the last measurement|
    row_sum      mean_m Σ_n p      saturated     share of rows with max_n p > 0.99

The first two are figure 4 of Anson & Aitchison 2025, arXiv 2511.21377.
"""

import contextlib
import inspect
import math
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import PreTrainedModel

from hf_sigmoid import masks, parameters, support
from hf_sigmoid.attention import Call, read
from hf_sigmoid.logit_control.blocks import plain_name
from hf_sigmoid.logit_control.recorder import Recorder, all_reduce_max, record
from hf_sigmoid.logit_control.shards import head_part, reshard
from hf_sigmoid.parameters import FUNCTIONS
from hf_sigmoid.reference import logits_of, row_of
from hf_sigmoid.replace_attention import standing_in

__all__ = ["Health", "Recorder", "all_reduce_max", "record", "summary"]

SATURATED = 0.99  # a row whose largest weight is above it


class Health:
    """Figures of every attention module on a fixed probe batch.

    The probe runs without gradients, dropout and cache, in the model's own functions and dtype,
    with attention computed by its definition. Mode, attention functions and random numbers are
    left as they were. `measure` is collective: of a split model every process calls it.

    Args:
        model: it, or what wraps it (DDP, FSDP2, PEFT, torch.compile).
        ids: token ids `[B, T]`, few: logits `[B, H, T, T]` of every module are kept on the CPU.
        position_ids: `[B, T]`, of packed documents.

    Raises:
        ValueError: `ids` are not `[B, T]`, or (in `measure`) reach no attention module.
    """

    def __init__(self, model: nn.Module, ids: Tensor, *, position_ids: Tensor | None = None):
        if ids.dim() != 2 or ids.is_floating_point():
            raise ValueError(f"ids must be token ids [B, T], got {ids.dtype} {list(ids.shape)}")
        self._outer = _unwrapped(model)
        inner = [m for m in self._outer.modules() if isinstance(m, PreTrainedModel)]
        if not inner:
            raise ValueError(f"expected a model of transformers, got {type(model).__name__}")
        self._inner = inner[0]
        self.ids, self.position_ids = ids.cpu(), position_ids
        self._previous: dict[str, Tensor] = {}

    @torch.no_grad()
    def measure(self) -> dict[str, dict[str, Any]]:
        """The figures, by attention module; `[H]` are float32 on the CPU.

        Returns:
            max_logit: `[H]`, the largest final logit.
            mean_change: `[H]`, mean |Δ final logit| since the last measurement, over the pairs of
                query and key that see each other; None at the first.
            row_sum: `[H]`, mean over rows of Σ_n p; 1 of softmax without sinks.
            saturated: `[H]`, share of rows whose largest weight is above 0.99.
            offset, slope: means over the heads of β and γ; None without a holder
                of the function that runs.
        """
        names = {module: plain_name(name) for name, module in self._outer.named_modules()}
        calls: dict[str, list[tuple[Tensor, ...]]] = {}
        functions = {
            id(config): config._attn_implementation for config in support.configs(self._inner)
        }

        def attention(module, query, key, value, attention_mask, *, output_attentions=None, **rest):
            function = functions.get(id(module.config))
            function = function if function in FUNCTIONS else "softmax"
            holder = parameters.holder_of(module)
            if holder is not None and holder.function == "softmax":
                function = "softmax"
            call = read(function, module, query, key, value, attention_mask, **rest)
            owned = holder is not None and holder.function == function != "softmax"
            row = parameters.per_query_terms(module, call.log_n, call.query) if owned else None
            output, figures = _figures(function, call, row)
            whole = tuple(_whole(module, each) for each in figures)
            calls.setdefault(names[module], []).append(whole)
            return output.transpose(1, 2).contiguous(), None

        with (
            _undisturbed(self._outer),
            standing_in(support.configs(self._inner), attention, masks.interval_mask),
        ):
            self._run()
        if not calls:
            raise ValueError(f"{type(self._inner).__name__}: the probe reached no attention module")
        found, logits = {}, {}
        for name, each in calls.items():
            logits[name] = torch.cat([x for x, _, _, _ in each], 1)
            top, sums, largest = (torch.cat(part, 1) for part in list(zip(*each, strict=True))[1:])
            before = self._previous.get(name)
            change = None if before is None else (logits[name] - before).abs().nanmean(1)
            found[name] = {
                "max_logit": top.amax(1), "mean_change": change, "row_sum": sums.nanmean(1),
                "saturated": (largest > SATURATED).float().mean(1),
            }  # fmt: skip
        self._previous = logits
        for module, name in names.items():
            if name in found:
                found[name] |= _row_numbers(module, functions.get(id(module.config)))
        return found

    def state_dict(self) -> dict[str, Tensor]:
        """The probe and its last logits, so that a resumed run goes on with their changes."""
        return {"ids": self.ids, **{f"logits.{n}": x for n, x in self._previous.items()}}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Raises ValueError for the state of another probe."""
        if not torch.equal(state.get("ids", torch.empty(0)), self.ids):
            raise ValueError("the state must be of a probe with the same token ids")
        self._previous = {
            name.removeprefix("logits."): tensor.clone()
            for name, tensor in state.items()
            if name != "ids"
        }

    def _run(self) -> None:
        known = inspect.signature(self._inner.forward).parameters
        ids = self.ids.to(self._inner.device)
        inputs: dict[str, Any] = {"input_ids": ids}
        if "decoder_input_ids" in known:
            inputs["decoder_input_ids"] = ids
        if self.position_ids is not None:
            inputs["position_ids"] = self.position_ids.to(ids.device)
        if "use_cache" in known:
            inputs["use_cache"] = False
        self._outer(**inputs)


def summary(measured: dict[str, dict[str, Any]]) -> dict[str, list[float | None]]:
    """A line for a log: by figure a list over the attention modules, 4 significant digits.

    The largest of the heads' `max_logit`; means over heads of the rest.
    """
    heads = {
        "max_logit": torch.amax, "mean_change": torch.mean, "row_sum": torch.mean,
        "saturated": torch.mean,
    }  # fmt: skip
    line: dict[str, list[float | None]] = {}
    for key in (*heads, "offset", "slope"):
        values = [figures[key] for figures in measured.values()]
        if key in heads:
            values = [None if v is None else heads[key](v, 0).item() for v in values]
        # JSON has no NaN.
        known = [v is not None and math.isfinite(v) for v in values]
        line[key] = [float(f"{v:.4g}") if ok else None for v, ok in zip(values, known, strict=True)]
    return line


def _figures(function: str, call: Call, row: Tensor | None) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Attention by its definition.

    Returns:
        Output `[B, H, M, V]`; final logits `[H, pairs]` (NaN where a head does not see a pair),
        and by row `[H, B M]` the largest of them, the sum of the weights (NaN where a row sees
        nothing) and the largest weight.
    """
    options = {name: part for name, part in call.options.items() if name != "dropout"}
    z, hidden, value = logits_of(
        call.query, call.key, call.value, options["scaling"], options["visible"],
        options["is_causal"], options["softcap"], None, options["logit_bias"], True,
    )  # fmt: skip
    if function == "sigmoid":
        logits = z + row_of(-call.log_n if row is None else row, z)
        weights = logits.sigmoid().masked_fill(hidden, 0.0)
    else:
        logits = z if row is None else z * row_of(row, z)
        weights = logits.masked_fill(hidden, -math.inf)
        if call.sinks is not None:
            sink = call.sinks.to(z.dtype).view(1, -1, 1, 1).expand(*z.shape[:3], 1)
            weights = torch.cat([weights, sink], -1)
        # A row that sees nothing would be 0/0.
        weights = weights.masked_fill(hidden.all(-1, keepdim=True), 0.0)
        weights = weights.softmax(-1)[..., : z.shape[-1]].masked_fill(hidden, 0.0)
    pairs = ~hidden.all(1)  # [B, M, N]
    seen = logits.float().masked_fill(hidden, math.nan).transpose(0, 1)[:, pairs]
    sums = weights.sum(-1).masked_fill(hidden.all(-1), math.nan)
    by_row = (logits.masked_fill(hidden, -math.inf).amax(-1), sums, weights.amax(-1))
    by_row = (each.float().transpose(0, 1).flatten(1) for each in by_row)
    return (weights @ value).to(call.query.dtype), (seen, *by_row)


def _whole(module: nn.Module, here: Tensor) -> Tensor:
    """`[H, …]` on the CPU, of all heads where tensor parallelism splits them."""
    heads, part, group = head_part(module, here.shape[0])
    if group is None:
        return here.cpu()
    whole = here.new_zeros(heads, *here.shape[1:])
    whole[part] = here
    dist.all_reduce(whole, group=group)
    return whole.cpu()


def _row_numbers(module: nn.Module, function: str | None) -> dict[str, float | None]:
    holder = parameters.holder_of(module)
    found: dict[str, float | None] = {"offset": None, "slope": None}
    if holder is None or holder.function != function:
        return found
    for name in found:
        number = getattr(holder, name)
        if number is None:
            number = torch.as_tensor(holder.values[name])
        else:
            number = number.detach()
            number = number.full_tensor() if hasattr(number, "full_tensor") else number
            number = _whole(module, number)
        found[name] = number.float().mean().item()
    return found


def _unwrapped(model: nn.Module) -> nn.Module:
    """Without DDP, whose forward pass is collective, and torch.compile."""
    while not isinstance(model, PreTrainedModel):
        inner = getattr(model, "_orig_mod", None) or model._modules.get("module")
        if inner is None:
            break
        model = inner
    return model


@contextlib.contextmanager
def _undisturbed(model: nn.Module) -> Iterator[None]:
    """In evaluation mode; every module's mode, random numbers and shards as before afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    device = next(model.parameters()).device
    devices = [device] if device.type == "cuda" else []
    # A compiled forward pass would be compiled anew for the probe, and once more after it.
    with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
        try:
            model.eval()
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            reshard(model)
