"""The two public verbs: they check the arguments once, choose an implementation, and call it.

    z_mn = τ q_m·k_n        then softcap·tanh(z / softcap), − slope_h |m + N − M − n|, + logit_bias
    sigmoid   o_m = Σ_n σ(z_mn + b_m) v_n                Ramapuram et al. 2024, arXiv:2409.04431
    ssmax     o_m = Σ_n softmax_n(c_m z_mn) v_n          Nakanishi 2025, arXiv:2501.19399

Letters: B batch, H query heads, G key/value heads, M queries, N keys, D and V head dims.
"""

import importlib.util
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad

from hf_sigmoid import arguments, cpu, reference

HAS_TRITON = importlib.util.find_spec("triton") is not None

# A boolean mask up to this size may be built for scaled_dot_product_attention: it is the faster
# softmax, and beyond it the blocked path keeps memory O(block·N).
DENSE_MASK_ELEMENTS = 1 << 22

OLDEST_GPU = (8, 0)  # compute capability: the kernels' tiles do not fit into older ones


class Statistics(NamedTuple):
    """Figures of a call's weights by query: `[B, H, M]`, float32, not differentiable.

    max_logit: the largest final logit that the query sees, z + b of sigmoid or c z of ssmax (a
        sink's not counted); −∞ if it sees no key. QK-clip and its kin watch it.
    weight_sum: Σ_n p, the row sum of the weights. Of sigmoid it is any number ≥ 0; of ssmax it is
        1, less a sink's share, and 0 if the query sees no key.
    """

    max_logit: Tensor
    weight_sum: Tensor


def sigmoid_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None = None,
    bias: float | Tensor = 0.0,
    visible: Tensor | None = None,
    is_causal: bool = False,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    logit_bias: Tensor | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
    return_statistics: bool = False,
) -> Tensor | tuple[Tensor, Statistics]:
    """Sigmoid attention, o_m = Σ_n σ(z_mn + b_m) v_n: no normalisation over the keys.

    z_mn = τ q_m·k_n, then softcap·tanh(z / softcap), − slope_h |m + N − M − n|, + logit_bias.
    Source: Ramapuram et al. 2024, arXiv:2409.04431.

    Args:
        query: `[B, H, M, D]`, float; any strides.
        key: `[B, G, N, D]` with H a multiple of G (grouped heads).
        value: `[B, G, N, V]`; V may differ from D.
        scaling: τ; 1/√D if None.
        bias: b_m, a float or a tensor broadcastable to `[B, H, M]`, differentiable; about −log n.
        visible: int32 `[B, M, 2]` or `[B, 1, M, 2]`, the keys [lo, hi) that each query sees, or
            bool broadcastable to `[B, H, M, N]`, True where seen. None: every key.
        is_causal: query m also sees no key after m + N − M (lower-right alignment).
        softcap: bound of the logits, before anything is added to them.
        alibi_slopes: `[H]` or `[B, H]`, differentiable.
        logit_bias: float broadcastable to `[B, H, M, N]`, differentiable; −inf hides a key.
        dropout: probability of dropping a weight, in [0, 1); drawn from torch's generator.
        backend: "auto" takes the fastest that serves these arguments exactly; "triton", "torch"
            (blocked, O(block·N) memory) or "reference" take that one or raise.
        return_statistics: also return `Statistics`; not from backend "reference".

    Returns:
        `[B, H, M, V]` in query's dtype. A query that sees no key gets zeros.

    Raises:
        ValueError: an argument is wrong, or the backend asked for cannot serve it.
    """
    return _attention(
        "sigmoid", query, key, value, scaling, bias, visible, is_causal, softcap, alibi_slopes,
        logit_bias, None, dropout, backend, False, return_statistics,
    )  # fmt: skip


def ssmax_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    scaling: float | None = None,
    multiplier: float | Tensor = 1.0,
    visible: Tensor | None = None,
    is_causal: bool = False,
    softcap: float | None = None,
    alibi_slopes: Tensor | None = None,
    logit_bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
    return_log_sum_exp: bool = False,
    return_statistics: bool = False,
) -> Tensor | tuple:
    """Scalable softmax, o_m = Σ_n softmax_n(c_m z_mn) v_n with c_m = s·log n_m + b.

    The whole logit is multiplied, soft cap and biases included; a sink's is not.
    Source: Nakanishi 2025, arXiv:2501.19399.

    Args:
        multiplier: c_m, a float or a tensor broadcastable to `[B, H, M]`, differentiable; 1 is
            softmax.
        sinks: `[H]`, differentiable: exp(sink_h) is one more term of the softmax's denominator.
        return_log_sum_exp: also return the logarithm of that denominator, float32 `[B, H, M]`,
            −inf where a query sees nothing; not differentiable, not from backend "reference".
        return_statistics: also return `Statistics`, last; not from backend "reference".

    The other arguments, the result and the errors are those of `sigmoid_attention`.
    """
    return _attention(
        "ssmax", query, key, value, scaling, multiplier, visible, is_causal, softcap, alibi_slopes,
        logit_bias, sinks, dropout, backend, return_log_sum_exp, return_statistics,
    )  # fmt: skip


def _attention(function, query, key, value, scaling, row, visible, is_causal, softcap, alibi_slopes,
               logit_bias, sinks, dropout, backend, return_log_sum_exp,
               return_statistics):  # fmt: skip
    arguments.check(function, query, key, value, scaling, row, visible, softcap, alibi_slopes,
                    logit_bias, sinks, dropout, backend)  # fmt: skip
    tensors = (query, key, value, row, alibi_slopes, logit_bias, sinks)
    backend = _choose(function, query, value, backend, _has_tangents(tensors))
    B, H, M, D = query.shape
    N = key.shape[2]
    scaling = D**-0.5 if scaling is None else float(scaling)

    if backend == "reference":
        for name, asked in (
            ("return_log_sum_exp", return_log_sum_exp),
            ("return_statistics", return_statistics),
        ):
            if asked:
                raise ValueError(
                    f"{name} needs backend 'auto', 'torch' or 'triton', got 'reference'"
                )
        extra = {} if function == "sigmoid" else {"sinks": sinks}
        name = "bias" if function == "sigmoid" else "multiplier"
        call = reference.sigmoid_attention if function == "sigmoid" else reference.ssmax_attention
        return call(
            query, key, value, scaling=scaling, **{name: row}, visible=visible, is_causal=is_causal,
            softcap=softcap, alibi_slopes=alibi_slopes, logit_bias=logit_bias, dropout=dropout,
            **extra,
        )[0]  # fmt: skip

    dtype = torch.promote_types(query.dtype, torch.float32)
    if not isinstance(row, Tensor):
        row = torch.full((), float(row), dtype=dtype, device=query.device)
    row = row.to(dtype).expand(B, H, M)
    unusual = (softcap, alibi_slopes, logit_bias, sinks)
    plain = all(argument is None for argument in unusual)
    plain = plain and not return_log_sum_exp and not return_statistics
    if backend == "torch" and function == "ssmax" and plain:
        visible, is_causal = _simplest(visible, is_causal, M, N)
        small = visible is not None and B * M * N <= DENSE_MASK_ELEMENTS
        if small or (visible is None and (not is_causal or M == N or M == 1)):
            with torch.autocast(query.device.type, enabled=False):  # it would round c q again
                return _scaled_softmax(query, key, value, scaling, row, visible, is_causal, dropout)

    intervals, mask = _intervals(visible, B, M, N, is_causal, query.device)
    if logit_bias is not None:
        if logit_bias.dtype.itemsize > dtype.itemsize:
            logit_bias = logit_bias.to(dtype)
        # In the sizes that it was given in: made whole it would be as large as the weights.
        logit_bias = logit_bias[(None,) * (4 - logit_bias.dim())]
    if mask is not None:
        mask = mask.expand(B, H, M, N)
    if alibi_slopes is not None:
        alibi_slopes = alibi_slopes.to(dtype).expand(B, H)
    if sinks is not None:
        sinks = sinks.to(dtype)
    seed = int(torch.randint(1 << 31, ())) if dropout else 0
    if backend == "triton":
        from hf_sigmoid.kernels import flash

        call = flash.attention
    else:
        call = cpu.attention
    output, log_sum_exp, *statistics = call(
        query, key, value, row, intervals, mask, logit_bias, alibi_slopes, sinks, function, scaling,
        0.0 if softcap is None else float(softcap), float(dropout), seed, return_statistics,
    )  # fmt: skip
    extra = [log_sum_exp.detach()] if return_log_sum_exp else []
    if return_statistics:
        extra.append(Statistics(*(x.detach() for x in statistics)))
    return (output, *extra) if extra else output


def _simplest(visible, is_causal, M, N):
    """Intervals that are just causal, or everything, said without a mask: softmax kernels are then
    fastest, and equal to transformers' own to the last bit. Looks at values on a CPU only."""
    if visible is None or visible.dtype == torch.bool or not visible.is_cpu:
        return visible, is_causal
    if torch.compiler.is_compiling():
        return visible, is_causal
    lo, hi = visible.view(-1, M, 2).unbind(-1)
    if bool((lo > 0).any()):
        return visible, is_causal
    if bool((hi >= N).all()):
        return None, is_causal
    if M == N and torch.equal(hi, torch.arange(1, M + 1, dtype=hi.dtype).expand(hi.shape)):
        return None, True
    return visible, is_causal


def _scaled_softmax(query, key, value, scaling, row, visible, is_causal, dropout):
    """softmax_n((c_m q_m)·k_n): any softmax kernel is ssmax on scaled queries.

    c q, and the gradient of c, are rounded to query's dtype by a kernel of that dtype: in 16 bits
    only if c is 1 and has no gradient.
    """
    B, H, M, _ = query.shape
    G, N = key.shape[1:3]
    dtype = query.dtype
    if dtype != row.dtype and not _is_constant_one(row):
        query, key, value = (tensor.to(row.dtype) for tensor in (query, key, value))
    query = (query * row.unsqueeze(-1)).to(query.dtype)
    # As transformers does, so that a multiplier of 1 gives its softmax to the last bit.
    grouped = {"enable_gqa": True} if visible is None and H != G else {}
    if visible is None:
        output = torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            dropout_p=dropout,
            is_causal=is_causal and M > 1,
            scale=scaling,
            **grouped,
        )
        return output.to(dtype)
    intervals, shown = _intervals(visible, B, M, N, is_causal, query.device)
    if shown is None or is_causal:
        columns = torch.arange(N, device=query.device)
        lo, hi = intervals.view(B, 1, M, 1, 2).unbind(-1)
        inside = (columns >= lo) & (columns < hi)
        shown = inside if shown is None else inside & shown
    key, value = key.repeat_interleave(H // G, 1), value.repeat_interleave(H // G, 1)
    # A row that sees nothing has no softmax: let it see everything, then drop it and its gradient.
    empty = ~shown.any(-1, keepdim=True)
    output = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, attn_mask=shown | empty, dropout_p=dropout, scale=scaling
    )
    return output.masked_fill(empty, 0.0).to(dtype)


def _is_constant_one(row: Tensor) -> bool:
    """Is it known to be 1 everywhere, and to stay so? Values are not looked at in a graph."""
    if (
        torch.compiler.is_compiling()
        or row.is_meta
        or (row.requires_grad and torch.is_grad_enabled())
    ):
        return False
    return bool((row == 1).all())


def _intervals(visible, B, M, N, is_causal, device):
    """Row intervals int32 `[B, M, 2]` within [0, N], and the boolean mask if `visible` is one."""
    mask = None
    if visible is None or visible.dtype == torch.bool:
        mask = visible
        lo = torch.zeros((), dtype=torch.int32, device=device).expand(B, M)
        hi = torch.full((), N, dtype=torch.int32, device=device).expand(B, M)
    else:
        lo, hi = visible.view(B, M, 2).clamp(0, N).unbind(-1)
    if is_causal:
        after = torch.arange(1, M + 1, dtype=torch.int32, device=device) + (N - M)
        hi = torch.minimum(hi, after.clamp(min=0))
    return torch.stack([lo, torch.maximum(lo, hi)], -1), mask


def _choose(function, query, value, backend, has_tangents):
    """The backend that will run: "triton", "torch" or "reference"."""
    if has_tangents:
        if backend in ("triton", "torch"):
            raise ValueError(
                f"backend={backend!r} has no forward-mode derivative of {function} attention: "
                "backend='reference' has, and 'auto' takes it"
            )
        return "reference"
    if backend in ("torch", "reference") or (backend == "auto" and not query.is_cuda):
        return "torch" if backend == "auto" else backend
    if why := _triton_refusal(query, value):
        if backend == "triton":
            raise ValueError(f"backend='triton' cannot run {function} attention here: {why}")
        return "torch"
    return "triton"


def _has_tangents(tensors: tuple) -> bool:
    """Is a directional derivative being computed (`torch.func.jvp`, `forward_ad`)?"""
    if forward_ad._current_level < 0:
        return False
    return any(
        isinstance(tensor, Tensor) and forward_ad.unpack_dual(tensor).tangent is not None
        for tensor in tensors
    )


def _triton_refusal(query: Tensor, value: Tensor) -> str | None:
    """Why the Triton kernels cannot serve these arguments; None if they can."""
    if not HAS_TRITON:
        return "the package triton is not installed"
    if not query.is_cuda and not _interprets():
        return (
            f"expected tensors on a GPU, got {query.device} "
            "(TRITON_INTERPRET=1 runs the kernels on a CPU, slowly)"
        )
    if query.dtype == torch.float64 and query.is_cuda:
        return "expected float32, bfloat16 or float16, got float64"
    if query.is_cuda and torch.version.hip is None:
        capability = torch.cuda.get_device_capability(query.device)
        if capability < OLDEST_GPU:
            return "expected a GPU of sm_80 or newer, got sm_{}{}".format(*capability)
    if max(query.shape[-1], value.shape[-1]) > 256:
        return f"expected head dims up to 256, got {query.shape[-1]} and {value.shape[-1]}"
    return None


def _interprets() -> bool:
    import triton

    return triton.knobs.runtime.interpret
