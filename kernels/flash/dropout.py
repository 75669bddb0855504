"""Dropout of weights: the same ones in every pass, and in every run of a seed."""

import triton
import triton.language as tl

# Ten is the generator's own number, seven the least that passes its authors' tests of randomness
# (Salmon et al. 2011, "Parallel random numbers: as easy as 1, 2, 3").
PHILOX_ROUNDS = tl.constexpr(7)


@triton.jit
def kept(dropout, seed, b, h, rows, n, BLOCK: tl.constexpr):
    """Which of BLOCK keys from n on dropout keeps, by row: a function of seed and place alone.

    Philox gives four numbers at a time: those of four neighbouring keys. n is a multiple of four.
    """
    quarter = tl.arange(0, BLOCK // 4)[None, :] + n // 4
    place = rows[:, None] * 0 + quarter * 0 + h * 0
    x0, x1, x2, x3 = tl.philox(
        seed,
        (place + quarter).to(tl.uint32),
        (place + rows[:, None]).to(tl.uint32),
        (place + h).to(tl.uint32),
        (place + b).to(tl.uint32),
        PHILOX_ROUNDS,
    )
    y0, y1 = _is_drawn(x0, dropout), _is_drawn(x1, dropout)
    y2, y3 = _is_drawn(x2, dropout), _is_drawn(x3, dropout)
    return tl.reshape(tl.join(tl.join(y0, y2), tl.join(y1, y3)), [rows.shape[0], BLOCK]) != 0


@triton.jit
def _is_drawn(x, dropout):
    """24 of a number's 32 bits, which float32 holds exactly, against a probability; as bytes."""
    return ((x >> 8).to(tl.float32) * 2.0**-24 >= dropout).to(tl.int8)


@triton.jit
def drop(p, dp, dropout, seed, b, h, rows, n, OF_KEYS: tl.constexpr):
    """Weights and their gradients after dropout, 1/(1 − dropout) left out of the weights."""
    if dropout is None:
        return p, dp
    else:
        BLOCK: tl.constexpr = p.shape[0] if OF_KEYS else p.shape[1]
        keep = kept(dropout, seed, b, h, rows, n, BLOCK)
        if OF_KEYS:
            keep = tl.trans(keep)
        return tl.where(keep, p, 0.0), tl.where(keep, dp * (1.0 / (1.0 - dropout)), 0.0)
