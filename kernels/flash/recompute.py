"""Weights and gradients of logits, computed again by every kernel of the backward pass.

The equations are in `backward.py`.
"""

import triton
import triton.language as tl

from hf_sigmoid.kernels.flash.tiles import (
    LOG2E,
    load_rows,
    sigmoid,
    sigmoid_factor,
    sigmoid_offset,
    unit,
)


@triton.jit
def load_exponents(row, lse, bias, slopes, b, h, rows, shown, scaling, M, H: tl.constexpr,
                   FUNCTION: tl.constexpr, HAS_SOFTCAP: tl.constexpr, FORM: tl.constexpr,
                   SCALE: tl.constexpr, ACC: tl.constexpr):  # fmt: skip
    """Per-query terms, and the two row vectors of `probability`: p depends on z·factor + offset."""
    numbers = load_rows(row, b, h, rows, shown, H, M).to(ACC)
    if FUNCTION == "sigmoid":
        factors = tl.zeros_like(numbers) + sigmoid_factor(FORM) * unit(bias, slopes, scaling,
                                                                       HAS_SOFTCAP)  # fmt: skip
        return numbers, factors, sigmoid_offset(numbers, FORM)
    else:
        sums = load_rows(lse, b, h, rows, shown, H, M).to(ACC)
        # −inf is a row that sees nothing: any finite number keeps NaN away from its hidden keys.
        sums = tl.where(sums == -float("inf"), 0.0, sums)
        factors = numbers * (LOG2E * unit(bias, slopes, scaling, HAS_SOFTCAP))
        return numbers, factors, tl.fma(sums, -LOG2E, SCALE)


@triton.jit
def probability(z, factors, offsets, FUNCTION: tl.constexpr, FORM: tl.constexpr,
                SCALE: tl.constexpr):  # fmt: skip
    """2^SCALE p."""
    if FUNCTION == "sigmoid":
        return sigmoid(tl.fma(z, factors, offsets), FORM, SCALE)
    else:
        return tl.exp2(tl.fma(z, factors, offsets))


@triton.jit
def logit_gradient(p, dp, delta, scale, FUNCTION: tl.constexpr, SCALE: tl.constexpr):
    """dL times `scale` (None: 1), of 2^SCALE p and of δ times `scale`."""
    if FUNCTION == "sigmoid":
        dl = tl.fma(-p, p, p) if SCALE == 0 else tl.fma(p * -(2.0**-SCALE), p, p)
        if scale is not None:
            dp = dp * (scale * 2.0**-SCALE)
        return dl * dp
    elif scale is None:
        return p * (dp - delta)
    else:
        return p * tl.fma(dp, scale * 2.0**-SCALE, -delta * 2.0**-SCALE)
