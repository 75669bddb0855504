"""The query bias that makes sigmoid attention nearest to a softmax checkpoint's, fitted per head.

    softmax_n = exp(z_n − L_m),  L_m = log Σ_n exp(z_n)     sigmoid σ(z_n + b_m) ≈ exp(z_n + b_m)

So b_m should be −L_m, and what a head can hold is affine in log n_m, plus linear in its query and
in the module's input:

    L_m ≈ β_h + γ_h log n_m (+ w_h·q_m) (+ u_h·x_m)   least squares over the rows of a text

With x it is a ridge regression: q is nearly linear in x.

Only the normal equations are kept: (2 + D)² numbers a head, and with x of width C also C² a module
and (2 + D) C a head. No attention matrix, any length of text.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from tqdm import tqdm
from transformers import PreTrainedModel

from hf_sigmoid import attention, functional, masks, parameters, support
from hf_sigmoid.attention import Call
from hf_sigmoid.conversions import models, reading
from hf_sigmoid.parameters import LogLength
from hf_sigmoid.replace_attention import standing_in

Batch = Tensor | dict[str, Tensor]
RIDGE = 1e-3  # of each feature's sum of squares


@dataclass
class Fit:
    """The fit of the heads of one attention module; all float64 on the CPU."""

    offset: Tensor  # [H], of b = −L
    slope: Tensor  # [H]
    query: Tensor | None  # [H, D]
    hidden: Tensor | None  # [H, C]
    residual: Tensor  # [H], standard deviation of L that the fit leaves, in nats
    spread: Tensor  # [H], standard deviation of L itself
    rows: int

    @property
    def r_squared(self) -> Tensor:
        """[H], the share of L's variance that the fit explains."""
        return 1 - (self.residual / self.spread.clamp(min=1e-12)).square()

    def bias(self, log_n: Tensor, query: Tensor, inputs: Tensor | None) -> Tensor:
        """b `[B, H, M]`, float32, of queries `[B, H, M, D]` and the module's input `[B, M, C]`."""
        offset, slope = (
            t.float().to(query.device).view(1, -1, 1) for t in (self.offset, self.slope)
        )
        bias = offset + slope * log_n
        if self.query is not None:
            weights = self.query.float().to(query.device)
            bias = bias + torch.einsum("bhmd,hd->bhm", query.float(), weights)
        if self.hidden is not None:
            weights = self.hidden.float().to(inputs.device)
            bias = bias + torch.einsum("bmc,hc->bhm", inputs.float(), weights)
        return bias

    @torch.no_grad()
    def copy_to(self, holder: LogLength) -> None:
        """Give a module's holder these numbers."""
        holder.offset.copy_(self.offset)
        holder.slope.copy_(self.slope)
        for name in ("query", "hidden"):
            if getattr(self, name) is not None:
                getattr(holder, name).copy_(getattr(self, name))


@dataclass
class LayerError:
    """The distance of sigmoid from softmax attention on the same queries, keys and values."""

    relative: float  # ‖sigmoid − softmax‖ / ‖softmax‖ of the module's output before its projection
    row_sum: float  # mean over rows of Σ_n σ(z_n + b); softmax's is 1
    saturated: float  # share of rows whose largest weight is above 0.99


def calibrate(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    *,
    query: bool = False,
    hidden: bool = False,
    part: str | None = None,
    progress: bool = True,
) -> dict[str, Fit]:
    """Fit b_m = offset_h + slope_h log n_m (+ query_h·q_m + hidden_h·x_m) to −log-sum-exp.

    Args:
        model: a model that runs softmax; it is left as it was found.
        batches: token ids `[B, T]`, without padding; or dicts of what the model's forward takes,
            for parts that text does not get to.
        query: also fit the part that is linear in the query.
        hidden: and, with `query`, the part that is linear in what the attention module gets.
        part: of a composite model, see `plan`.

    Returns:
        One `Fit` for each attention module that the batches get to, by its name in the model.

    Raises:
        ValueError: a head whose log-sum-exp is not finite; `hidden` of modules that do not get one
            input a query.
    """
    sums = collect(model, batches, hidden=hidden, part=part, progress=progress)
    return solve(sums, query=query, hidden=hidden)


@torch.no_grad()
def collect(
    model: PreTrainedModel,
    batches: Iterable[Batch],
    *,
    hidden: bool = False,
    part: str | None = None,
    progress: bool = True,
) -> dict[str, "NormalEquations"]:
    """The sums that every fit needs of a text, by attention module; the model stays as it was.

    Args:
        hidden: also those of the module's inputs, where they are one row a query.
    """
    sums: dict[str, NormalEquations] = {}

    def note(name: str, call: Call, inputs: Tensor | None) -> Tensor:
        output, log_sum_exp = functional.ssmax_attention(
            *call[:3], **call.options, sinks=call.sinks, return_log_sum_exp=True
        )
        known = hidden and parameters.fits(inputs, call.query)
        equations = sums.setdefault(name, NormalEquations())
        equations.add(call.query, call.log_n, log_sum_exp, inputs if known else None)
        return output

    _run(model, part, note, batches, "calibrating", progress)
    return sums


def solve(
    sums: dict[str, "NormalEquations"], *, query: bool, hidden: bool = False
) -> dict[str, Fit]:
    """The least squares fits of collected sums.

    Raises:
        ValueError: a head whose sums are not finite; it and its module are named.
    """
    for name, equations in sums.items():
        finite = torch.isfinite(equations.gram).flatten(1).all(1) & torch.isfinite(equations.square)
        if hidden and equations.hidden_gram is None:
            raise ValueError(
                f"{name}: a start from hidden states needs what the module gets, one row a query, "
                "and these sums are without it: expected another start, or no --stats"
            )
        if not finite.all():
            head = int((~finite).nonzero()[0])
            raise ValueError(f"{name}, head {head}: its log-sum-exp is not finite on this text")
    return {name: equations.solve(query, hidden) for name, equations in sums.items()}


@torch.no_grad()
def layer_errors(
    model: PreTrainedModel,
    fits: dict[str, Fit],
    batches: Iterable[Batch],
    *,
    part: str | None = None,
    progress: bool = True,
) -> dict[str, LayerError]:
    """Each module alone as sigmoid attention, on what it gets in the softmax model."""
    sums: dict[str, Tensor] = {}

    def note(name: str, call: Call, inputs: Tensor | None) -> Tensor:
        softmax = functional.ssmax_attention(*call[:3], **call.options, sinks=call.sinks)
        if name not in fits:
            return softmax
        bias = fits[name].bias(call.log_n, call.query, inputs)
        sigmoid, statistics = functional.sigmoid_attention(
            *call[:3], **call.options, bias=bias, return_statistics=True
        )
        figures = [
            (sigmoid - softmax).double().square().sum(),
            softmax.double().square().sum(),
            statistics.weight_sum.double().sum(),
            (statistics.max_logit > 4.6).double().sum(),  # σ(4.6) = 0.99
            torch.tensor(float(statistics.weight_sum.numel())),
        ]
        sums[name] = sums.get(name, 0) + torch.stack([figure.cpu().double() for figure in figures])
        return softmax

    _run(model, part, note, batches, "layer errors", progress)
    return {
        name: LayerError(
            relative=(error / norm.clamp(min=1e-30)).sqrt().item(),
            row_sum=(total / rows).item(),
            saturated=(saturated / rows).item(),
        )
        for name, (error, norm, total, saturated, rows) in sums.items()
    }


def _run(model: PreTrainedModel, part: str | None, note, batches, what: str, progress: bool):
    """Run batches, while `note` computes each attention output of the part that converts."""
    part, _ = models.find_part(model.config, part)
    text = reading.reader(model, part)
    with _recording(model, models.part_of(model, part), note):
        for batch in tqdm(list(batches), desc=what, disable=not progress):
            if isinstance(batch, Tensor):
                text(**reading.feed(text, batch))
            else:
                model(**batch)


@contextlib.contextmanager
def _recording(
    model: PreTrainedModel, inner: PreTrainedModel,
    note: Callable[[str, Call, Tensor | None], Tensor],
) -> Iterator[None]:  # fmt: skip
    """While it lasts, `note` computes each attention output `[B, H, M, V]` of an inner model.

    It gets the module's name, the call, and the module's first input.
    """
    names = {module: name for name, module in model.named_modules()}
    inputs: dict[nn.Module, Tensor | None] = {}

    def recorder(module: nn.Module, *args, output_attentions=None, **kwargs):
        call = attention.read("softmax", module, *args, **kwargs)
        output = note(names[module], call, inputs.get(module))
        return output.transpose(1, 2).contiguous(), None

    def keep(module: nn.Module, first: Tensor | None) -> None:
        inputs[module] = first

    training = model.training
    try:
        model.eval()
        with contextlib.ExitStack() as stack:
            for _, module in parameters.attention_modules(inner):
                for hook in parameters.watch_inputs(module, keep):
                    stack.callback(hook.remove)
            stack.enter_context(standing_in(support.configs(inner), recorder, masks.interval_mask))
            yield
    finally:
        model.train(training)


class NormalEquations:
    """Σ f fᵀ, Σ f L and Σ L² over rows, per head, with features f = [1, log n, q], float64.

    With the module's inputs x [C] also Σ x xᵀ [C, C], of all heads, Σ x fᵀ [H, C, 2 + D] and
    Σ x L [H, C].
    """

    def __init__(
        self, gram: Tensor = 0.0, moment: Tensor = 0.0, square: Tensor = 0.0, rows: int = 0
    ):
        self.gram, self.moment, self.square, self.rows = gram, moment, square, rows
        self.hidden_gram = self.hidden_cross = self.hidden_moment = None

    def add(
        self, q: Tensor, log_n: Tensor, log_sum_exp: Tensor, inputs: Tensor | None = None
    ) -> None:
        B, H, M, _ = q.shape
        log_n = log_n.expand(B, H, M).double()
        features = torch.stack([torch.ones_like(log_n), log_n], -1)
        features = torch.cat([features, q.double()], -1)
        features = features.transpose(0, 1).reshape(H, B * M, -1)
        target = log_sum_exp.double().transpose(0, 1).reshape(H, B * M, 1)
        self.gram = self.gram + (features.transpose(1, 2) @ features).cpu()
        self.moment = self.moment + (features.transpose(1, 2) @ target).cpu()
        self.square = self.square + target.square().sum((1, 2)).cpu()
        self.rows += B * M
        if inputs is not None:
            x = inputs.reshape(B * M, -1).double()
            sums = x.T @ x, x.T @ features, (x.T @ target).squeeze(-1)
            names = "hidden_gram", "hidden_cross", "hidden_moment"
            for name, each in zip(names, sums, strict=True):
                known = getattr(self, name)
                setattr(self, name, each.cpu() if known is None else known + each.cpu())

    def solve(self, query: bool, hidden: bool = False) -> Fit:
        used = slice(None) if query else slice(2)  # without q: the corner of the same sums
        gram, moment = self.gram[:, used, used], self.moment[:, used]
        error = self.square
        if hidden:  # block elimination: x's block is inverted once for all heads
            cross, of_x = self.hidden_cross[..., used], self.hidden_moment.unsqueeze(-1)
            inverse = _pinv(_with_ridge(self.hidden_gram))
            error = error - (of_x * (inverse @ of_x)).sum((1, 2))
            gram = _with_ridge(gram, first=2) - cross.mT @ inverse @ cross
            moment = moment - cross.mT @ inverse @ of_x
        solution = _pinv(gram) @ moment
        error = error - (solution * moment).sum((1, 2))
        weights = (inverse @ (of_x - cross @ solution)).squeeze(-1) if hidden else None
        solution = solution.squeeze(-1)
        mean = self.moment[:, 0, 0] / self.rows
        return Fit(
            offset=-solution[:, 0],
            slope=-solution[:, 1],
            query=-solution[:, 2:] if query else None,
            hidden=-weights if hidden else None,
            residual=(error / self.rows).clamp(min=0).sqrt(),
            spread=(self.square / self.rows - mean.square()).clamp(min=0).sqrt(),
            rows=self.rows,
        )


def _with_ridge(gram: Tensor, first: int = 0) -> Tensor:
    """From the feature `first` on, RIDGE times a feature's sum of squares is added to it.

    q is nearly linear in x, so that w and u could cancel each other with weights of any size, and
    rounding would be left of the sum.
    """
    ridge = RIDGE * gram.diagonal(dim1=-2, dim2=-1)
    ridge[..., :first] = 0
    return gram + torch.diag_embed(ridge)


def _pinv(gram: Tensor) -> Tensor:
    """A feature that never varied (all rows of one length) gets no weight."""
    return torch.linalg.pinv(gram, hermitian=True, rtol=1e-10)
