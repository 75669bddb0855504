"""One pair of torch.library operators for each implementation of the two attention functions.

An implementation is two plain functions, `forward` and `backward`; `define` gives them a schema,
fake implementations and autograd, so that every implementation compiles, exports and checkpoints
alike.

Shapes (B batch, H query heads, G key/value heads, M queries, N keys, D and V head dims):

    query [B, H, M, D]   key [B, G, N, D]   value [B, G, N, V]
    row          [B, H, M]     b_m of sigmoid or c_m of ssmax, float32 (float64 with float64 inputs)
    intervals    [B, M, 2]     int32, the keys [lo, hi) that each query sees
    mask         [B, H, M, N]  bool or None, further restricts the interval
    logit_bias   [B, H, M, N]  float or None, added to the logits; each size may be 1; −∞ hides
    alibi_slopes [B, H]        row's dtype or None
    sinks        [H]           row's dtype or None, one more logit in the softmax's denominator

    z = τ q·k;  softcap·tanh(z/softcap) if softcap > 0;  − slope |m + N − M − n|;  + logit_bias
    sigmoid: p = σ(z + row)       ssmax: p = softmax_n(row·z), the sink's logit not multiplied

Any of these may be expanded (stride 0) or otherwise strided. A row that sees nothing gives 0.
"""

from collections.abc import Callable

import torch
from torch import Tensor

INPUTS = (
    "Tensor query, Tensor key, Tensor value, Tensor row, Tensor intervals, Tensor? mask, "
    "Tensor? logit_bias, Tensor? alibi_slopes, Tensor? sinks, str function, float scaling, "
    "float softcap, float dropout, int seed"
)


def define(name: str, forward: Callable, backward: Callable) -> Callable:
    """Register `hf_sigmoid::{name}_forward` and `_backward`; return the differentiable forward.

    forward(query … seed, statistics)
        -> output [B, H, M, V], log_sum_exp, max_logit, weight_sum, each [B, H, M] in row's dtype
        The output is laid out in memory as [B, M, H, V]. log_sum_exp is of the final logits, the
        sink included, natural logarithm; for sigmoid it is empty. max_logit is the largest final
        logit that a row sees (z + b or c z, a sink not counted), −∞ if it sees none; weight_sum is
        Σ_n p. Both are empty unless `statistics`, and have no gradient.
    backward(grad_output, output, log_sum_exp, wants_logit_bias, query … seed)
        -> gradients of query, key, value, row [B, H, M], logit_bias (in its own sizes),
        alibi_slopes [B, H], sinks [H], each contiguous; empty where the input is None or is not
        wanted.
        For sigmoid `output` is empty: the backward pass does not need it.
    """
    forward_op = torch.library.custom_op(
        f"hf_sigmoid::{name}_forward",
        forward,
        mutates_args=(),
        schema=f"({INPUTS}, bool statistics) -> (Tensor, Tensor, Tensor, Tensor)",
    )
    backward_op = torch.library.custom_op(
        f"hf_sigmoid::{name}_backward",
        backward,
        mutates_args=(),
        schema=(
            "(Tensor grad_output, Tensor output, Tensor log_sum_exp, bool wants_logit_bias, "
            f"{INPUTS})"
            " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)"
        ),
    )
    forward_op.register_fake(_fake_forward)
    backward_op.register_fake(_fake_backward)

    def setup_context(ctx, inputs, output):
        query, key, value, row, intervals, mask, logit_bias, alibi_slopes, sinks, *rest = inputs
        function = rest[0]
        saved, log_sum_exp, _, _ = output
        if function == "sigmoid":
            saved = saved.new_empty(0)
        ctx.save_for_backward(
            saved,
            log_sum_exp,
            query,
            key,
            value,
            row,
            intervals,
            mask,
            logit_bias,
            alibi_slopes,
            sinks,
        )
        ctx.rest = rest[:-1]  # statistics have no backward pass

    def differentiate(ctx, grad_output, *_):
        output, log_sum_exp, *tensors = ctx.saved_tensors
        alibi_slopes, sinks = tensors[7:]
        gradients = backward_op(
            grad_output, output, log_sum_exp, ctx.needs_input_grad[6], *tensors, *ctx.rest
        )
        dq, dk, dv, drow, dlogit_bias, dalibi_slopes, dsinks = gradients
        return (
            dq,
            dk,
            dv,
            drow,
            None,
            None,
            dlogit_bias if ctx.needs_input_grad[6] else None,
            dalibi_slopes if alibi_slopes is not None else None,
            dsinks if sinks is not None else None,
            *(None for _ in ctx.rest),
            None,
        )

    forward_op.register_autograd(differentiate, setup_context=setup_context)
    return forward_op


def empty_output(query: Tensor, value: Tensor) -> Tensor:
    """[B, H, M, V] in query's dtype whose memory is [B, M, H, V], the order transformers wants."""
    B, H, M, _ = query.shape
    return query.new_empty(B, M, H, value.shape[-1]).transpose(1, 2)


def _fake_forward(query, key, value, row, intervals, mask, logit_bias, alibi_slopes, sinks,
                  function, scaling, softcap, dropout, seed, statistics):  # fmt: skip
    def by_row(wanted):
        return row.new_empty(query.shape[:3] if wanted else 0)

    output = empty_output(query, value)
    return output, by_row(function == "ssmax"), by_row(statistics), by_row(statistics)


def _fake_backward(grad_output, output, log_sum_exp, wants_logit_bias, query, key, value, row,
                   intervals, mask, logit_bias, alibi_slopes, sinks, function, scaling, softcap,
                   dropout, seed):  # fmt: skip
    def like(tensor, wanted=True):
        return row.new_empty(0) if tensor is None or not wanted else tensor.new_empty(tensor.shape)

    return (
        like(query),
        like(key),
        like(value),
        row.new_empty(query.shape[:3]),
        like(logit_bias, wants_logit_bias),
        like(alibi_slopes),
        like(sinks),
    )
