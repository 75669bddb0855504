"""The gradients of the keys and values, which are summed over queries.

    dk_n = τ Σ_m ds_mn q_m      dv_n = Σ_m p_mn do_m

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
    LOG2E,
    dot,
    dot_of_weights,
    forgotten,
    head_ptr,
    key_range,
    load_full,
    load_intervals,
    load_matrix,
    load_rows,
    logits,
    store_matrix,
    unit,
    visible,
)


@triton.jit(do_not_specialize=["M", "N"])
def query_ranges(intervals, ranges, M, N, BLOCK_M: tl.constexpr):
    """One program writes `key_range` of one tile of queries of one batch: ranges [B, 4, tiles]."""
    tiles = tl.cdiv(M, BLOCK_M)
    tile = tl.program_id(0) % tiles
    b = tl.program_id(0) // tiles
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    lo, hi = load_intervals(intervals, b, rows, M, N)
    first, last, all_first, all_last = key_range(lo, hi, rows, M, N)
    # The dk-dv kernel reads full tiles of queries without asking where they end.
    all_last = tl.where((tile + 1) * BLOCK_M <= M, all_last, 0)
    ptr = ranges + b * 4 * tiles + tile
    tl.store(ptr, first)
    tl.store(ptr + tiles, last)
    tl.store(ptr + tiles * 2, all_first)
    tl.store(ptr + tiles * 3, all_last)


@triton.jit
def query_range(ranges, b, n, tiles, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr):
    """The query tiles that see keys [n, n + BLOCK_N): none outside [start, stop), and those in
    [full_start, full_stop) see all of them.

    Intervals need not rise with m: [start, stop) then holds tiles that see nothing, and only the
    first run of full tiles is taken. Both cost time, not correctness.
    """
    start, stop, full_start, full_stop = tiles, 0 * tiles, tiles, tiles
    ptr = ranges + b * 4 * tiles
    for begin in tl.range(0, tiles, CHUNK):
        t = begin + tl.arange(0, CHUNK)
        inside = t < tiles
        first = tl.load(ptr + t, mask=inside, other=0)
        last = tl.load(ptr + tiles + t, mask=inside, other=0)
        all_first = tl.load(ptr + tiles * 2 + t, mask=inside, other=0)
        all_last = tl.load(ptr + tiles * 3 + t, mask=inside, other=0)
        sees = (first < n + BLOCK_N) & (last > n)
        start = tl.minimum(start, tl.min(tl.where(sees, t, tiles), 0))
        stop = tl.maximum(stop, tl.max(tl.where(sees, t + 1, 0), 0))
        full = (all_first <= n) & (all_last >= n + BLOCK_N)
        full_start = tl.minimum(full_start, tl.min(tl.where(full, t, tiles), 0))
        after = (t > full_start) & (full == 0)
        full_stop = tl.minimum(full_stop, tl.min(tl.where(after, t, tiles), 0))
    return start, tl.maximum(start, stop), full_start, full_stop


@triton.jit(do_not_specialize=["M", "N", "seed", "B", "members"])
def backward_dkdv(
    q, k, v, queries, gradients, row, intervals, mask, lists, bias, slopes, lse, do, dk, dv, delta,
    ranges, scales,
    M, N, B, members, scaling, softcap, dropout, seed,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    FUNCTION: tl.constexpr, HAS_SOFTCAP: tl.constexpr, FORM: tl.constexpr, SCALE: tl.constexpr,
    ACC: tl.constexpr, INDEX: tl.constexpr, RAGGED_STAGES: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """One program writes a [BLOCK_N, D] tile of dk and a [BLOCK_N, V] tile of dv of one key head.

    Of `members` query heads of its group: dk and dv are [parts·B, G, N, ·]. Tiles of scores are
    [BLOCK_N, BLOCK_M] here: pᵀ and dsᵀ are left operands as they stand.
    """
    tiles = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    tile = pid % tiles
    n = tile * BLOCK_N
    place = pid // tiles // G
    part = place // B
    b = place % B
    g = pid // tiles % G
    local_m = tl.arange(0, BLOCK_M).to(INDEX)
    local_n = tl.arange(0, BLOCK_N).to(INDEX)
    cols = n + local_n
    if mask is None:
        start, stop, full_start, full_stop = query_range(
            ranges, b, n, tl.cdiv(M, BLOCK_M), BLOCK_N, CHUNK=128
        )
        skipped = full_stop - full_start
        ragged = stop - start - skipped

    k_tile = load_matrix(head_ptr(k, b, g), k, n, local_n, cols < N, D, BLOCK_D)
    v_tile = load_matrix(head_ptr(v, b, g), v, n, local_n, cols < N, V, BLOCK_V)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], ACC)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_V], ACC)
    scale = None
    if scales is not None:
        scale = tl.load(head_ptr(scales, b, g))
    for member in tl.range(0, members):
        h = g * (H // G) + part * members + member
        q_ptr = head_ptr(q, b, h)
        do_ptr = head_ptr(do, b, h)
        slope = None
        if slopes is not None:
            slope = tl.load(head_ptr(slopes, b, h)).to(ACC)
        if mask is not None:
            tile_list = listed(lists, b, h, tile)
            ragged = load_count(tile_list, M, BLOCK_M, False)
            skipped = load_count(tile_list, M, BLOCK_M, True)
        for RAGGED in tl.static_range(2):
            length = ragged if RAGGED else skipped
            for i in tl.range(0, length, num_stages=RAGGED_STAGES if RAGGED else None):
                if mask is not None:
                    m = load_tile(tile_list, i * BLOCK_M, M, BLOCK_M, not RAGGED)
                elif RAGGED:
                    t = start + i
                    m = tl.where(t < full_start, t, t + skipped) * BLOCK_M
                else:
                    m = (full_start + i) * BLOCK_M
                rows = m + local_m
                shown = None
                if RAGGED:
                    # A row that sees nothing is not read: it may hold anything.
                    lo, hi = load_intervals(intervals, b, rows, M, N)
                    shown = lo < hi
                _, factors, offsets = load_exponents(
                    row, lse, bias, slopes, b, h, rows, shown, scaling, M, H,
                    FUNCTION, HAS_SOFTCAP, FORM, SCALE, ACC,
                )  # fmt: skip
                deltas = tl.zeros([BLOCK_M], ACC)
                if FUNCTION == "ssmax":
                    deltas = load_rows(delta, b, h, rows, shown, H, M)
                    if scale is not None:
                        deltas = deltas * scale
                if RAGGED:
                    q_tile = load_matrix(q_ptr, q, m, local_m, shown, D, BLOCK_D)
                else:
                    q_tile = load_full(q_ptr, q, queries, b, h, m, local_m, M, None, D, BLOCK_D)
                s = dot(k_tile, tl.trans(q_tile), None)
                if RAGGED:
                    do_tile = load_matrix(do_ptr, do, m, local_m, shown, V, BLOCK_V)
                else:
                    do_tile = load_full(do_ptr, do, gradients, b, h, m, local_m, M, None, V,
                                        BLOCK_V)  # fmt: skip
                dp = dot(v_tile, tl.trans(do_tile), None)
                z, dcap = logits(s, bias, slope, b, h, rows[None, :], cols[:, None], M, N,
                                       scaling, softcap, HAS_SOFTCAP)  # fmt: skip
                keep = None
                if bias is not None:
                    keep = z != -float("inf")
                p = probability(z, factors[None, :], offsets[None, :], FUNCTION, FORM, SCALE)
                if RAGGED:
                    keep = visible(lo[None, :], hi[None, :], mask, b, h, rows[None, :],
                                   cols[:, None], keep)  # fmt: skip
                if keep is not None:
                    p = tl.where(keep, p, 0.0)
                dropped, dp = drop(p, dp, dropout, seed, b, h, rows, n, True)
                dropped = dropped.to(do.ptr.dtype.element_ty)
                dv_acc = dot_of_weights(dropped, do_tile, dv_acc, WAIT)
                ds = logit_gradient(p, dp, deltas[None, :], scale, FUNCTION, SCALE) * dcap
                if FUNCTION == "ssmax":
                    # By factors and not by c, which would be one more vector in registers.
                    ds = ds * factors[None, :]
                if keep is not None:
                    # Not implied by p = 0: an unused key may hold NaN, and then dp does.
                    ds = tl.where(keep, ds, 0.0)
                dk_acc = dot_of_weights(ds.to(q.ptr.dtype.element_ty), q_tile, dk_acc, WAIT)

    if FUNCTION == "ssmax":
        scaling = scaling / (LOG2E * unit(bias, slopes, scaling, HAS_SOFTCAP))
    dk_acc = dk_acc * scaling
    if scale is not None:
        dk_acc = dk_acc / scale
    if SCALE != 0:
        dv_acc = dv_acc * 2.0**-SCALE
    if dropout is not None:
        dv_acc = dv_acc * (1.0 / (1.0 - dropout))
    cols = forgotten(n, N) + local_n
    store_matrix(head_ptr(dk, place, g), dk, cols, dk_acc, N, D, BLOCK_D)
    store_matrix(head_ptr(dv, place, g), dv, cols, dv_acc, N, V, BLOCK_V)
