"""Parts that the forward and both backward kernels share: addresses, visible ranges, logits and σ.

    z_mn = τ q_m·k_n;  softcap·tanh(z/softcap);  − slope |m + N − M − n|;  + logit_bias

Tiles are [queries, keys], in the dk-dv kernel [keys, queries]: `rows` and `cols` come shaped so.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

WIDE_OFFSETS = 1 << 31  # a tile that reaches so many elements takes 64-bit offsets within it

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


class Strided(NamedTuple):
    """A tensor as a kernel sees it: one argument, any strides (0 where it is expanded)."""

    ptr: Tensor
    strides: tuple[int, ...]


def strided(tensor: Tensor | None) -> Strided | None:
    """None stays None: kernels compile an absent term away. Booleans are read as bytes."""
    if tensor is None:
        return None
    if tensor.dtype == torch.bool:
        tensor = tensor.view(torch.uint8)
    return Strided(tensor, tensor.stride())


def has_terms(softcap: float, *terms: Tensor | None) -> bool:
    """Has a call a term for which `tuning.tile` keeps rows of their own?"""
    return softcap > 0 or any(term is not None for term in terms)


def is_describable(tensor: Tensor) -> bool:
    """Can the copy engine of Hopper read tiles of a [B, G, N, X] tensor?

    It asks for contiguous rows that begin at multiples of 16 bytes, and for no expanded dimension.
    """
    step = 16 // tensor.element_size()
    sizes = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
    return (
        tensor.numel() > 0
        and tensor.stride(-1) == 1
        and tensor.data_ptr() % 16 == 0
        and all(size == 1 or (stride > 0 and stride % step == 0) for size, stride in sizes)
    )


def describe(
    tensors: tuple[Tensor, ...], rows: int, wanted: bool
) -> tuple[TensorDescriptor, ...] | tuple[None, ...]:
    """Tensors for which `is_describable` holds as the copy engine sees them, in tiles of `rows`.

    It reads 0 beyond their ends. Nones unless they are `wanted`, and have as many rows.
    """
    described = []
    if not wanted or any(tensor.shape[2] < rows for tensor in tensors):
        return (None,) * len(tensors)
    for tensor in tensors:
        sizes = zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
        # What PyTorch has for a dimension of size 1 is never used, and may be anything.
        strides = [16 // tensor.element_size() if size == 1 else stride for size, stride in sizes]
        block = [1, 1, rows, tensor.shape[-1]]
        described.append(TensorDescriptor(tensor, list(tensor.shape), [*strides, 1], block))
    return tuple(described)


def constants(
    query: Tensor, key: Tensor, value: Tensor, function: str, softcap: float, *others: Tensor
) -> dict:
    """The compile-time arguments of all kernels; `others` are read or written in tiles too."""
    D, V = query.shape[-1], value.shape[-1]
    # A tile has at most 256 rows and 256 dims.
    furthest = max(256 * sum(x.stride()[2:]) for x in (query, key, value, *others))
    return {
        "H": query.shape[1],
        "G": key.shape[1],
        "D": D,
        "V": V,
        # Tensor cores want 16, tl.arange powers of two; dims beyond D and V are loaded as 0.
        "BLOCK_D": max(16, triton.next_power_of_2(D)),
        "BLOCK_V": max(16, triton.next_power_of_2(V)),
        "FUNCTION": function,
        "HAS_SOFTCAP": softcap > 0,
        "ACC": tl.float64 if query.dtype == torch.float64 else tl.float32,
        "INDEX": tl.int32 if furthest < WIDE_OFFSETS else tl.int64,
    }


@triton.jit
def forgotten(x, size):
    """x, not negative, in a way that the compiler does not see (nor that size is not).

    What is computed from it after a loop is computed there, instead of being kept in registers
    through the loop for having been computed before it.
    """
    return tl.maximum(x, -size)


@triton.jit
def head_ptr(x, b, h):
    """Where the matrix of batch b and head h begins."""
    return x.ptr + b.to(tl.int64) * x.strides[0] + h.to(tl.int64) * x.strides[1]


@triton.jit
def load_matrix(ptr, x, start, local, shown, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """[rows start + local, BLOCK dims] of one head; 0 where not `shown` (None: all) or past SIZE.

    `local` does not change in a loop over `start`, so its offsets are computed once, before it.
    They are of its type: 64 bits only where a tile is that large, because they fill registers.
    """
    dims = tl.arange(0, BLOCK).to(local.dtype)
    offsets = local[:, None] * x.strides[2] + dims[None, :] * x.strides[3]
    ptrs = ptr + start.to(tl.int64) * x.strides[2] + offsets
    if shown is None:
        if SIZE == BLOCK:
            return tl.load(ptrs)
        else:
            return tl.load(ptrs, mask=(dims < SIZE)[None, :], other=0.0)
    else:
        if SIZE == BLOCK:
            return tl.load(ptrs, mask=shown[:, None], other=0.0)
        else:
            return tl.load(ptrs, mask=shown[:, None] & (dims < SIZE)[None, :], other=0.0)


@triton.jit
def load_full(
    ptr, x, described, b, g, n, local_n, N, there, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """A tile of rows that all take part, by its tensor's descriptor if it has one.

    Zeros unless `there` (None: it is).
    """
    if described is None:
        shown = None if there is None else tl.where(there, local_n, -1) >= 0
        return load_matrix(ptr, x, n, local_n, shown, SIZE, BLOCK)
    else:
        # Beyond the last key a descriptor reads zeros.
        at = n if there is None else tl.where(there, n, N)
        return tl.reshape(described.load([b, g, at.to(tl.int32), 0]), [local_n.shape[0], BLOCK])


@triton.jit
def store_matrix(ptr, x, rows, tile, size, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    """Write the rows below `size` and the dims below SIZE of a tile, in the tensor's dtype."""
    dims = tl.arange(0, BLOCK)
    offsets = rows.to(tl.int64)[:, None] * x.strides[2] + dims.to(tl.int64)[None, :] * x.strides[3]
    inside = (rows < size)[:, None] & (dims < SIZE)[None, :]
    tl.store(ptr + offsets, tile.to(x.ptr.dtype.element_ty), mask=inside)


@triton.jit
def score_ptrs(x, b, h, rows, cols):
    """Addresses of a tile of a [B, H, M, N] tensor."""
    rows, cols = rows.to(tl.int64), cols.to(tl.int64)
    return head_ptr(x, b, h) + rows * x.strides[2] + cols * x.strides[3]


@triton.jit
def row_ptrs(x, b, h, rows, H: tl.constexpr, M):
    """Addresses of rows of a contiguous [B, H, M] tensor.

    A tensor by row has no strides of its own: they would depend on M, and Triton would compile a
    kernel for each kind of M.
    """
    return x + (b.to(tl.int64) * H + h) * M + rows


@triton.jit
def load_rows(x, b, h, rows, shown, H: tl.constexpr, M):
    """Rows of a contiguous [B, H, M] tensor; 0 where not `shown` (None: all)."""
    if shown is None:
        return tl.load(row_ptrs(x, b, h, rows, H, M))
    else:
        return tl.load(row_ptrs(x, b, h, rows, H, M), mask=shown, other=0.0)


@triton.jit
def load_intervals(intervals, b, rows, M, N):
    """The keys [lo, hi) that each row sees, within [0, N); rows from M on see nothing.

    Of a contiguous [B, M, 2] tensor.
    """
    ptrs = intervals + (b.to(tl.int64) * M + rows) * 2
    lo = tl.load(ptrs, mask=rows < M, other=0)
    hi = tl.load(ptrs + 1, mask=rows < M, other=0)
    lo = tl.maximum(lo, 0)
    return lo, tl.maximum(tl.minimum(hi, N), lo)


@triton.jit
def key_range(lo, hi, rows, M, N):
    """No row sees keys outside [first, last); all rows below M see [all_first, all_last)."""
    sees = lo < hi
    first = tl.min(tl.where(sees, lo, N), 0)
    last = tl.max(tl.where(sees, hi, 0), 0)
    all_first = tl.max(tl.where(rows < M, lo, 0), 0)
    all_last = tl.min(tl.where(rows < M, hi, N), 0)
    return first, last, all_first, all_last


@triton.jit
def split_range(first, last, all_first, all_last, BLOCK: tl.constexpr):
    """Tiles of BLOCK keys as [start, stop), of which [full_start, full_stop) need no mask."""
    start = first // BLOCK * BLOCK
    full_start = tl.cdiv(all_first, BLOCK) * BLOCK
    full_stop = tl.maximum(full_start, all_last // BLOCK * BLOCK)
    return start, tl.maximum(start, last), full_start, full_stop


@triton.jit
def visible(lo, hi, mask, b, h, rows, cols, shown):
    """The elements of a tile that take part; `shown` (None: all) are those that a bias leaves."""
    # One comparison: below lo the difference wraps around; hi is not below lo.
    past_lo = (cols - lo).to(tl.int32).to(tl.uint32, bitcast=True)
    keep = past_lo < (hi - lo).to(tl.uint32, bitcast=True)
    if mask is not None:
        keep = keep & (tl.load(score_ptrs(mask, b, h, rows, cols), mask=keep, other=0) != 0)
    if shown is not None:
        keep = keep & shown
    return keep


@triton.jit
def distance(rows, cols, M, N):
    """|m + N − M − n|; the difference is taken in float because converting a tile is slow."""
    return tl.abs((rows + (N - M)).to(tl.float32) - cols.to(tl.float32))


@triton.jit
def reciprocal(x):
    """1/x of x ≥ 1: one special-function operation, without the fix-up code of a division."""
    r = tl.rsqrt(x)
    return r * r


@triton.jit
def tanh(x):
    """tanh, relatively accurate near 0 too, where 1 − 2^… alone would cancel."""
    a = tl.abs(x)
    e = tl.exp2(a * (-2 * LOG2E))
    large = (1.0 - e) * reciprocal(1.0 + e)
    t = tl.where(x < 0, -large, large)
    if x.dtype == tl.float64:
        return t
    else:
        # Taylor series: below 1/4 the first term left out is 1e-8 of the sum.
        y = x * x
        series = tl.fma(y, 62.0 / 2835.0, -17.0 / 315.0)
        series = tl.fma(y, series, 2.0 / 15.0)
        series = tl.fma(y, series, -1.0 / 3.0)
        return tl.where(a < 0.25, tl.fma(x * y, series, x), t)


@triton.jit
def logits(s, bias, slope, b, h, rows, cols, M, N, scaling, softcap, HAS_SOFTCAP: tl.constexpr):
    """z of raw scores s = q·k, in units of `unit`, and ∂z/∂(τs).

    `slope` is None without ALiBi. z is −∞ where the bias hides, and there alone.
    """
    z = s
    dcap = 1.0
    if HAS_SOFTCAP:
        t = tanh(s * (scaling / softcap))
        dcap = tl.fma(-t, t, 1.0)
        z = t * softcap
    elif (bias is not None) or (slope is not None):
        z = s * scaling
    if slope is not None:
        z = tl.fma(distance(rows, cols, M, N).to(z.dtype), -slope, z)
    if bias is not None:
        inside = (rows < M) & (cols < N)
        added = tl.load(score_ptrs(bias, b, h, rows, cols), mask=inside, other=0.0)
        z += added.to(z.dtype)
    return z, dcap


@triton.jit
def unit(bias, slopes, scaling, HAS_SOFTCAP: tl.constexpr):
    """The factor that `logits` leaves out of z: τ where nothing follows, to fold into one fma."""
    if HAS_SOFTCAP or (bias is not None) or (slopes is not None):
        return 1.0
    else:
        return scaling


# The forms of σ. All return σ·2^SCALE, which a sum over keys may keep until its end.


def _pair(scale: int) -> tl.constexpr:
    """PTX of two σ·2^scale with one reciprocal."""
    unscale = "" if scale == 60 else f"mul.f32 m, m, 0f{67 + scale << 23:08X};"  # 2^(scale − 60)
    return tl.constexpr(f"""{{
        .reg .f32 a, b, m;
        add.sat.f32 a, $2, 0f21800000;
        add.sat.f32 b, $3, 0f21800000;
        mul.f32 m, a, b;
        rcp.approx.ftz.f32 m, m;
        {unscale}
        mul.f32 $0, m, b;
        mul.f32 $1, m, a;
        }}""")


PAIR_0, PAIR_15, PAIR_60 = _pair(0), _pair(15), _pair(60)


@triton.jit
def sigmoid_factor(FORM: tl.constexpr):
    """The factor from a logit to `sigmoid`'s argument."""
    return 0.5 if FORM == "tanh" else -LOG2E


@triton.jit
def sigmoid_offset(row, FORM: tl.constexpr):
    """The addend of `sigmoid`'s argument for a row's number b."""
    if FORM == "tanh":
        return row * 0.5
    elif FORM == "rsqrt":
        return row * -LOG2E
    else:
        return tl.fma(row, -LOG2E, -60.0)


@triton.jit
def sigmoid(x, FORM: tl.constexpr, SCALE: tl.constexpr):
    """2^SCALE σ(z + b) with x = sigmoid_factor·z + sigmoid_offset(b); SCALE is 0, 15 or 60.

    rsqrt: x = −(z + b) log₂e; 1/(1 + 2^x) is the square of a reciprocal root.
    pair: x comes 60 lower; a = min(1, 2^x + 2^-60) is (1 + e)·2^-60, and two neighbours share one
    reciprocal: m = 1/(a a'), σ = 2^-60 m a', σ' = 2^-60 m a. The saturating add keeps a ≤ 1 at no
    cost; it bounds σ from below by 2^-60.
    halley: the same a; 1/a from an integer guess y and one cubic step y (1 + h + h²), h = 1 − a y.
    tanh: x = (z + b)/2; (1 + tanh x)/2 by tanh.approx, whose error is absolute: see tuning.form.
    """
    if FORM == "rsqrt":
        r = tl.rsqrt(1.0 + tl.exp2(x))
        return r * r if SCALE == 0 else (r * 2.0**SCALE) * r
    elif FORM == "tanh":
        t = tl.inline_asm_elementwise(
            "tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
        return tl.fma(t, 2.0 ** (SCALE - 1), 2.0 ** (SCALE - 1))
    elif FORM == "pair":
        return tl.inline_asm_elementwise(
            PAIR_0 if SCALE == 0 else (PAIR_15 if SCALE == 15 else PAIR_60),
            "=f,=f,f,f",
            [tl.exp2(x)],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        tl.static_assert(FORM == "halley")
        a = tl.inline_asm_elementwise(
            "add.sat.f32 $0, $1, 0f21800000;",
            "=f,f",
            [tl.exp2(x)],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        y = (0x7EF311C7 - a.to(tl.int32, bitcast=True)).to(tl.float32, bitcast=True)
        h = tl.fma(-a, y, 1.0)
        h = tl.fma(h, h, h)
        if SCALE != 60:
            y = y * 2.0 ** (SCALE - 60)
        return tl.fma(y, h, y)


@triton.jit
def dot(a, b, acc):
    """a @ b + acc (None: 0), without tf32."""
    return tl.dot(a, b, acc, input_precision="ieee")


@triton.jit
def dot_of_weights(a, b, acc, WAIT: tl.constexpr):
    """`dot` with a left operand that was computed in registers.

    On Hopper it runs while the program goes on, and an assembler before CUDA 13.3 may reuse those
    registers before they are read. WAIT has the program wait for it: the result is used at once.
    """
    acc = dot(a, b, acc)
    if WAIT:
        acc = tl.inline_asm_elementwise(
            "mov.b32 $0, $1;", "=r,r", [acc], dtype=acc.dtype, is_pure=True, pack=1
        )
    return acc
