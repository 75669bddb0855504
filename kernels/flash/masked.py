"""Lists of the tiles that a dense mask leaves: empty ones are not visited, full ones need no mask.

A tile of queries has a list of the tiles of keys that it meets (in the dk-dv kernel a tile of keys
one of queries): those that are seen in part, from the front; those that are seen whole, from the
back; and at the end how many there are of each. Row intervals are part of the mask here.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from hf_sigmoid.kernels.flash.tiles import Strided, head_ptr, load_intervals, strided, visible


@triton.jit(do_not_specialize=["M", "N"])
def _list_tiles(
    mask, intervals, lists, M, N,
    HEADS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, OF_KEYS: tl.constexpr,
):  # fmt: skip
    """One program writes the list of one tile of one head: lists [B, HEADS, tiles, others + 2]."""
    tiles, others = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    if OF_KEYS:
        tiles, others = others, tiles
    pid = tl.program_id(0)
    tile = pid % tiles
    h = pid // tiles % HEADS
    b = pid // tiles // HEADS
    ptr = head_ptr(lists, b, h) + tile * lists.strides[2]
    ragged, full = 0 * tile, 0 * tile
    for other in tl.range(0, others):
        rows = (other if OF_KEYS else tile) * BLOCK_M + tl.arange(0, BLOCK_M)
        cols = (tile if OF_KEYS else other) * BLOCK_N + tl.arange(0, BLOCK_N)
        lo, hi = load_intervals(intervals, b, rows, M, N)
        keep = visible(lo[:, None], hi[:, None], mask, b, h, rows[:, None], cols[None, :], None)
        seen = tl.max(tl.max(keep.to(tl.int32), 1), 0)
        if not OF_KEYS:
            # The dk-dv kernel reads full tiles of queries without asking where they end.
            keep = keep | (rows >= M)[:, None]
        whole = tl.min(tl.min(keep.to(tl.int32), 1), 0) * seen
        tl.store(ptr + tl.where(whole > 0, others - 1 - full, ragged), other, mask=seen > 0)
        ragged += seen - whole
        full += whole
    tl.store(ptr + others, ragged)
    tl.store(ptr + others + 1, full)


@triton.jit
def listed(lists, b, h, tile):
    """The list of one tile."""
    return head_ptr(lists, b, h) + tile * lists.strides[2]


@triton.jit
def load_count(ptr, size, BLOCK: tl.constexpr, FULL: tl.constexpr):
    """How many full or ragged tiles a list holds of an axis of `size`."""
    return tl.load(ptr + tl.cdiv(size, BLOCK) + FULL)


@triton.jit
def load_tile(ptr, i, size, BLOCK: tl.constexpr, FULL: tl.constexpr):
    """Where the tile number i / BLOCK of a list begins, in the order of the axis."""
    at = i // BLOCK
    if FULL:
        at = tl.cdiv(size, BLOCK) - 1 - at
    return tl.load(ptr + at) * BLOCK


def tile_lists(
    mask: Tensor | None, intervals: Tensor, N: int, tile, of_keys: bool
) -> Strided | None:
    """The lists of a call's mask [B, H, M, N] for the tiles of one kernel; None without a mask."""
    if mask is None:
        return None
    B, H, M, _ = mask.shape
    heads = 1 if mask.stride(1) == 0 else H
    shape = triton.cdiv(M, tile.block_m), triton.cdiv(N, tile.block_n)
    tiles, others = shape[::-1] if of_keys else shape
    lists = torch.empty(B, heads, tiles, others + 2, dtype=torch.int32, device=mask.device)
    if lists.numel():
        _list_tiles[(B * heads * tiles,)](
            strided(mask), intervals, strided(lists), M, N,
            HEADS=heads, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, OF_KEYS=of_keys,
        )  # fmt: skip
    return strided(lists.expand(B, H, tiles, others + 2))
