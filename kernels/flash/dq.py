"""The gradient of the queries, and all else that is summed over keys.

    dq_m = τ Σ_n ds_mn k_n      db_m = Σ_n dL_mn      dc_m = Σ_n dL_mn z_mn      δ_m = do_m·o_m

The equations are in `backward.py`.
"""

import triton
import triton.language as tl

from hf_sigmoid.kernels.flash.dropout import drop
from hf_sigmoid.kernels.flash.masked import listed, load_count, load_tile
from hf_sigmoid.kernels.flash.recompute import (
    load_exponents,
    logit_gradient,
    probability,
)
from hf_sigmoid.kernels.flash.tiles import (
    distance,
    dot,
    dot_of_weights,
    head_ptr,
    key_range,
    load_full,
    load_intervals,
    load_matrix,
    logits,
    row_ptrs,
    split_range,
    store_matrix,
    visible,
)


@triton.jit(do_not_specialize=["M", "N", "seed"])
def backward_dq(
    q, k, v, keys, values, row, intervals, mask, lists, bias, slopes, o, lse, do, dq, drow, dslope,
    delta, scales,
    M, N, scaling, softcap, dropout, seed,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    FUNCTION: tl.constexpr, HAS_SOFTCAP: tl.constexpr, FORM: tl.constexpr, ACC: tl.constexpr,
    INDEX: tl.constexpr, RAGGED_STAGES: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """One program writes one [BLOCK_M, D] tile of dq of one head, and all sums over its keys."""
    # Without softcap and additions dc = q·dq/c, one product a row and nothing in the loop.
    ROW_FROM_DQ: tl.constexpr = (
        FUNCTION == "ssmax" and not HAS_SOFTCAP and bias is None and slopes is None
    )
    tiles = tl.cdiv(M, BLOCK_M)
    pid = tl.program_id(0)
    tile = tiles - 1 - pid % tiles
    b = pid // tiles // H
    h = pid // tiles % H
    g = h // (H // G)
    local_m = tl.arange(0, BLOCK_M).to(INDEX)
    local_n = tl.arange(0, BLOCK_N).to(INDEX)
    rows = tile * BLOCK_M + local_m
    lo, hi = load_intervals(intervals, b, rows, M, N)
    first, last, all_first, all_last = key_range(lo, hi, rows, M, N)
    start, stop, full_start, full_stop = split_range(first, last, all_first, all_last, BLOCK_N)
    skipped = full_stop - full_start
    ragged = stop - start - skipped
    tile_list = None
    if mask is not None:
        tile_list = listed(lists, b, h, tile)
        ragged = load_count(tile_list, N, BLOCK_N, False) * BLOCK_N
        skipped = load_count(tile_list, N, BLOCK_N, True) * BLOCK_N

    # A row that sees nothing is not read either: its dq is 0 whatever it holds.
    q_tile = load_matrix(head_ptr(q, b, h), q, tile * BLOCK_M, local_m, lo < hi, D, BLOCK_D)
    do_tile = load_matrix(head_ptr(do, b, h), do, tile * BLOCK_M, local_m, lo < hi, V, BLOCK_V)
    numbers, factors, offsets = load_exponents(
        row, lse, bias, slopes, b, h, rows, rows < M, scaling, M, H, FUNCTION, HAS_SOFTCAP, FORM, 0,
        ACC,
    )  # fmt: skip
    scale = None
    if scales is not None:
        scale = tl.load(head_ptr(scales, b, g))
    deltas = tl.zeros([BLOCK_M], ACC)
    if FUNCTION == "ssmax":
        o_tile = load_matrix(head_ptr(o, b, h), o, tile * BLOCK_M, local_m, lo < hi, V, BLOCK_V)
        deltas += tl.sum(o_tile.to(ACC) * do_tile.to(ACC), 1)
        tl.store(row_ptrs(delta, b, h, rows, H, M), deltas, mask=rows < M)
        if scale is not None:
            deltas = deltas * scale
    slope = None
    if slopes is not None:
        slope = tl.load(head_ptr(slopes, b, h)).to(ACC)
        slope_sums = tl.zeros([BLOCK_M], ACC)

    dq_acc = tl.zeros([BLOCK_M, BLOCK_D], ACC)
    row_sums = tl.zeros([BLOCK_M], ACC)
    k_ptr = head_ptr(k, b, g)
    v_ptr = head_ptr(v, b, g)
    for RAGGED in tl.static_range(2):
        begin = start if RAGGED else full_start
        length = ragged if RAGGED else skipped
        for i in tl.range(0, length, BLOCK_N, num_stages=RAGGED_STAGES if RAGGED else None):
            n = begin + i
            shown = None
            if mask is not None:
                n = load_tile(tile_list, i, N, BLOCK_N, not RAGGED)
            elif RAGGED:
                n = tl.where(n < full_start, n, n + skipped)
            if RAGGED:
                shown = (n + local_n >= first) & (n + local_n < last)
            cols = n + local_n
            # Both products before the activation, which can then run under the second.
            if RAGGED:
                k_tile = load_matrix(k_ptr, k, n, local_n, shown, D, BLOCK_D)
            else:
                k_tile = load_full(k_ptr, k, keys, b, g, n, local_n, N, None, D, BLOCK_D)
            s = dot(q_tile, tl.trans(k_tile), None)
            if RAGGED:
                v_tile = load_matrix(v_ptr, v, n, local_n, shown, V, BLOCK_V)
            else:
                v_tile = load_full(v_ptr, v, values, b, g, n, local_n, N, None, V, BLOCK_V)
            dp = dot(do_tile, tl.trans(v_tile), None)
            z, dcap = logits(s, bias, slope, b, h, rows[:, None], cols[None, :], M, N,
                                   scaling, softcap, HAS_SOFTCAP)  # fmt: skip
            keep = None
            if bias is not None:
                keep = z != -float("inf")
            p = probability(z, factors[:, None], offsets[:, None], FUNCTION, FORM, 0)
            if RAGGED:
                keep = visible(lo[:, None], hi[:, None], mask, b, h, rows[:, None], cols[None, :],
                               keep)  # fmt: skip
            if keep is not None:
                p = tl.where(keep, p, 0.0)
            _, dp = drop(p, dp, dropout, seed, b, h, rows, n, False)
            dl = logit_gradient(p, dp, deltas[:, None], scale, FUNCTION, 0)
            if FUNCTION == "sigmoid":
                row_sums += tl.sum(dl, 1)
            elif not ROW_FROM_DQ:
                if keep is not None:
                    # Not implied by dl = 0: logit_bias may hold NaN where no key is seen.
                    z = tl.where(keep, z, 0.0)
                row_sums += tl.sum(dl * z, 1)
            if slopes is not None:
                slope_sums += tl.sum(dl * distance(rows[:, None], cols[None, :], M, N), 1)
            ds = (dl * dcap).to(k.ptr.dtype.element_ty)
            dq_acc = dot_of_weights(ds, k_tile, dq_acc, WAIT)

    if scale is not None:
        dq_acc = dq_acc / scale
        row_sums = row_sums / scale
        if slopes is not None:
            slope_sums = slope_sums / scale
    if ROW_FROM_DQ:
        row_sums = tl.sum(q_tile.to(ACC) * dq_acc, 1) * scaling
    tl.store(row_ptrs(drow, b, h, rows, H, M), row_sums, mask=rows < M)
    # c is the same for all keys of a row: it enters after the sums.
    dz_by_dl = numbers * 0 + 1.0 if FUNCTION == "sigmoid" else numbers
    if slopes is not None:
        tl.store(row_ptrs(dslope, b, h, rows, H, M), -slope_sums * dz_by_dl, mask=rows < M)
    dq_acc = dq_acc * (dz_by_dl * scaling)[:, None]
    store_matrix(head_ptr(dq, b, h), dq, rows, dq_acc, M, D, BLOCK_D)
