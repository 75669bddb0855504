"""Backward pass of both functions: p is computed again, then

    dp_mn = do_m·v_n                       dv_n = Σ_m p_mn do_m
    sigmoid   dL_mn = p (1 − p) dp         db_m = Σ_n dL_mn
    ssmax     dL_mn = p (dp − δ_m)         dc_m = Σ_n dL_mn z_mn        δ_m = do_m·o_m
    dz_mn = dL_mn  |  c_m dL_mn            ds_mn = dz_mn ∂z/∂(τs)
    dq_m = τ Σ_n ds_mn k_n                 dk_n = τ Σ_m ds_mn q_m

L is the final logit: z + b of sigmoid, c z of ssmax. Every sum is made by one program in a fixed
order (no atomics), so gradients are the same in every run. Derivation: kernels/README.md.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_sigmoid.kernels.flash import tuning
from hf_sigmoid.kernels.flash.tiles import (
    LOG2E,
    constants,
    distance,
    dot,
    forgotten,
    has_terms,
    head_ptr,
    key_range,
    load_intervals,
    load_matrix,
    load_rows,
    logits,
    row_ptrs,
    score_ptrs,
    sigmoid,
    sigmoid_factor,
    sigmoid_offset,
    split_range,
    store_matrix,
    strided,
    unit,
    visible,
)


@triton.jit
def load_exponents(row, lse, bias, slopes, b, h, rows, shown, scaling, FUNCTION: tl.constexpr,
                   HAS_SOFTCAP: tl.constexpr, FORM: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """Per-query terms, and the two row vectors of `probability`: p depends on z·factor + offset."""
    numbers = load_rows(row, b, h, rows, shown).to(ACC)
    if FUNCTION == "sigmoid":
        factors = tl.zeros_like(numbers) + sigmoid_factor(FORM) * unit(bias, slopes, scaling,
                                                                       HAS_SOFTCAP)  # fmt: skip
        return numbers, factors, sigmoid_offset(numbers, FORM)
    else:
        sums = load_rows(lse, b, h, rows, shown).to(ACC)
        # −inf is a row that sees nothing: any finite number keeps NaN away from its hidden keys.
        sums = tl.where(sums == -float("inf"), 0.0, sums)
        factors = numbers * (LOG2E * unit(bias, slopes, scaling, HAS_SOFTCAP))
        return numbers, factors, sums * -LOG2E


@triton.jit
def probability(z, factors, offsets, FUNCTION: tl.constexpr, FORM: tl.constexpr):
    if FUNCTION == "sigmoid":
        return sigmoid(tl.fma(z, factors, offsets), FORM)
    else:
        return tl.exp2(tl.fma(z, factors, offsets))


@triton.jit
def logit_gradient(p, dp, delta, FUNCTION: tl.constexpr):
    if FUNCTION == "sigmoid":
        return tl.fma(-p, p, p) * dp
    else:
        return p * (dp - delta)


@triton.jit
def _backward_dq(
    q, k, v, row, intervals, mask, bias, slopes, o, lse, do, dq, drow, dbias, dslope, delta,
    M, N, scaling, softcap,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    FUNCTION: tl.constexpr, HAS_SOFTCAP: tl.constexpr, FORM: tl.constexpr, ACC: tl.constexpr,
    INDEX: tl.constexpr, RAGGED_STAGES: tl.constexpr,
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
    if mask is not None:
        full_stop = full_start
    skipped = full_stop - full_start

    # A row that sees nothing is not read either: its dq is 0 whatever it holds.
    q_tile = load_matrix(head_ptr(q, b, h), q, tile * BLOCK_M, local_m, lo < hi, D, BLOCK_D)
    do_tile = load_matrix(head_ptr(do, b, h), do, tile * BLOCK_M, local_m, lo < hi, V, BLOCK_V)
    numbers, factors, offsets = load_exponents(
        row, lse, bias, slopes, b, h, rows, rows < M, scaling, FUNCTION, HAS_SOFTCAP, FORM, ACC
    )
    deltas = tl.zeros([BLOCK_M], ACC)
    if FUNCTION == "ssmax":
        o_tile = load_matrix(head_ptr(o, b, h), o, tile * BLOCK_M, local_m, lo < hi, V, BLOCK_V)
        deltas += tl.sum(o_tile.to(ACC) * do_tile.to(ACC), 1)
        tl.store(row_ptrs(delta, b, h, rows), deltas, mask=rows < M)
    slope = None
    if slopes is not None:
        slope = tl.load(head_ptr(slopes, b, h)).to(ACC)
        slope_sums = tl.zeros([BLOCK_M], ACC)

    dq_acc = tl.zeros([BLOCK_M, BLOCK_D], ACC)
    row_sums = tl.zeros([BLOCK_M], ACC)
    k_ptr = head_ptr(k, b, g)
    v_ptr = head_ptr(v, b, g)
    for RAGGED in tl.static_range(2):
        if RAGGED or mask is None:
            begin = start if RAGGED else full_start
            length = (stop - start - skipped) if RAGGED else skipped
            for i in tl.range(0, length, BLOCK_N, num_stages=RAGGED_STAGES if RAGGED else None):
                n = begin + i
                shown = None
                if RAGGED:
                    n = tl.where(n < full_start, n, n + skipped)
                    shown = (n + local_n >= first) & (n + local_n < last)
                cols = n + local_n
                # Both products before the activation, which can then run under the second.
                k_tile = load_matrix(k_ptr, k, n, local_n, shown, D, BLOCK_D)
                s = dot(q_tile, tl.trans(k_tile), None)
                v_tile = load_matrix(v_ptr, v, n, local_n, shown, V, BLOCK_V)
                dp = dot(do_tile, tl.trans(v_tile), None)
                z, dcap = logits(s, bias, slope, b, h, rows[:, None], cols[None, :], M, N,
                                 scaling, softcap, HAS_SOFTCAP)  # fmt: skip
                p = probability(z, factors[:, None], offsets[:, None], FUNCTION, FORM)
                if RAGGED:
                    keep = visible(lo[:, None], hi[:, None], mask, b, h, rows[:, None],
                                   cols[None, :], M, N)  # fmt: skip
                    p = tl.where(keep, p, 0.0)
                dl = logit_gradient(p, dp, deltas[:, None], FUNCTION)
                if FUNCTION == "sigmoid":
                    row_sums += tl.sum(dl, 1)
                elif not ROW_FROM_DQ:
                    if RAGGED:
                        # Not implied by dl = 0: logit_bias may hold NaN where no key is seen.
                        z = tl.where(keep, z, 0.0)
                    row_sums += tl.sum(dl * z, 1)
                if slopes is not None:
                    slope_sums += tl.sum(dl * distance(rows[:, None], cols[None, :], M, N), 1)
                if dbias is not None:
                    dz = dl if FUNCTION == "sigmoid" else dl * numbers[:, None]
                    inside = (rows[:, None] < M) & (cols[None, :] < N)
                    dbias_ptrs = score_ptrs(dbias, b, h, rows[:, None], cols[None, :])
                    tl.store(dbias_ptrs, dz.to(dbias.ptr.dtype.element_ty), mask=inside)
                dq_acc = dot((dl * dcap).to(k.ptr.dtype.element_ty), k_tile, dq_acc)

    if ROW_FROM_DQ:
        row_sums = tl.sum(q_tile.to(ACC) * dq_acc, 1) * scaling
    tl.store(row_ptrs(drow, b, h, rows), row_sums, mask=rows < M)
    # c is the same for all keys of a row: it enters after the sums.
    dz_by_dl = numbers * 0 + 1.0 if FUNCTION == "sigmoid" else numbers
    if slopes is not None:
        tl.store(row_ptrs(dslope, b, h, rows), -slope_sums * dz_by_dl, mask=rows < M)
    dq_acc = dq_acc * (dz_by_dl * scaling)[:, None]
    store_matrix(head_ptr(dq, b, h), dq, rows, dq_acc, M, D, BLOCK_D)


@triton.jit
def _query_ranges(intervals, ranges, M, N, BLOCK_M: tl.constexpr):
    """One program writes `key_range` of one tile of queries of one batch: ranges [B, 4, tiles]."""
    tiles = tl.cdiv(M, BLOCK_M)
    tile = tl.program_id(0) % tiles
    b = tl.program_id(0) // tiles
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    lo, hi = load_intervals(intervals, b, rows, M, N)
    first, last, all_first, all_last = key_range(lo, hi, rows, M, N)
    # The dk-dv kernel reads full tiles of queries without asking where they end.
    all_last = tl.where((tile + 1) * BLOCK_M <= M, all_last, 0)
    ptr = head_ptr(ranges, b, 0 * tile) + tile
    tl.store(ptr, first)
    tl.store(ptr + ranges.strides[1], last)
    tl.store(ptr + ranges.strides[1] * 2, all_first)
    tl.store(ptr + ranges.strides[1] * 3, all_last)


@triton.jit
def query_range(ranges, b, n, tiles, BLOCK_N: tl.constexpr, CHUNK: tl.constexpr):
    """The query tiles that see keys [n, n + BLOCK_N): none outside [start, stop), and those in
    [full_start, full_stop) see all of them.

    Intervals need not rise with m: [start, stop) then holds tiles that see nothing, and only the
    first run of full tiles is taken. Both cost time, not correctness.
    """
    start, stop, full_start, full_stop = tiles, 0 * tiles, tiles, tiles
    ptr = head_ptr(ranges, b, 0 * b)
    for begin in tl.range(0, tiles, CHUNK):
        t = begin + tl.arange(0, CHUNK)
        inside = t < tiles
        first = tl.load(ptr + t, mask=inside, other=0)
        last = tl.load(ptr + ranges.strides[1] + t, mask=inside, other=0)
        all_first = tl.load(ptr + ranges.strides[1] * 2 + t, mask=inside, other=0)
        all_last = tl.load(ptr + ranges.strides[1] * 3 + t, mask=inside, other=0)
        sees = (first < n + BLOCK_N) & (last > n)
        start = tl.minimum(start, tl.min(tl.where(sees, t, tiles), 0))
        stop = tl.maximum(stop, tl.max(tl.where(sees, t + 1, 0), 0))
        full = (all_first <= n) & (all_last >= n + BLOCK_N)
        full_start = tl.minimum(full_start, tl.min(tl.where(full, t, tiles), 0))
        after = (t > full_start) & (full == 0)
        full_stop = tl.minimum(full_stop, tl.min(tl.where(after, t, tiles), 0))
    return start, tl.maximum(start, stop), full_start, full_stop


@triton.jit
def _backward_dkdv(
    q, k, v, row, intervals, mask, bias, slopes, lse, do, dk, dv, delta, ranges,
    M, N, scaling, softcap,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    FUNCTION: tl.constexpr, HAS_SOFTCAP: tl.constexpr, FORM: tl.constexpr, ACC: tl.constexpr,
    INDEX: tl.constexpr, RAGGED_STAGES: tl.constexpr,
):  # fmt: skip
    """One program writes a [BLOCK_N, D] tile of dk and a [BLOCK_N, V] tile of dv of one key head.

    Tiles of scores are [BLOCK_N, BLOCK_M] here: pᵀ and dsᵀ are left operands as they stand.
    """
    tiles = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    n = pid % tiles * BLOCK_N
    b = pid // tiles // G
    g = pid // tiles % G
    local_m = tl.arange(0, BLOCK_M).to(INDEX)
    local_n = tl.arange(0, BLOCK_N).to(INDEX)
    cols = n + local_n
    start, stop, full_start, full_stop = query_range(
        ranges, b, n, tl.cdiv(M, BLOCK_M), BLOCK_N, CHUNK=128
    )
    if mask is not None:
        full_stop = full_start
    skipped = full_stop - full_start

    k_tile = load_matrix(head_ptr(k, b, g), k, n, local_n, cols < N, D, BLOCK_D)
    v_tile = load_matrix(head_ptr(v, b, g), v, n, local_n, cols < N, V, BLOCK_V)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], ACC)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_V], ACC)
    for member in tl.range(0, H // G):
        h = g * (H // G) + member
        q_ptr = head_ptr(q, b, h)
        do_ptr = head_ptr(do, b, h)
        slope = None
        if slopes is not None:
            slope = tl.load(head_ptr(slopes, b, h)).to(ACC)
        for RAGGED in tl.static_range(2):
            if RAGGED or mask is None:
                begin = start if RAGGED else full_start
                length = (stop - start - skipped) if RAGGED else skipped
                for i in tl.range(0, length, num_stages=RAGGED_STAGES if RAGGED else None):
                    t = begin + i
                    if RAGGED:
                        t = tl.where(t < full_start, t, t + skipped)
                    m = t * BLOCK_M
                    rows = m + local_m
                    shown = None
                    if RAGGED:
                        # A row that sees nothing is not read: it may hold anything.
                        lo, hi = load_intervals(intervals, b, rows, M, N)
                        shown = lo < hi
                    _, factors, offsets = load_exponents(
                        row, lse, bias, slopes, b, h, rows, shown, scaling,
                        FUNCTION, HAS_SOFTCAP, FORM, ACC,
                    )  # fmt: skip
                    deltas = tl.zeros([BLOCK_M], ACC)
                    if FUNCTION == "ssmax":
                        deltas = load_rows(delta, b, h, rows, shown)
                    q_tile = load_matrix(q_ptr, q, m, local_m, shown, D, BLOCK_D)
                    s = dot(k_tile, tl.trans(q_tile), None)
                    do_tile = load_matrix(do_ptr, do, m, local_m, shown, V, BLOCK_V)
                    dp = dot(v_tile, tl.trans(do_tile), None)
                    z, dcap = logits(s, bias, slope, b, h, rows[None, :], cols[:, None], M, N,
                                     scaling, softcap, HAS_SOFTCAP)  # fmt: skip
                    p = probability(z, factors[None, :], offsets[None, :], FUNCTION, FORM)
                    if RAGGED:
                        keep = visible(lo[None, :], hi[None, :], mask, b, h, rows[None, :],
                                       cols[:, None], M, N)  # fmt: skip
                        p = tl.where(keep, p, 0.0)
                    dv_acc = dot(p.to(do.ptr.dtype.element_ty), do_tile, dv_acc)
                    ds = logit_gradient(p, dp, deltas[None, :], FUNCTION) * dcap
                    if FUNCTION == "ssmax":
                        # By factors and not by c, which would be one more vector in registers.
                        ds = ds * factors[None, :]
                    if RAGGED:
                        # Not implied by p = 0: an unused key may hold NaN, and then dp does.
                        ds = tl.where(keep, ds, 0.0)
                    dk_acc = dot(ds.to(q.ptr.dtype.element_ty), q_tile, dk_acc)

    if FUNCTION == "ssmax":
        scaling = scaling / (LOG2E * unit(bias, slopes, scaling, HAS_SOFTCAP))
    cols = forgotten(n, N) + local_n
    store_matrix(head_ptr(dk, b, g), dk, cols, dk_acc * scaling, N, D, BLOCK_D)
    store_matrix(head_ptr(dv, b, g), dv, cols, dv_acc, N, V, BLOCK_V)


def backward(
    grad_output: Tensor,
    output: Tensor,
    log_sum_exp: Tensor,
    wants_logit_bias: bool,
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
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of one call; the contract is `hf_sigmoid.ops.define`'s."""
    B, H, M, D = query.shape
    G, N, V = value.shape[1:]
    is_ssmax = function == "ssmax"
    dq, dk, dv = (t.new_empty(t.shape) for t in (query, key, value))
    drow = row.new_empty(B, H, M)
    dbias = None
    if logit_bias is not None and wants_logit_bias:
        # Zeros, because the kernel writes only the tiles that some row sees.
        dbias = logit_bias.new_zeros(B, H, M, N)
    dslope = None if alibi_slopes is None else row.new_empty(B, H, M)
    delta = row.new_empty(B, H, M) if is_ssmax else None

    inputs = (strided(query), strided(key), strided(value), strided(row), strided(intervals))
    terms = (strided(mask), strided(logit_bias), strided(alibi_slopes))
    lse = strided(log_sum_exp) if is_ssmax else None
    shared = constants(query, key, value, function, softcap, grad_output, output)
    shared["FORM"] = tuning.form("backward", query.dtype)
    with_terms = has_terms(softcap, mask, alibi_slopes, logit_bias)
    tile = tuning.tile("dq", function, query.dtype, max(D, V), terms=with_terms)
    programs = triton.cdiv(M, tile.block_m) * B * H
    if programs:
        _backward_dq[(programs,)](
            *inputs, *terms,
            strided(output) if is_ssmax else None, lse, strided(grad_output),
            strided(dq), strided(drow), strided(dbias), strided(dslope), strided(delta),
            M, N, scaling, softcap,
            **shared, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            RAGGED_STAGES=tile.ragged_stages if mask is None else tile.num_stages,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip

    tile = tuning.tile("dkdv", function, query.dtype, max(D, V), terms=with_terms)
    query_tiles = triton.cdiv(M, tile.block_m)
    ranges = intervals.new_empty(B, 4, query_tiles)
    if B * query_tiles:
        _query_ranges[(query_tiles * B,)](
            strided(intervals), strided(ranges), M, N, BLOCK_M=tile.block_m
        )
    programs = triton.cdiv(N, tile.block_n) * B * G
    if programs:
        # After dq: it reads the delta that the dq kernel has written.
        _backward_dkdv[(programs,)](
            *inputs, *terms,
            lse, strided(grad_output), strided(dk), strided(dv), strided(delta),
            strided(ranges),
            M, N, scaling, softcap,
            **shared, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            RAGGED_STAGES=tile.ragged_stages if mask is None else tile.num_stages,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip

    empty = [row.new_empty(0) for _ in range(3)]
    if dslope is not None:
        empty[1] = dslope.sum(-1)
    if sinks is not None:
        # Its p is exp(sink − l), its value 0: dL = p (0 − δ).
        empty[2] = -(torch.exp(sinks[:, None] - log_sum_exp) * delta).sum((0, 2))
    return dq, dk, dv, drow, dbias if dbias is not None else empty[0], empty[1], empty[2]
