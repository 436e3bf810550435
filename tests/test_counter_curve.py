"""Cumulative counters that are read now and then: what is known, bounded, or broken."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfledger.analyzers.counter_curve import Curve, Rises


def curve(*reads: tuple[int, float], start: tuple[int, ...] | None = None) -> Curve:
    times, values = zip(*reads, strict=True) if reads else ((), ())
    begun = None if start is None else np.array(start, np.int64)
    return Curve.of(np.array(times, np.int64), np.array(values, float), begun)


def rows(rises: Rises) -> list[tuple[int, int, float]]:
    columns = (rises.start_ns, rises.end_ns, rises.amount)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def known(one: Curve) -> list[tuple[int, int]]:
    covered = one.covered()
    return list(zip(covered.start.tolist(), covered.end.tolist(), strict=True))


def test_a_rise_lies_between_the_last_read_that_lacks_its_begin_and_the_first_with_its_end() -> (
    None
):
    found = curve((0, 5.0), (10, 5.0), (20, 7.0), (30, 7.0), (40, 10.0), (50, 10.0))
    assert rows(found.rises()) == [(-(2**62), 20, 2.0), (10, 40, 3.0)]
    assert known(found) == [(0, 30)]  # what it used after 30 had perhaps not been shown at 50
    assert (found.read_every_ns, found.rises_every_ns, found.breaks) == (10, 20, 0)
    assert found.at(np.array([-5, 0, 10, 20, 25, 40, 99])).tolist() == [0, 0, 1, 2, 2.75, 5, 5]


def test_a_fall_is_no_negative_energy_and_what_it_hides_is_not_known() -> None:
    found = curve((0, 100.0), (10, 110.0), (20, 120.0), (30, 3.0), (40, 13.0), (50, 23.0))
    assert found.breaks == 1
    assert known(found) == [(0, 10), (30, 40)]
    assert [amount for _, _, amount in rows(found.rises())] == [10, 10, 10, 10]
    assert found.at(np.array([20, 25, 30, 50])).tolist() == [20, 20, 20, 40]


def test_a_counter_that_began_anew_is_broken_also_where_it_is_higher_than_before() -> None:
    found = curve((0, 1.0), (10, 2.0), (20, 90.0), (30, 91.0), start=(5, 5, 17, 17))
    assert (found.breaks, found.total.tolist()) == (1, [0, 1, 1, 2])


def test_reads_in_any_order_twice_and_broken_ones_are_sorted_out_and_counted() -> None:
    found = curve((20, 3.0), (0, 1.0), (10, 2.0), (10, 2.0), (30, float("nan")), (40, -7.0))
    assert (found.reads, found.refused, found.total.tolist()) == (3, 2, [0, 1, 2])


@pytest.mark.parametrize("reads", [(), ((5, 1.0),), ((5, 1.0), (9, 1.0))])
def test_a_counter_that_tells_nothing_covers_nothing(reads: tuple[tuple[int, float], ...]) -> None:
    found = curve(*reads)
    assert (known(found), rows(found.rises()), found.rises_every_ns) == ([], [], None)


@given(
    st.lists(st.tuples(st.integers(1, 9), st.floats(0, 50)), min_size=1, max_size=40),
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
    st.lists(st.integers(1, 30), min_size=2, max_size=20),
)
def test_the_rises_that_touch_an_interval_are_no_less_than_what_was_used_in_it(
    power: list[tuple[int, float]], updates: list[int], reads: list[int]
) -> None:
    used = np.concatenate([[0.0], np.cumsum([w for length, w in power for _ in range(length)])])
    updated = np.clip(np.concatenate([[0], np.cumsum(updates)]), 0, len(used) - 1)
    read = np.clip(np.cumsum(reads), 0, len(used) - 1)
    shown = used[updated[np.searchsorted(updated, read, side="right") - 1]]
    found = Curve.of(read, shown)
    rises = found.rises()
    for start, end in known(found):
        for a, b in ((start, end), (start, (start + end) // 2), ((start + end) // 2, end)):
            truth = used[b] - used[a]
            most = rises.amount[(rises.start_ns < b) & (rises.end_ns > a)].sum()
            least = rises.amount[(rises.start_ns >= a) & (rises.end_ns <= b)].sum()
            estimate = float(np.diff(found.at(np.array([a, b])))[0])
            assert least - 1e-9 <= min(truth, estimate) <= max(truth, estimate) <= most + 1e-9
