"""Exact confidence interval of a proportion (Clopper and Pearson 1934, Biometrika 26)."""

import math
from collections.abc import Callable


def interval(successes: int, trials: int, *, confidence: float = 0.95) -> tuple[float, float]:
    """The proportions under which so many successes, or so few, are not too rare."""
    tail = (1 - confidence) / 2
    low = 0.0 if successes == 0 else _root(lambda p: _at_least(successes, trials, p) - tail)
    # Failures are binomial too.
    failures = trials - successes
    high = 1.0 if failures == 0 else 1 - _root(lambda p: _at_least(failures, trials, p) - tail)
    return low, high


def _at_least(k: int, n: int, p: float) -> float:
    """P(X >= k) for X binomial(n, p), 0 < p < 1; summed in logs, since n over k overflows."""
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


def _root(rising: Callable[[float], float]) -> float:
    """Where a rising function crosses 0 between 0 and 1, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (low, middle) if rising(middle) > 0 else (middle, high)
    return (low + high) / 2
