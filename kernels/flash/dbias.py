"""The gradient of logit_bias: dz, summed over the batches and heads that share it.

The equations are in `backward.py`.
"""

import triton
import triton.language as tl

from hf_sigmoid.kernels.flash.dropout import drop
from hf_sigmoid.kernels.flash.recompute import load_exponents, logit_gradient, probability
from hf_sigmoid.kernels.flash.tiles import (
    dot,
    head_ptr,
    key_range,
    load_intervals,
    load_matrix,
    load_rows,
    logits,
    score_ptrs,
    visible,
)


@triton.jit(do_not_specialize=["M", "N", "B", "seed"])
def backward_dbias(
    q, k, v, row, intervals, mask, bias, slopes, lse, do, delta, dbias,
    M, N, B, scaling, softcap, dropout, seed,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    FUNCTION: tl.constexpr, HAS_SOFTCAP: tl.constexpr, FORM: tl.constexpr, ACC: tl.constexpr,
    INDEX: tl.constexpr, ONE_BATCH: tl.constexpr, ONE_HEAD: tl.constexpr,
):  # fmt: skip
    """One program writes a [BLOCK_M, BLOCK_N] tile of the gradient of logit_bias.

    It is the sum of dz over the batches and heads that share the tile: all if ONE_BATCH, ONE_HEAD.
    """
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    m = pid // tiles_n % tiles_m * BLOCK_M
    n = pid % tiles_n * BLOCK_N
    place = pid // tiles_n // tiles_m
    heads = 1 if ONE_HEAD else H
    batches = B if ONE_BATCH else 1
    shared_heads: tl.constexpr = H if ONE_HEAD else 1
    local_m = tl.arange(0, BLOCK_M).to(INDEX)
    local_n = tl.arange(0, BLOCK_N).to(INDEX)
    rows, cols = m + local_m, n + local_n
    acc = tl.zeros([BLOCK_M, BLOCK_N], ACC)
    for each in tl.range(0, batches * shared_heads):
        b = place // heads + each // shared_heads
        h = place % heads + each % shared_heads
        g = h // (H // G)
        lo, hi = load_intervals(intervals, b, rows, M, N)
        first, last, _all_first, _all_last = key_range(lo, hi, rows, M, N)
        if (first < n + BLOCK_N) & (last > n):
            shown = (cols >= first) & (cols < last)
            numbers, factors, offsets = load_exponents(
                row, lse, bias, slopes, b, h, rows, rows < M, scaling, M, H, FUNCTION, HAS_SOFTCAP,
                FORM, 0, ACC,
            )  # fmt: skip
            deltas = tl.zeros([BLOCK_M], ACC)
            if FUNCTION == "ssmax":
                deltas = load_rows(delta, b, h, rows, rows < M, H, M)
            slope = None
            if slopes is not None:
                slope = tl.load(head_ptr(slopes, b, h)).to(ACC)
            q_tile = load_matrix(head_ptr(q, b, h), q, m, local_m, lo < hi, D, BLOCK_D)
            k_tile = load_matrix(head_ptr(k, b, g), k, n, local_n, shown, D, BLOCK_D)
            s = dot(q_tile, tl.trans(k_tile), None)
            do_tile = load_matrix(head_ptr(do, b, h), do, m, local_m, lo < hi, V, BLOCK_V)
            v_tile = load_matrix(head_ptr(v, b, g), v, n, local_n, shown, V, BLOCK_V)
            dp = dot(do_tile, tl.trans(v_tile), None)
            z, _dcap = logits(s, bias, slope, b, h, rows[:, None], cols[None, :], M, N, scaling,
                                softcap, HAS_SOFTCAP)  # fmt: skip
            keep = None
            if bias is not None:
                keep = z != -float("inf")
            p = probability(z, factors[:, None], offsets[:, None], FUNCTION, FORM, 0)
            keep = visible(lo[:, None], hi[:, None], mask, b, h, rows[:, None], cols[None, :], keep)
            _dropped, dp = drop(p, dp, dropout, seed, b, h, rows, n, False)
            dz = logit_gradient(p, dp, deltas[:, None], None, FUNCTION, 0)
            if FUNCTION == "ssmax":
                dz = dz * numbers[:, None]
            acc += tl.where(keep, dz, 0.0)
    inside = (rows < M)[:, None] & (cols < N)[None, :]
    ptrs = score_ptrs(dbias, place // heads, place % heads, rows[:, None], cols[None, :])
    tl.store(ptrs, acc.to(dbias.ptr.dtype.element_ty), mask=inside)
