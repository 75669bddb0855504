"""Forward pass of both functions.

    sigmoid   o_m = Σ_n σ(z_mn + b_m) v_n
    ssmax     o_m = Σ_n exp(c_m z_mn − l_m) v_n        l_m = log(Σ_n exp(c_m z_mn) + exp(sink))

Derivation and tiling: kernels/README.md. z is defined in tiles.py.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_sigmoid.kernels.flash import tuning
from hf_sigmoid.kernels.flash.tiles import (
    LN2,
    LOG2E,
    constants,
    dot,
    head_ptr,
    key_range,
    load_intervals,
    load_matrix,
    logits,
    row_ptrs,
    sigmoid,
    sigmoid_offset,
    split_range,
    store_matrix,
    strided,
    unit,
    visible,
)
from hf_sigmoid.ops import empty_output


@triton.jit
def _forward(
    q, k, v, row, intervals, mask, bias, slopes, sinks, o, lse,
    M, N, scaling, softcap,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    FUNCTION: tl.constexpr, HAS_SOFTCAP: tl.constexpr, FORM: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program writes one [BLOCK_M, V] tile of the output of one head."""
    tiles = tl.cdiv(M, BLOCK_M)
    pid = tl.program_id(0)
    # Late rows first: under a causal mask they have the most work.
    tile = tiles - 1 - pid % tiles
    b = pid // tiles // H
    h = pid // tiles % H
    g = h // (H // G)
    local_m = tl.arange(0, BLOCK_M)
    local_n = tl.arange(0, BLOCK_N)
    rows = tile * BLOCK_M + local_m
    lo, hi = load_intervals(intervals, b, rows, M, N)
    first, last, all_first, all_last = key_range(lo, hi, rows, M, N)
    start, stop, full_start, full_stop = split_range(first, last, all_first, all_last, BLOCK_N)
    if mask is not None:
        full_stop = full_start
    skipped = full_stop - full_start

    numbers = tl.load(row_ptrs(row, b, h, rows), mask=rows < M, other=0.0).to(ACC)
    q_tile = load_matrix(head_ptr(q, b, h), q, tile * BLOCK_M, local_m, rows < M, D, BLOCK_D)
    slope = None
    if slopes is not None:
        slope = tl.load(head_ptr(slopes, b, h)).to(ACC)
    sign = 1.0
    if FUNCTION == "sigmoid":
        factors = tl.zeros([BLOCK_M], ACC) - LOG2E * unit(bias, slopes, scaling, HAS_SOFTCAP)
        offsets = sigmoid_offset(numbers, FORM)
    else:
        # c z = |c| (±z): the largest c z of a row is then found before anything is multiplied.
        signs = tl.where(numbers < 0, -1.0, 1.0).to(ACC)
        q_tile = (q_tile.to(ACC) * signs[:, None]).to(q.ptr.dtype.element_ty)
        sign = signs[:, None]
        if slopes is not None:
            slope = slope * sign
        factors = tl.abs(numbers) * (LOG2E * unit(bias, slopes, scaling, HAS_SOFTCAP))
        largest = tl.full([BLOCK_M], -float("inf"), ACC)
        total = tl.zeros([BLOCK_M], ACC)
        if sinks is not None:
            largest = tl.zeros([BLOCK_M], ACC) + tl.load(sinks.ptr + h * sinks.strides[0]) * LOG2E
            total += 1.0

    acc = tl.zeros([BLOCK_M, BLOCK_V], ACC)
    k_ptr = head_ptr(k, b, g)
    v_ptr = head_ptr(v, b, g)
    # One body, two loops: tiles that every row sees whole, then what is left around them.
    for RAGGED in tl.static_range(2):
        if RAGGED or mask is None:
            begin = start if RAGGED else full_start
            length = (stop - start - skipped) if RAGGED else skipped
            for i in tl.range(0, length, BLOCK_N):
                n = begin + i
                shown = None
                if RAGGED:
                    n = tl.where(n < full_start, n, n + skipped)
                    # Keys that no row sees are not read: unused memory may hold NaN, and
                    # 0·NaN is NaN.
                    shown = (n + local_n >= first) & (n + local_n < last)
                cols = n + local_n
                k_tile = load_matrix(k_ptr, k, n, local_n, shown, D, BLOCK_D)
                s = dot(q_tile, tl.trans(k_tile), None)
                z, _ = logits(s, bias, slope, sign, b, h, rows[:, None], cols[None, :], M, N,
                              scaling, softcap, HAS_SOFTCAP)  # fmt: skip
                if RAGGED:
                    keep = visible(lo[:, None], hi[:, None], mask, b, h, rows[:, None],
                                   cols[None, :], M, N)  # fmt: skip
                if FUNCTION == "sigmoid":
                    p = sigmoid(tl.fma(z, factors[:, None], offsets[:, None]), FORM)
                else:
                    if RAGGED:
                        top = tl.max(tl.where(keep, z, -float("inf")), 1)
                        # A multiplier of 0 would make 0·(−inf) of a row that sees nothing here.
                        top = tl.where(top == -float("inf"), top, top * factors)
                    else:
                        top = tl.max(z, 1) * factors
                    top = tl.maximum(largest, top)
                    shift = tl.where(top == -float("inf"), 0.0, top)
                    p = tl.exp2(tl.fma(z, factors[:, None], -shift[:, None]))
                if RAGGED:
                    p = tl.where(keep, p, 0.0)
                if FUNCTION == "ssmax":
                    shrink = tl.exp2(largest - shift)
                    total = tl.fma(total, shrink, tl.sum(p, 1))
                    acc = acc * shrink[:, None]
                    largest = top
                v_tile = load_matrix(v_ptr, v, n, local_n, shown, V, BLOCK_V)
                acc = dot(p.to(v.ptr.dtype.element_ty), v_tile, acc)

    if FUNCTION == "ssmax":
        # A row that has seen nothing has total 0: output 0, log-sum-exp −inf.
        total = tl.where(total > 0, total, 1.0)
        acc = acc / total[:, None]
        tl.store(row_ptrs(lse, b, h, rows), (largest + tl.log2(total)) * LN2, mask=rows < M)
    store_matrix(head_ptr(o, b, h), o, rows, acc, M, V, BLOCK_V)


def forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    row: Tensor,
    intervals: Tensor,
    mask: Tensor | None,
    logit_bias: Tensor | None,
    alibi_slopes: Tensor | None,
    sinks: Tensor | None,
    function: str,
    scaling: float,
    softcap: float,
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of one call; the contract is `hf_sigmoid.ops.define`'s."""
    refuse_dropout(dropout)
    B, H, M, D = query.shape
    N, V = value.shape[2:]
    output = empty_output(query, value)
    log_sum_exp = row.new_empty(0) if function == "sigmoid" else row.new_empty(B, H, M)
    with torch.cuda.device_of(query):
        tile = tuning.tile("forward", query.dtype, max(D, V))
        programs = triton.cdiv(M, tile.block_m) * B * H
        if programs:
            _forward[(programs,)](
                strided(query), strided(key), strided(value), strided(row), strided(intervals),
                strided(mask), strided(logit_bias), strided(alibi_slopes), strided(sinks),
                strided(output), None if function == "sigmoid" else strided(log_sum_exp),
                M, N, scaling, softcap,
                **constants(query, key, value, function, softcap),
                BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, FORM=tuning.form(query.dtype),
                num_warps=tile.num_warps, num_stages=tile.num_stages,
            )  # fmt: skip
    return output, log_sum_exp


def refuse_dropout(dropout: float) -> None:
    if dropout:
        raise ValueError(f"the Triton kernels have no dropout: expected dropout=0.0, got {dropout}")
