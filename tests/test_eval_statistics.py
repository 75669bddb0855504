"""The evaluation's statistics, by their definitions and by brute force."""

import itertools
import math
from collections import Counter

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given
from scipy.stats import binom

from hf_sigmoid.evals import (
    block_bootstrap,
    clopper_pearson,
    effective_length,
    log_edges,
    mcnemar,
)


def test_the_interval_is_the_exact_one():
    # k = n: P(X ≥ n | low) = low^n = α / 2.
    assert clopper_pearson(20, 20) == pytest.approx((0.025 ** (1 / 20), 1.0))
    assert clopper_pearson(0, 5, confidence=0.8) == pytest.approx((0.0, 1 - 0.1 ** (1 / 5)))
    low, high = clopper_pearson(7, 10, confidence=0.9)
    assert binom.sf(6, 10, low) == pytest.approx(0.05)
    assert binom.cdf(7, 10, high) == pytest.approx(0.05)
    assert clopper_pearson(10_000, 20_000) == pytest.approx((0.49304, 0.50696), abs=1e-5)


@pytest.mark.parametrize("trials", [1, 20, 33])
def test_the_interval_covers_the_true_proportion_at_least_so_often(trials):
    intervals = [clopper_pearson(k, trials) for k in range(trials + 1)]
    for p in np.linspace(0.001, 0.999, 199):
        inside = [low <= p <= high for low, high in intervals]
        assert binom.pmf(np.arange(trials + 1), trials, p)[inside].sum() >= 0.95 - 1e-9


@pytest.mark.parametrize(
    ("successes", "trials", "confidence", "words"),
    [
        (0, 0, 0.95, "got 0 of 0"), (3, 2, 0.95, "got 3 of 2"), (-1, 2, 0.95, "got -1 of 2"),
        (1, 2, 0.0, "confidence"), (1, 2, 1.0, "confidence"),
    ],
)  # fmt: skip
def test_counts_that_are_none_are_errors(successes, trials, confidence, words):
    with pytest.raises(ValueError, match=words):
        clopper_pearson(successes, trials, confidence=confidence)


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=80))
def test_mcnemar_is_the_two_sided_binomial_test_of_the_pairs_that_differ(pairs):
    first, second = zip(*pairs, strict=True)
    result = mcnemar(first, second)
    table = Counter(pairs)
    b, c = table[True, False], table[False, True]
    assert (result.both, result.neither) == (table[True, True], table[False, False])
    assert (result.only_first, result.only_second) == (b, c)
    tail, own = (float(f(min(b, c), b + c, 0.5)) for f in (binom.cdf, binom.pmf))
    assert result.p_value == pytest.approx(min(1.0, 2 * tail), abs=1e-12)
    assert mcnemar(second, first).p_value == result.p_value
    # Mid-p: half of the observed table's own probability in each tail.
    mid = mcnemar(first, second, mid_p=True).p_value
    assert mid == pytest.approx(min(1.0, 2 * tail - own), abs=1e-12)


@pytest.mark.parametrize(("b", "c"), [(0, 6), (1, 7), (3, 3), (2, 9), (0, 1)])
def test_mcnemar_is_the_share_of_all_sign_changes_that_are_as_uneven(b, c):
    signs = itertools.product((-1, 1), repeat=b + c)
    uneven = sum(abs(sum(row)) >= abs(b - c) for row in signs)
    first, second = [True] * b + [False] * c, [False] * b + [True] * c
    assert mcnemar(first, second).p_value == pytest.approx(uneven / 2 ** (b + c), abs=1e-15)


def test_mcnemar_of_many_pairs_and_of_none():
    first, second = np.arange(6000) % 2 == 0, np.arange(6000) % 2 == 1
    assert mcnemar(first, second).p_value == 1.0
    first[:200] = True
    assert mcnemar(first, second).p_value == pytest.approx(2 * binom.cdf(2900, 5900, 0.5))
    assert mcnemar([True], [True]).p_value == 1.0
    for pair in (([True], [True, False]), ([], [])):
        with pytest.raises(ValueError, match="two answers to each sample"):
            mcnemar(*pair)


def test_the_effective_length_is_the_longest_that_surely_keeps_85_percent():
    perfect = {512: (200, 200), 1024: (200, 200), 2048: (190, 200), 4096: (150, 200)}
    # 150 of 200: the lower bound is 68 %.
    assert effective_length(perfect) == 2048
    assert effective_length(perfect, share=0.6) == 4096
    # At half the base, half is enough.
    assert effective_length({512: (100, 200), 1024: (100, 200)}, share=0.85) == 1024
    assert effective_length({512: (100, 200), 1024: (100, 200)}, base=1.0) is None
    # A cell in between may fail by chance.
    assert effective_length({1: (90, 90), 2: (70, 90), 3: (90, 90)}) == 3
    # 20 of 20 has the lower bound 83.2 %, 30 of 30 has 88.4 %.
    assert effective_length({512: (20, 20)}) is None
    assert effective_length({512: (30, 30)}) == 512
    assert effective_length({512: (0, 20), 1024: (0, 20)}) is None


@pytest.mark.parametrize(
    ("counts", "options", "words"),
    [
        ({}, {}, "at least one length"),
        ({512: (1, 0)}, {}, "got 1 of 0"),
        ({512: (1, 1)}, {"base": 85.0}, "a base from 0 to 1, got 85"),
        ({512: (1, 1)}, {"share": 1.5}, "a share from 0 to 1, got 1.5"),
    ],
)
def test_an_effective_length_of_nothing_is_an_error(counts, options, words):
    with pytest.raises(ValueError, match=words):
        effective_length(counts, **options)


def bands(losses, edges, seed=0, **options):
    return block_bootstrap(losses, edges, generator=np.random.default_rng(seed), **options)


def autocorrelated(rows: int, columns: int, rho: float, seed: int) -> np.ndarray:
    """Rows of an AR(1) process of mean 2 and variance 1."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((rows, columns)) * math.sqrt(1 - rho**2)
    out = np.empty((rows, columns))
    out[:, 0] = rng.standard_normal(rows)
    for i in range(1, columns):
        out[:, i] = rho * out[:, i - 1] + noise[:, i]
    return out + 2


def test_the_band_is_seeded_and_holds_the_mean():
    losses = autocorrelated(4, 512, 0.5, 1)
    edges = log_edges(512)
    made = bands(losses, edges)
    assert made == bands(losses, edges) and made != bands(losses, edges, seed=1)
    for band, start, stop in zip(made, edges, edges[1:], strict=False):
        assert (band.start, band.stop) == (start, stop)
        assert band.mean == pytest.approx(losses[:, start:stop].mean())
        assert band.low <= band.high
    assert all(band.low <= band.mean <= band.high for band in made if band.stop > 64)
    assert bands(losses[0], [0, 512])[0].mean == pytest.approx(losses[0].mean())


def test_the_band_of_single_tokens_is_the_ordinary_bootstrap():
    losses = np.random.default_rng(3).standard_normal(400) + 1
    (band,) = bands(losses, [0, 400], block=1, draws=4000)
    error = losses.std() / math.sqrt(400)
    assert band.low == pytest.approx(losses.mean() - 1.96 * error, abs=0.1 * error)
    assert band.high == pytest.approx(losses.mean() + 1.96 * error, abs=0.1 * error)


def test_the_draws_are_those_of_every_block_alike():
    """By brute force: all resamples of a bin of four tokens in blocks of two."""
    losses = np.array([0.0, 1.0, 5.0, 7.0])
    blocks = [losses[i : i + 2].mean() for i in range(3)]
    every = [np.mean(pair) for pair in itertools.product(blocks, repeat=2)]
    every = np.array(every) - np.mean(every) + losses.mean()
    (band,) = bands(losses, [0, 4], block=2, draws=20_000, confidence=0.5)
    low, high = np.quantile(every, [0.25, 0.75])
    assert (band.low, band.mean, band.high) == pytest.approx((low, 3.25, high))


def test_blocks_do_not_cross_windows():
    losses = np.array([[0.0] * 8, [10.0] * 8])
    (band,) = bands(losses, [0, 8], block=8, draws=4000, confidence=0.9)
    # A row is two windows: 0, 5 or 10, and nothing between, which a crossing block would give.
    assert (band.mean, band.low, band.high) == (5, 0, 10)


@pytest.mark.parametrize(("block", "covers"), [(1, False), (64, True)])
def test_only_blocks_cover_the_mean_of_tokens_that_are_alike(block, covers):
    hits = 0
    for seed in range(120):
        losses = autocorrelated(4, 1024, 0.9, seed)
        (band,) = bands(losses, [0, 1024], seed=seed, block=block, draws=300)
        hits += band.low <= 2 <= band.high
    # Nominally 95 %. Blocks of finite length cover about 91 %; single tokens, whose band is
    # sqrt(19) times too narrow, about 39 %.
    assert hits / 120 > 0.85 if covers else hits / 120 < 0.55


def test_edges_are_even_in_log_position():
    assert log_edges(256, first=16, per_octave=1) == [0, 16, 32, 64, 128, 256]
    assert log_edges(100, first=16, per_octave=2) == [0, 16, 23, 32, 45, 64, 91, 100]
    assert log_edges(10) == [0, 10]
    assert log_edges(5, first=1, per_octave=8) == [0, 1, 2, 3, 4, 5]
    with pytest.raises(ValueError, match="positive"):
        log_edges(0)


@pytest.mark.parametrize(
    ("losses", "edges", "options", "words"),
    [
        (np.zeros((2, 3, 4)), [0, 3], {}, r"shape \(2, 3, 4\)"),
        (np.zeros(0), [0, 1], {}, "expected losses"),
        (np.array([1.0, np.nan]), [0, 2], {}, "finite"),
        (np.zeros(8), [0, 4, 4], {}, "edges that rise"),
        (np.zeros(8), [4], {}, "edges that rise"),
        (np.zeros(8), [0, 9], {}, "within 0 … 8, got 0 … 9"),
        (np.zeros(8), [-1, 8], {}, "within 0 … 8"),
        (np.zeros(8), [0, 8], {"block": 0}, "got 0 and 1000"),
        (np.zeros(8), [0, 8], {"draws": 0}, "got 64 and 0"),
        (np.zeros(8), [0, 8], {"confidence": 1}, "confidence"),
    ],
)
def test_losses_and_edges_that_do_not_fit_are_errors(losses, edges, options, words):
    with pytest.raises(ValueError, match=words):
        bands(losses, edges, **options)
