"""Exact statistics of right and wrong answers: intervals, paired tests, effective length.

    Clopper–Pearson   low: P(X ≥ k | n, low) = α/2      high: P(X ≤ k | n, high) = α/2
    McNemar           b of the b + c samples that two models judge differently go one way:
                      p = min(1, 2 P(X ≤ min(b, c)))      X ~ binomial(b + c, 1/2)

Sources: Clopper and Pearson 1934, Biometrika 26, 404; McNemar 1947, Psychometrika 12, 153; mid-p:
Fagerland, Lydersen and Laake 2013, BMC Medical Research Methodology 13:91. Effective length is
NoLiMa's idea (Modarressi et al. 2025, arXiv:2502.05167, at 85 % of the base score), with the lower
bound in place of the estimate. scipy is not needed.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

SHARE = 0.85  # of the short-context score, that a length must surely keep


def clopper_pearson(
    successes: int, trials: int, *, confidence: float = 0.95
) -> tuple[float, float]:
    """The exact interval of a proportion: it covers the true one at least so often.

    Raises:
        ValueError: no trials, successes outside 0 … trials, confidence outside (0, 1).
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"expected 0 ≤ successes ≤ trials ≥ 1, got {successes} of {trials}")
    if not 0 < confidence < 1:
        raise ValueError(f"expected a confidence between 0 and 1, got {confidence}")
    tail = (1 - confidence) / 2
    low = _rate(successes, trials, tail) if successes else 0.0
    # Failures are binomial too.
    high = 1 - _rate(trials - successes, trials, tail) if successes < trials else 1.0
    return low, high


@dataclass(frozen=True)
class Paired:
    """McNemar's table and its two-sided p value."""

    both: int
    only_first: int
    only_second: int
    neither: int
    p_value: float


def mcnemar(first: Sequence[bool], second: Sequence[bool], *, mid_p: bool = False) -> Paired:
    """Whether two models differ, from their answers to the same samples in the same order.

    Args:
        first: whether each sample was right.
        second: the same of the other model.
        mid_p: count half of the observed table's own probability; less conservative, not exact.

    Raises:
        ValueError: sequences of different lengths, or empty ones.
    """
    if len(first) != len(second) or not len(first):
        raise ValueError(f"expected two answers to each sample, got {len(first)} and {len(second)}")
    pairs = [(bool(a), bool(b)) for a, b in zip(first, second, strict=True)]
    b, c = pairs.count((True, False)), pairs.count((False, True))
    n, fewer = b + c, min(b, c)
    tail = math.fsum(_half(k, n) for k in range(fewer + 1))
    p = 2 * tail - (_half(fewer, n) if mid_p else 0.0)
    both, neither = pairs.count((True, True)), pairs.count((False, False))
    return Paired(both, b, c, neither, min(1.0, p))


def effective_length(
    counts: Mapping[int, tuple[int, int]],
    *,
    base: float | None = None,
    share: float = SHARE,
    confidence: float = 0.95,
) -> int | None:
    """The longest length whose lower bound is at least `share` of the short-context score.

        max { L : low(k_L, n_L) ≥ share · base }

    A longer length counts even where a shorter one fails, since a small cell may fail by chance.

    Args:
        counts: (right, asked) by length.
        base: the short-context score; by default the proportion at the shortest length.

    Returns:
        The length, or None if no length reaches it. With few samples that is so even of a perfect
        model: 20 of 20 has the lower bound 83 %.

    Raises:
        ValueError: no lengths, a base or share outside 0 … 1, counts that are none.
    """
    if not counts:
        raise ValueError("expected counts of at least one length, got none")
    if base is None:
        right, asked = counts[min(counts)]
        # Also refuses what is no count, before it is divided by.
        clopper_pearson(right, asked, confidence=confidence)
        base = right / asked
    for name, value in (("base", base), ("share", share)):
        if not 0 <= value <= 1:
            raise ValueError(f"expected a {name} from 0 to 1, got {value}")
    if base == 0:
        return None  # nothing to keep: a model that finds nothing has no effective length
    reached = [
        length
        for length, (right, asked) in counts.items()
        if clopper_pearson(right, asked, confidence=confidence)[0] >= share * base
    ]
    return max(reached, default=None)


def _rate(k: int, n: int, tail: float) -> float:
    """The p of which P(X ≥ k) = tail, k ≥ 1."""
    return _root(lambda p: _at_least(k, n, p) - tail)


def _at_least(k: int, n: int, p: float) -> float:
    """P(X ≥ k) of X ~ binomial(n, p), 0 < p < 1; in logs, since n over k overflows."""
    return math.fsum(
        math.exp(
            math.lgamma(n + 1)
            - math.lgamma(i + 1)
            - math.lgamma(n - i + 1)
            + i * math.log(p)
            + (n - i) * math.log1p(-p)
        )
        for i in range(k, n + 1)
    )


def _half(k: int, n: int) -> float:
    """P(X = k) of X ~ binomial(n, 1/2), as a ratio of whole numbers: no overflow at any n."""
    return math.comb(n, k) / (1 << n)


def _root(rising: Callable[[float], float]) -> float:
    """Where a rising function crosses 0 between 0 and 1, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return (low + high) / 2
