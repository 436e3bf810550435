"""The statistics against hand-worked cases, brute force, and simulated runs with drift."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfledger.analyzers.experiments.statistics import (
    Interval,
    hodges_lehmann,
    hodges_lehmann_interval,
    holm,
    minimum_detectable_effect,
    paired_effect,
    pairs_needed,
    sign_flip_p,
    signed_rank_distribution,
    t_quantile,
)

RUN_SPREAD = 0.02  # between runs
DRIFT = 0.03  # over the whole experiment
WITHIN = 0.6  # lag-1 correlation of the requests of a run
REQUESTS = 300

small = st.lists(st.floats(-2, 2).map(lambda x: round(x, 3)), min_size=1, max_size=9)


def simulated_p50(draws: int, pairs: int, shift: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return p50 per run of both arms, (draws, pairs): AR(1), heavy-tailed, drifting requests."""
    generator = np.random.default_rng(seed)
    shape = (draws, pairs * 2, REQUESTS)
    noise = generator.standard_normal(shape)
    for i in range(1, REQUESTS):
        noise[..., i] = WITHIN * noise[..., i - 1] + math.sqrt(1 - WITHIN**2) * noise[..., i]
    slow = generator.random(shape) < 0.03
    logs = 0.1 * noise + np.where(slow, generator.exponential(0.7, shape), 0.0)
    logs += RUN_SPREAD * generator.standard_normal((draws, pairs * 2, 1))
    logs += np.linspace(0, DRIFT, pairs * 2)[None, :, None]
    medians = np.exp(np.median(logs, axis=2)).reshape(draws, pairs, 2)
    b_first = generator.random((draws, pairs)) < 0.5
    a = np.where(b_first, medians[..., 1], medians[..., 0])
    b = np.where(b_first, medians[..., 0], medians[..., 1])
    return a, b * math.exp(shift)


def test_hodges_lehmann_by_hand() -> None:
    # Walsh averages of 1, 2, 6: 1, 1.5, 3.5, 2, 4, 6.
    assert hodges_lehmann(np.array([1.0, 2.0, 6.0])) == 2.75


def test_signed_rank_distribution_by_hand() -> None:
    assert (signed_rank_distribution(3) * 8).tolist() == [1, 1, 1, 2, 1, 1, 1]


def test_smallest_intervals() -> None:
    six = np.arange(1.0, 7.0)
    assert hodges_lehmann_interval(six, 0.95) == Interval(1.0, 6.0)
    assert hodges_lehmann_interval(six[:5], 0.95) == Interval(-math.inf, math.inf)
    assert hodges_lehmann_interval(six[:5], 0.90) == Interval(1.0, 5.0)


def test_interval_of_ten_is_the_published_one() -> None:
    # n = 10: the critical value of the signed-rank test at 5 % is 8, so the 9th from either end.
    values = np.array([-0.9, 0.1, 0.2, 0.4, 0.55, 0.7, 1.1, 1.3, 2.2, 3.0])
    averages = sorted((values[i] + values[j]) / 2 for i in range(10) for j in range(i, 10))
    assert hodges_lehmann_interval(values, 0.95) == Interval(averages[8], averages[-9])


@given(small)
def test_sign_flip_equals_all_sign_patterns(values: list[float]) -> None:
    observed = abs(sum(values)) - 1e-9
    sums = [
        abs(sum(sign * value for sign, value in zip(signs, values, strict=True)))
        for signs in itertools.product((1, -1), repeat=len(values))
    ]
    expected = sum(total >= observed for total in sums) / len(sums)
    assert sign_flip_p(np.array(values)) == pytest.approx(expected)


def test_smallest_sign_flip_p_of_each_size() -> None:
    assert [sign_flip_p(np.ones(n)) for n in (5, 6, 8, 16)] == [2 / 2**n for n in (5, 6, 8, 16)]
    assert sign_flip_p(np.ones(40)) == 1 / (2**15 + 1)


@given(st.lists(st.floats(0.0001, 1), min_size=1, max_size=8))
def test_holm_keeps_order_and_never_lowers(p_values: list[float]) -> None:
    adjusted = holm(p_values)
    assert all(p <= q <= 1 for p, q in zip(p_values, adjusted, strict=True))
    order = np.argsort(p_values, kind="stable")
    assert np.all(np.diff(np.array(adjusted)[order]) >= 0)
    assert min(adjusted) == min(1.0, min(p_values) * len(p_values))


def test_holm_by_hand() -> None:
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])


@pytest.mark.parametrize(
    ("probability", "freedom", "published"),
    [(0.975, 5, 2.5706), (0.975, 9, 2.2622), (0.975, 19, 2.0930), (0.8, 5, 0.9195)],
)
def test_t_quantiles_from_the_table(probability: float, freedom: int, published: float) -> None:
    assert t_quantile(probability, freedom) == pytest.approx(published, rel=2e-3)


def test_minimum_detectable_effect_and_its_inverse() -> None:
    assert minimum_detectable_effect(0.03, 10) == pytest.approx(
        (2.2622 + 0.8834) * 0.03 / math.sqrt(10), rel=2e-3
    )
    needed = pairs_needed(0.02, 0.03, at_least=6)
    assert needed is not None
    assert minimum_detectable_effect(0.03, needed) <= 0.02
    assert minimum_detectable_effect(0.03, needed - 1) > 0.02
    assert pairs_needed(0.0, 0.03, at_least=6) is None
    assert pairs_needed(1e-6, 0.5, at_least=6) is None


@given(small.filter(lambda values: len(values) >= 6), st.floats(-3, 3))
def test_effect_moves_with_the_data(values: list[float], shift: float) -> None:
    a = np.exp(np.array(values))
    still, moved = paired_effect(a, a), paired_effect(a, a * math.exp(shift))
    assert (still.estimate, still.interval, still.p) == (0.0, Interval(0.0, 0.0), 1.0)
    assert moved.estimate == pytest.approx(shift, abs=1e-9)
    assert moved.interval.low == pytest.approx(shift, abs=1e-9)


@pytest.mark.parametrize(("a", "b"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0])])
def test_what_has_no_ratio_is_refused(a: list[float], b: list[float]) -> None:
    with pytest.raises(ValueError, match=r"pairs need|above 0"):
        paired_effect(a, b)


def test_no_effect_with_drift_is_rejected_at_most_7_percent() -> None:
    a, b = simulated_p50(draws=600, pairs=10, shift=0.0, seed=1)
    effects = [paired_effect(x, y) for x, y in zip(a, b, strict=True)]
    assert np.mean([effect.p < 0.05 for effect in effects]) <= 0.07
    assert np.mean([not _covers(effect.interval, 0) for effect in effects]) <= 0.07


def test_five_percent_shift_is_found() -> None:
    a, b = simulated_p50(draws=400, pairs=10, shift=0.05, seed=2)
    effects = [paired_effect(x, y) for x, y in zip(a, b, strict=True)]
    assert np.mean([effect.p < 0.05 for effect in effects]) >= 0.85


def test_equivalence_at_the_margin_is_claimed_at_most_7_percent() -> None:
    a, b = simulated_p50(draws=600, pairs=10, shift=0.05, seed=3)
    effects = [paired_effect(x, y) for x, y in zip(a, b, strict=True)]
    assert np.mean([effect.interval90.inside(0.05) for effect in effects]) <= 0.07


@pytest.mark.parametrize("pairs", [6, 10, 20])
def test_interval_covers_what_it_says(pairs: int) -> None:
    generator = np.random.default_rng(pairs)
    values = 0.03 + 0.03 * generator.standard_normal((3000, pairs))
    covered = [_covers(hodges_lehmann_interval(row, 0.95), 0.03) for row in values]
    assert 0.93 <= np.mean(covered) <= 0.98


def _covers(interval: Interval, value: float) -> bool:
    return interval.low <= value <= interval.high
