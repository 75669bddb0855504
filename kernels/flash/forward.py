"""Forward pass of both functions.

    sigmoid   o_m = Σ_n σ(z_mn + b_m) v_n
    ssmax     o_m = Σ_n exp(c_m z_mn − l_m) v_n        l_m = log(Σ_n exp(c_m z_mn) + exp(sink))

Derivation and tiling: kernels/README.md. z is defined in tiles.py.
"""

import triton
import triton.language as tl
from torch import Tensor

from hf_sigmoid.kernels.flash import tuning
from hf_sigmoid.kernels.flash.dropout import kept
from hf_sigmoid.kernels.flash.launch import launch
from hf_sigmoid.kernels.flash.masked import listed, load_count, load_tile, tile_lists
from hf_sigmoid.kernels.flash.tiles import (
    LN2,
    LOG2E,
    constants,
    describe,
    dot,
    dot_of_weights,
    forgotten,
    has_terms,
    head_ptr,
    is_describable,
    key_range,
    load_full,
    load_intervals,
    load_matrix,
    load_rows,
    logits,
    row_ptrs,
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
def scores(q_tile, k_ptr, k, n, local_n, shown, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """q·k of a tile of keys."""
    k_tile = load_matrix(k_ptr, k, n, local_n, shown, D, BLOCK_D)
    return dot(q_tile, tl.trans(k_tile), None)


@triton.jit
def weigh(
    s, largest, total, n, rows, lo, hi, factors, offsets, slope, mask, bias, place,
    dropout, seed, RAGGED: tl.constexpr, FUNCTION: tl.constexpr, HAS_SOFTCAP: tl.constexpr,
    FORM: tl.constexpr, SCALE: tl.constexpr, STATISTICS: tl.constexpr,
):  # fmt: skip
    """Weights of the tile of keys at n, whose scores are s; `largest` and `total` with it added.

    By row: the largest logit and the sum of weights. Of ssmax in base 2 and relative to the
    largest, with what takes earlier sums to the new one; of sigmoid, where only statistics want
    them, without the row's number. Weights and their sum are multiplied by 2^SCALE; dropout takes
    weights away, and nothing from their sum.
    """
    local_n, b, h, M, N, scaling, softcap = place
    cols = n + local_n
    z, _ = logits(s, bias, slope, b, h, rows[:, None], cols[None, :], M, N, scaling, softcap,
                  HAS_SOFTCAP)  # fmt: skip
    keep = None
    if bias is not None:
        keep = z != -float("inf")
    if RAGGED:
        keep = visible(lo[:, None], hi[:, None], mask, b, h, rows[:, None], cols[None, :], keep)
    shrink = largest
    if FUNCTION == "sigmoid":
        p = sigmoid(tl.fma(z, factors[:, None], offsets[:, None]), FORM, SCALE)
        if keep is not None:
            p = tl.where(keep, p, 0.0)
        if STATISTICS:
            z = z * unit(bias, slope, scaling, HAS_SOFTCAP)
            if keep is not None:
                z = tl.where(keep, z, -float("inf"))
            largest = tl.maximum(largest, tl.max(z, 1))
            total += tl.sum(p, 1)
    else:
        if keep is not None or mask is not None:
            x = z * factors[:, None]
            if keep is not None:
                x = tl.where(keep, x, -float("inf"))
            top = tl.maximum(largest, tl.max(x, 1))
            # Nothing seen yet: −inf − (−inf) would be NaN.
            shift = tl.where(top == -float("inf"), 0.0, top)
            p = tl.exp2(x - (shift - SCALE)[:, None])
        else:
            # One multiplication a row: no factor is negative here.
            top = tl.maximum(largest, tl.max(z, 1) * factors)
            shift = top
            p = tl.exp2(tl.fma(z, factors[:, None], -(shift - SCALE)[:, None]))
        shrink = tl.exp2(largest - shift)
        total = tl.fma(total, shrink, tl.sum(p, 1))
        largest = top
    if dropout is not None:
        p = tl.where(kept(dropout, seed, b, h, rows, n, local_n.shape[0]), p, 0.0)
    return p, largest, total, shrink


@triton.jit
def accumulate(
    state, s, n, shown, rows, lo, hi, factors, offsets, slope, v_ptr, v, values, g, mask, bias,
    place, dropout, seed, V: tl.constexpr, BLOCK_V: tl.constexpr, RAGGED: tl.constexpr,
    FUNCTION: tl.constexpr, HAS_SOFTCAP: tl.constexpr, FORM: tl.constexpr, SCALE: tl.constexpr,
    STATISTICS: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """Add the tile of keys at n, whose scores are s, to a tile of outputs and to `weigh`'s sums."""
    acc, largest, total = state
    p, largest, total, shrink = weigh(s, largest, total, n, rows, lo, hi, factors, offsets, slope,
                                      mask, bias, place, dropout, seed, RAGGED, FUNCTION,
                                      HAS_SOFTCAP, FORM, SCALE, STATISTICS)  # fmt: skip
    if FUNCTION == "ssmax":
        acc = acc * shrink[:, None]
    if shown is None:
        v_tile = load_full(v_ptr, v, values, place[1], g, n, place[0], place[4], None, V, BLOCK_V)
    else:
        v_tile = load_matrix(v_ptr, v, n, place[0], shown, V, BLOCK_V)
    acc = dot_of_weights(p.to(v.ptr.dtype.element_ty), v_tile, acc, WAIT)
    return acc, largest, total


@triton.jit
def normalize(largest, total, sink, SCALE: tl.constexpr):
    """Largest logit with the sink, what takes the sums so far to it, and the whole denominator.

    The last is multiplied by 2^SCALE, as `total` is. A row that has seen nothing has the
    denominator 1: output 0, log-sum-exp −∞.
    """
    top = largest
    if sink is not None:
        top = tl.maximum(largest, sink)
    shift = tl.where(top == -float("inf"), 0.0, top)
    shrink = tl.exp2(largest - shift)
    whole = total * shrink
    if sink is not None:
        whole += tl.exp2(sink - shift + SCALE)
    return top, shrink, tl.where(whole > 0, whole, 1.0)


@triton.jit(do_not_specialize=["M", "N", "seed"])
def _forward(
    q, k, v, keys, values, row, intervals, mask, lists, bias, slopes, sinks, o, lse, tops, sums,
    M, N, scaling, softcap, dropout, seed,
    H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    FUNCTION: tl.constexpr, HAS_SOFTCAP: tl.constexpr, FORM: tl.constexpr, SCALE: tl.constexpr,
    ACC: tl.constexpr, INDEX: tl.constexpr, DELAY: tl.constexpr, PACKED: tl.constexpr,
    RAGGED_STAGES: tl.constexpr, WAIT: tl.constexpr,
):  # fmt: skip
    """One program writes one [BLOCK_M, V] tile of the output of one head."""
    tiles = tl.cdiv(M, BLOCK_M)
    pid = tl.program_id(0)
    # Late rows first: under a causal mask they have the most work.
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
    numbers = load_rows(row, b, h, rows, rows < M, H, M).to(ACC)
    q_tile = load_matrix(head_ptr(q, b, h), q, tile * BLOCK_M, local_m, rows < M, D, BLOCK_D)
    slope = None
    if slopes is not None:
        slope = tl.load(head_ptr(slopes, b, h)).to(ACC)
    STATISTICS: tl.constexpr = tops is not None
    if FUNCTION == "sigmoid":
        factor = sigmoid_factor(FORM) * unit(bias, slopes, scaling, HAS_SOFTCAP)
        factors = tl.zeros([BLOCK_M], ACC) + factor
        offsets = sigmoid_offset(numbers, FORM)
    else:
        factors = numbers * (LOG2E * unit(bias, slopes, scaling, HAS_SOFTCAP))
        offsets = factors
        # Full tiles take the largest score before they multiply it: not with a negative number.
        full_stop = tl.where(tl.min(factors, 0) < 0, full_start, full_stop)
    skipped = full_stop - full_start
    ragged = stop - start - skipped
    tile_list = None
    if mask is not None:
        tile_list = listed(lists, b, h, tile)
        ragged = load_count(tile_list, N, BLOCK_N, False) * BLOCK_N
        full_start = 0 * tile
        full_stop = load_count(tile_list, N, BLOCK_N, True) * BLOCK_N

    k_ptr, v_ptr = head_ptr(k, b, g), head_ptr(v, b, g)
    place = (local_n, b, h, M, N, scaling, softcap)
    acc = tl.zeros([BLOCK_M, BLOCK_V], ACC)
    largest = tl.full([BLOCK_M], -float("inf"), ACC)
    total = tl.zeros([BLOCK_M], ACC)
    # Tiles that every row sees whole.
    if DELAY and mask is None:
        # A tile's product with its values is issued after the next tile's scores are there, and
        # the activation of those runs under it.
        ELEMENT: tl.constexpr = v.ptr.dtype.element_ty
        waiting = tl.zeros([BLOCK_M, BLOCK_N], tl.int16 if PACKED else ACC)
        for n in tl.range(full_start, full_stop, BLOCK_N):
            n += 0 * full_start  # a tensor in the interpreter too
            k_tile = load_full(k_ptr, k, keys, b, g, n, local_n, N, None, D, BLOCK_D)
            s = dot(q_tile, tl.trans(k_tile), None)
            # Nothing waits at first, and 0·v must be 0 even if v is infinite.
            behind = tl.maximum(n - BLOCK_N, full_start)
            v_tile = load_full(v_ptr, v, values, b, g, behind, local_n, N, n > full_start, V,
                               BLOCK_V)  # fmt: skip
            acc = dot(waiting.to(ELEMENT, bitcast=PACKED), v_tile, acc)
            p, largest, total, shrink = weigh(s, largest, total, n, rows, lo, hi, factors,
                                              offsets, slope, mask, bias, place, dropout, seed,
                                              False, FUNCTION, HAS_SOFTCAP, FORM, SCALE,
                                              STATISTICS)  # fmt: skip
            if FUNCTION == "ssmax":
                acc = acc * shrink[:, None]
            waiting = p.to(ELEMENT).to(tl.int16, bitcast=True) if PACKED else p
        if full_start < full_stop:
            v_tile = load_full(v_ptr, v, values, b, g, full_stop - BLOCK_N, local_n, N, None, V,
                               BLOCK_V)  # fmt: skip
            acc = dot(waiting.to(ELEMENT, bitcast=PACKED), v_tile, acc)
    else:
        state = acc, largest, total
        for n in tl.range(full_start, full_stop, BLOCK_N):
            n += 0 * full_start
            if mask is not None:
                n = load_tile(tile_list, n, N, BLOCK_N, True)
            k_tile = load_full(k_ptr, k, keys, b, g, n, local_n, N, None, D, BLOCK_D)
            s = dot(q_tile, tl.trans(k_tile), None)
            state = accumulate(state, s, n, None, rows, lo, hi, factors, offsets, slope, v_ptr, v,
                               values, g, mask, bias, place, dropout, seed, V, BLOCK_V, False,
                               FUNCTION, HAS_SOFTCAP, FORM, SCALE, STATISTICS, WAIT)  # fmt: skip
        acc, largest, total = state
    # What is left around them. Rows and their intervals are computed again, not kept until here.
    rows = forgotten(tile, M) * BLOCK_M + local_m
    lo, hi = load_intervals(intervals, b, rows, M, N)
    state = acc, largest, total
    for i in tl.range(0, ragged, BLOCK_N, num_stages=RAGGED_STAGES):
        if mask is None:
            n = start + i
            n = tl.where(n < full_start, n, n + skipped)
        else:
            n = load_tile(tile_list, i, N, BLOCK_N, False)
        # Keys that no row sees are not read: unused memory may hold NaN, and 0·NaN is NaN.
        shown = (n + local_n >= first) & (n + local_n < last)
        s = scores(q_tile, k_ptr, k, n, local_n, shown, D, BLOCK_D)
        state = accumulate(state, s, n, shown, rows, lo, hi, factors, offsets, slope, v_ptr, v,
                           None, g, mask, bias, place, dropout, seed, V, BLOCK_V, True, FUNCTION,
                           HAS_SOFTCAP, FORM, SCALE, STATISTICS, WAIT)  # fmt: skip

    acc, largest, total = state
    if FUNCTION == "ssmax":
        sink = None
        if sinks is not None:
            sink = tl.load(sinks.ptr + h * sinks.strides[0]).to(ACC) * LOG2E
        top, shrink, whole = normalize(largest, total, sink, SCALE)
        acc = acc * (shrink / whole)[:, None]
        ends = (top + tl.log2(whole) - SCALE) * LN2
        tl.store(row_ptrs(lse, b, h, rows, H, M), ends, mask=rows < M)
        if STATISTICS:
            tl.store(row_ptrs(tops, b, h, rows, H, M), largest * LN2, mask=rows < M)
            tl.store(row_ptrs(sums, b, h, rows, H, M), total * shrink / whole, mask=rows < M)
    else:
        acc = acc * 2.0**-SCALE
        if STATISTICS:
            tl.store(row_ptrs(tops, b, h, rows, H, M), largest + numbers, mask=rows < M)
            tl.store(row_ptrs(sums, b, h, rows, H, M), total * 2.0**-SCALE, mask=rows < M)
    if dropout is not None:
        acc = acc * (1.0 / (1.0 - dropout))
    store_matrix(head_ptr(o, b, h), o, rows, acc, M, V, BLOCK_V)


def prefill(
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
    output: Tensor,
    log_sum_exp: Tensor,
    max_logit: Tensor | None,
    weight_sum: Tensor | None,
) -> None:
    """Fill the four results; the arguments are those of `hf_sigmoid.ops.define`."""
    B, H, M, D = query.shape
    N, V = value.shape[2:]
    shared = constants(query, key, value, function, softcap, output)
    form = tuning.form(query.dtype)
    terms = dropout > 0 or has_terms(softcap, mask, alibi_slopes, logit_bias, max_logit)
    # Whole tiles only: whether a descriptor may reach beyond its tensor's dims is not documented.
    described = not terms and (shared["BLOCK_D"], shared["BLOCK_V"]) == (D, V)
    described = described and is_describable(key) and is_describable(value)
    tile = tuning.tile("forward", function, query.dtype, max(D, V), described, terms)
    keys, values = describe((key, value), tile.block_n, tile.descriptors)
    launch(_forward, (triton.cdiv(M, tile.block_m) * B * H,),
        strided(query), strided(key), strided(value), keys, values, row, intervals,
        strided(mask), tile_lists(mask, intervals, N, tile, of_keys=False),
        strided(logit_bias), strided(alibi_slopes), strided(sinks),
        strided(output), log_sum_exp if function == "ssmax" else None, max_logit, weight_sum,
        M, N, scaling, softcap, dropout or None, seed if dropout else None,
        **shared,
        BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, FORM=form,
        SCALE=tuning.scale(function, query.dtype, form),
        DELAY=tile.delay, PACKED=tile.packed,
        RAGGED_STAGES=tile.ragged_stages if mask is None else tile.num_stages, WAIT=tile.wait,
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
