"""Forward pass for few queries and many keys: the keys are split over programs.

A program takes the queries of every head of a group, packed into one tile, and a share of the keys
that they see. Sigmoid's partial outputs add up; ssmax's are merged by their log-sum-exp:

    sigmoid   o = Σ_split o_split
    ssmax     o = Σ_split exp(l_split − l) o_split        l = log(Σ_split exp(l_split) + exp(sink))

The share is taken of the keys that are visible, which only the device knows: a static cache costs
what it holds, not what it could hold, and nothing waits for the device.
"""

import triton
import triton.language as tl
from torch import Tensor

from hf_sigmoid.kernels.flash import tuning
from hf_sigmoid.kernels.flash.forward import accumulate, normalize, scores
from hf_sigmoid.kernels.flash.launch import launch
from hf_sigmoid.kernels.flash.tiles import (
    LN2,
    LOG2E,
    constants,
    head_ptr,
    load_intervals,
    load_rows,
    row_ptrs,
    sigmoid_factor,
    sigmoid_offset,
    strided,
    unit,
)

MOST_PAIRS = 64  # of a query and a head of its group, in one tile


@triton.jit(do_not_specialize=["M", "N"])
def _decode(
    q, k, v, row, intervals, mask, bias, slopes, partial, tops, totals,
    M, N, scaling, softcap,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    FUNCTION: tl.constexpr, HAS_SOFTCAP: tl.constexpr, FORM: tl.constexpr, SCALE: tl.constexpr,
    ACC: tl.constexpr, INDEX: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """One program writes the partial output of BLOCK_M pairs (query, head) and a share of keys."""
    R: tl.constexpr = H // G
    split, splits = tl.program_id(1), tl.num_programs(1)
    tiles = tl.cdiv(M * R, BLOCK_M)
    pid = tl.program_id(0)
    tile = pid % tiles
    g = pid // tiles % G
    b = pid // tiles // G
    pair = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    # Pairs of one query are neighbours: they see the same keys.
    rows = (pair // R).to(INDEX)
    h = g * R + pair % R
    inside = rows < M
    local_n = tl.arange(0, BLOCK_N).to(INDEX)
    lo, hi = load_intervals(intervals, b, rows, M, N)
    sees = lo < hi
    first = tl.min(tl.where(sees, lo, N), 0)
    last = tl.max(tl.where(sees, hi, 0), 0)
    share = tl.cdiv(tl.cdiv(tl.maximum(last - first, 0), BLOCK_N), splits) * BLOCK_N
    start = first + split * share
    stop = tl.minimum(start + share, last)

    dims = tl.arange(0, BLOCK_D)
    q_ptrs = head_ptr(q, b, h) + rows.to(tl.int64) * q.strides[2]
    q_ptrs = q_ptrs[:, None] + dims.to(tl.int64)[None, :] * q.strides[3]
    q_tile = tl.load(q_ptrs, mask=inside[:, None] & (dims < D)[None, :], other=0.0)
    numbers = load_rows(row, b, h, rows, inside, H, M).to(ACC)
    slope = None
    if slopes is not None:
        slope = tl.load(head_ptr(slopes, b, h), mask=inside, other=0.0).to(ACC)[:, None]
    if FUNCTION == "sigmoid":
        factor = sigmoid_factor(FORM) * unit(bias, slopes, scaling, HAS_SOFTCAP)
        factors = tl.zeros([BLOCK_M], ACC) + factor
        offsets = sigmoid_offset(numbers, FORM)
    else:
        factors = numbers * (LOG2E * unit(bias, slopes, scaling, HAS_SOFTCAP))
        offsets = factors

    k_ptr = head_ptr(k, b, g)
    v_ptr = head_ptr(v, b, g)
    place = (local_n, b, h[:, None], M, N, scaling, softcap)
    top = tl.full([BLOCK_M], -float("inf"), ACC)
    state = (tl.zeros([BLOCK_M, BLOCK_V], ACC), top, tl.zeros([BLOCK_M], ACC))
    for i in tl.range(0, tl.maximum(stop - start, 0), BLOCK_N):
        n = start + i
        shown = n + local_n < stop
        s = scores(q_tile, k_ptr, k, n, local_n, shown, D, BLOCK_D)
        state = accumulate(state, s, n, shown, rows, lo, hi, factors, offsets, slope, v_ptr, v,
                           None, g, mask, bias, place, None, None, V, BLOCK_V, True, FUNCTION,
                           HAS_SOFTCAP, FORM, SCALE, tops is not None, WAIT)  # fmt: skip

    acc, top, total = state
    # By row, then by share.
    at = row_ptrs(0, b, h, rows, H, M) * splits + split
    dims = tl.arange(0, BLOCK_V)
    if FUNCTION == "sigmoid":
        acc = acc * 2.0**-SCALE
        top += numbers
        total = total * 2.0**-SCALE
    if tops is not None:
        tl.store(tops + at, top, mask=inside)
        tl.store(totals + at, total, mask=inside)
    ptrs = partial + (at * V)[:, None] + dims[None, :]
    tl.store(ptrs, acc, mask=inside[:, None] & (dims < V)[None, :])


@triton.jit(do_not_specialize=["M", "splits"])
def _combine(
    partial, tops, totals, sinks, o, lse, top_out, sum_out, M, splits,
    H: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr, MOST_SPLITS: tl.constexpr,
    SHARES: tl.constexpr, FUNCTION: tl.constexpr, SCALE: tl.constexpr, ACC: tl.constexpr,
):  # fmt: skip
    """One program adds up the shares of one query of one head."""
    row = tl.program_id(0)  # of all that there are, in the order of [B, H, M]
    first = row.to(tl.int64) * splits
    dims = tl.arange(0, BLOCK_V)
    h = row // M % H
    if tops is not None:
        share = tl.arange(0, MOST_SPLITS)
        largest = tl.load(tops + first + share, mask=share < splits, other=-float("inf"))
        total = tl.load(totals + first + share, mask=share < splits, other=0.0)
        top = tl.max(largest, 0)
        shift = tl.where(top == -float("inf"), 0.0, top)
    if FUNCTION == "ssmax":
        total = tl.sum(total * tl.exp2(largest - shift), 0)
        sink = None
        if sinks is not None:
            sink = tl.load(sinks.ptr + h * sinks.strides[0]).to(ACC) * LOG2E
        end, shrink, whole = normalize(top, total, sink, SCALE)
        tl.store(lse + row, (end + tl.log2(whole) - SCALE) * LN2)
    if top_out is not None:
        if FUNCTION == "ssmax":
            tl.store(top_out + row, top * LN2)
            tl.store(sum_out + row, total * shrink / whole)
        else:
            tl.store(top_out + row, top)
            tl.store(sum_out + row, tl.sum(total, 0))
    acc = tl.zeros([BLOCK_V], ACC)
    for s in tl.range(0, splits, SHARES):
        each = s + tl.arange(0, SHARES)
        ptrs = partial + (first + each)[:, None] * V + dims[None, :]
        parts = tl.load(ptrs, mask=(each < splits)[:, None] & (dims < V)[None, :], other=0.0)
        if FUNCTION == "ssmax":
            tops_of = tl.load(tops + first + each, mask=each < splits, other=-float("inf"))
            parts = parts * (tl.exp2(tops_of - shift) * (shrink / whole))[:, None]
        acc += tl.sum(parts, 0)
    o_ptr = head_ptr(o, row // M // H, h) + (row % M).to(tl.int64) * o.strides[2]
    tl.store(o_ptr + dims * o.strides[3], acc.to(o.ptr.dtype.element_ty), mask=dims < V)


def serves(query: Tensor, value: Tensor, function: str) -> bool:
    """Few programs for many keys: the forward kernel would leave most of a GPU idle."""
    B, H, M, D = query.shape
    N, V = value.shape[2:]
    if N < 8 * M or N < tuning.LEAST_KEYS_TO_SPLIT:
        return False
    if M * (H // value.shape[1]) <= MOST_PAIRS:
        return True
    block_m = tuning.tile("forward", function, query.dtype, max(D, V)).block_m
    return 2 * triton.cdiv(M, block_m) * B * H <= tuning.multiprocessors()


def decode(
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
    output: Tensor,
    log_sum_exp: Tensor,
    max_logit: Tensor | None,
    weight_sum: Tensor | None,
) -> None:
    """Fill the four results; the arguments are those of `hf_sigmoid.ops.define`."""
    B, H, M, D = query.shape
    G, N, V = value.shape[1:]
    pairs = M * (H // G)
    block_m = min(MOST_PAIRS, max(16, triton.next_power_of_2(pairs)))
    tile = tuning.tile("decode", function, query.dtype, max(D, V))
    programs = triton.cdiv(pairs, block_m) * G * B
    splits = tuning.splits(programs, triton.cdiv(N, tile.block_n))
    partial = row.new_empty(B, H, M, splits, V)
    tops = totals = None
    if function == "ssmax" or max_logit is not None:
        tops, totals = row.new_empty(2, B, H, M, splits)
    shared = constants(query, key, value, function, softcap)
    form = tuning.form(query.dtype)
    scale = tuning.scale(function, query.dtype, form)
    launch(_decode, (programs, splits),
        strided(query), strided(key), strided(value), row, intervals,
        strided(mask), strided(logit_bias), strided(alibi_slopes), partial, tops, totals,
        M, N, scaling, softcap,
        **shared, BLOCK_M=block_m, BLOCK_N=tile.block_n, FORM=form, SCALE=scale,
        WAIT=tile.wait,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    launch(_combine, (B * H * M,),
        partial, tops, totals, strided(sinks), strided(output),
        log_sum_exp if function == "ssmax" else None, max_logit, weight_sum, M, splits,
        H=H, V=V, BLOCK_V=shared["BLOCK_V"], MOST_SPLITS=tuning.MOST_SPLITS,
        SHARES=16, FUNCTION=function, SCALE=scale, ACC=shared["ACC"],
    )  # fmt: skip
