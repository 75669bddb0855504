"""Backward pass of both functions: p is computed again, then

    dp_mn = do_m·v_n                       dv_n = Σ_m p_mn do_m
    sigmoid   dL_mn = p (1 − p) dp         db_m = Σ_n dL_mn
    ssmax     dL_mn = p (dp − δ_m)         dc_m = Σ_n dL_mn z_mn        δ_m = do_m·o_m
    dz_mn = dL_mn  |  c_m dL_mn            ds_mn = dz_mn ∂z/∂(τs)
    dq_m = τ Σ_n ds_mn k_n                 dk_n = τ Σ_m ds_mn q_m

L is the final logit: z + b of sigmoid, c z of ssmax. Every sum is made in a fixed order (no
atomics), so gradients are the same in every run. Derivation: kernels/README.md.

float16 cannot hold weights and gradients of scores as small as they are: for a product weights are
multiplied by 2^SCALE, and gradients by a power of two `scale` of each key head (`gradient_scale`).
"""

import math

import torch
import triton
from torch import Tensor

from hf_sigmoid.kernels.flash import tuning
from hf_sigmoid.kernels.flash.dbias import backward_dbias
from hf_sigmoid.kernels.flash.dkdv import backward_dkdv, query_ranges
from hf_sigmoid.kernels.flash.dq import backward_dq
from hf_sigmoid.kernels.flash.launch import launch
from hf_sigmoid.kernels.flash.masked import tile_lists
from hf_sigmoid.kernels.flash.tiles import (
    constants,
    describe,
    has_terms,
    is_describable,
    strided,
)


def gradient_scale(grad_output: Tensor, value: Tensor, dropout: float) -> Tensor:
    """The power of two of each key head, [B, G], that brings |do·v| into float16's upper range.

    |do·v| ≤ V max|do| max|v|, so that gradients of scores times it are below 2^15. What is not
    finite is left out: it may stand where nothing is seen.
    """
    G, V = value.shape[1], value.shape[3]
    heads = grad_output.unflatten(1, (G, -1)), value.unsqueeze(2)
    largest = (x.nan_to_num(0.0, 0.0, 0.0).abs().amax((2, 3, 4)).float() for x in heads)
    reach = math.prod(largest) * (V / (1.0 - dropout))
    return torch.exp2(14 - torch.log2(reach.clamp(2.0**-60, 2.0**60)).ceil())


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
    dropout: float,
    seed: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of one call; the contract is `hf_sigmoid.ops.define`'s."""
    B, H, M, D = query.shape
    G, N, V = value.shape[1:]
    is_ssmax, is_half = function == "ssmax", query.dtype == torch.float16
    row, intervals = row.contiguous(), intervals.contiguous()
    dbias = None if logit_bias is None or not wants_logit_bias else logit_bias.shape
    if logit_bias is not None:
        logit_bias = logit_bias.expand(B, H, M, N)
    dq = query.new_empty(query.shape)
    drow = row.new_empty(B, H, M)
    dslope = None if alibi_slopes is None else row.new_empty(B, H, M)
    delta = row.new_empty(B, H, M) if is_ssmax else None
    scales = None
    if is_half and query.numel() and value.numel():
        scales = strided(gradient_scale(grad_output, value, dropout))

    tensors = (strided(query), strided(key), strided(value))
    inputs = (row, intervals, strided(mask))
    terms = (strided(logit_bias), strided(alibi_slopes))
    lse = log_sum_exp if is_ssmax else None
    numbers = (scaling, softcap, dropout or None, seed if dropout else None)
    shared = constants(query, key, value, function, softcap, grad_output, output)
    shared["FORM"] = tuning.form(query.dtype)
    with_terms = dropout > 0 or has_terms(softcap, mask, alibi_slopes, logit_bias)
    # Whole tiles only, as in the forward pass.
    whole = not with_terms and (shared["BLOCK_D"], shared["BLOCK_V"]) == (D, V)
    described = whole and is_describable(key) and is_describable(value)
    tile = tuning.tile("dq", function, query.dtype, max(D, V), described, with_terms)
    pair = describe((key, value), tile.block_n, tile.descriptors)
    programs = triton.cdiv(M, tile.block_m) * B * H
    if programs:
        launch(backward_dq, (programs,),
            *tensors, *pair, *inputs, tile_lists(mask, intervals, N, tile, of_keys=False), *terms,
            strided(output) if is_ssmax else None, lse, strided(grad_output),
            strided(dq), drow, dslope, delta, scales, M, N, *numbers,
            **shared, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            RAGGED_STAGES=tile.ragged_stages if mask is None else tile.num_stages, WAIT=tile.wait,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    if dbias is not None:
        # After dq: it reads the delta that the dq kernel has written.
        dbias = _gradient_of_bias(dbias, logit_bias, (*tensors, *inputs), terms, lse, grad_output,
                                  delta, numbers, shared, tile)  # fmt: skip

    described = whole and is_describable(query) and is_describable(grad_output)
    tile = tuning.tile("dkdv", function, query.dtype, max(D, V), described, with_terms)
    pair = describe((query, grad_output), tile.block_m, tile.descriptors)
    query_tiles = triton.cdiv(M, tile.block_m)
    ranges = lists = None
    if mask is None:
        ranges = intervals.new_empty(B, 4, query_tiles)
        if B * query_tiles:
            launch(query_ranges, (query_tiles * B,), intervals, ranges, M, N, BLOCK_M=tile.block_m)
    else:
        lists = tile_lists(mask, intervals, N, tile, of_keys=True)
    programs = triton.cdiv(N, tile.block_n) * B * G
    parts = tuning.parts(programs, H // G) if programs else 1
    dtype = query.dtype if parts == 1 else row.dtype
    dk = key.new_empty(parts * B, G, N, D, dtype=dtype)
    dv = value.new_empty(parts * B, G, N, V, dtype=dtype)
    if programs:
        # After dq, as above.
        launch(backward_dkdv, (programs * parts,),
            *tensors, *pair, *inputs, lists, *terms,
            lse, strided(grad_output), strided(dk), strided(dv), delta, ranges, scales,
            M, N, B, H // G // parts, *numbers,
            **shared, SCALE=tuning.HALF_SCALE if is_half else 0,
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            RAGGED_STAGES=tile.ragged_stages if mask is None else tile.num_stages, WAIT=tile.wait,
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    if parts > 1:
        dk, dv = (x.unflatten(0, (parts, B)).sum(0).to(query.dtype) for x in (dk, dv))

    empty = [row.new_empty(0) for _ in range(3)]
    if dslope is not None:
        empty[1] = dslope.sum(-1)
    if sinks is not None:
        # Its p is exp(sink − l), its value 0: dL = p (0 − δ).
        empty[2] = -(torch.exp(sinks[:, None] - log_sum_exp) * delta).sum((0, 2))
    return dq, dk, dv, drow, dbias if dbias is not None else empty[0], empty[1], empty[2]


def _gradient_of_bias(shape, logit_bias, inputs, terms, lse, grad_output, delta, numbers, shared,
                      tile) -> Tensor:  # fmt: skip
    """The gradient of a logit_bias of `shape`, of which `logit_bias` is expanded: as large as it,
    but whole in queries and keys until the end."""
    B, H, M, N = logit_bias.shape
    batches, heads = shape[:2]
    dtype = logit_bias.dtype
    if shape[2:] != (M, N):
        dtype = torch.promote_types(dtype, torch.float32)
    whole = logit_bias.new_empty(batches, heads, M, N, dtype=dtype)
    programs = triton.cdiv(M, tile.block_m) * triton.cdiv(N, tile.block_n) * batches * heads
    if programs:
        launch(backward_dbias, (programs,),
            *inputs, *terms, lse, strided(grad_output), delta, strided(whole), M, N, B, *numbers,
            **shared, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            ONE_BATCH=batches < B, ONE_HEAD=heads < H,
            num_warps=tile.num_warps, num_stages=1,
        )  # fmt: skip
    return whole.sum_to_size(shape).to(logit_bias.dtype)
