"""Who shared an edge with whom: against every instant looked at one by one."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given
from hypothesis import strategies as some

from perfledger.analyzers.contention import Activity, Contender, contenders

Interval = tuple[int, int]


def activity(name: str, *intervals: Interval) -> Activity:
    starts, ends = ([one[at] for one in intervals] for at in (0, 1))
    return Activity(name, "rank", np.array(starts, np.int64), np.array(ends, np.int64), None)


def test_two_that_overlap_and_one_that_does_not() -> None:
    found = contenders(
        [
            activity("a", (0, 10), (20, 30)),
            activity("b", (5, 25)),
            activity("c", (100, 200)),
        ]
    )
    assert found == (
        Contender("a", "rank", 10, 10 / 130, None, ""),
        Contender("b", "rank", 10, 10 / 130, None, ""),
    )


def test_one_alone_nobody_and_intervals_of_no_length_contend_with_nobody() -> None:
    assert contenders([]) == ()
    assert contenders([activity("a", (0, 10), (2, 7))]) == ()
    assert contenders([activity("a", (0, 10)), activity("b", (10, 20))]) == ()
    assert contenders([activity("a", (0, 10)), activity("b", (5, 5)), activity("c")]) == ()


intervals = some.lists(some.tuples(some.integers(0, 40), some.integers(0, 40)).map(sorted))


@given(some.lists(intervals, max_size=4))
def test_overlap_is_the_instants_in_which_another_was_active_too(
    given_intervals: list[list[Sequence[int]]],
) -> None:
    actors = [
        activity(str(at), *((start, end) for start, end in mine))
        for at, mine in enumerate(given_intervals)
    ]
    active = [{at for start, end in mine for at in range(start, end)} for mine in given_intervals]
    anyone = set().union(*active)
    expected = {}
    for number, mine in enumerate(active):
        others = set().union(*(one for at, one in enumerate(active) if at != number))
        if mine & others:
            expected[str(number)] = (len(mine & others), len(mine & others) / len(anyone))
    found = contenders(actors)
    assert {one.name: (one.overlap_ns, one.share) for one in found} == expected
    assert [one.overlap_ns for one in found] == sorted(
        (one.overlap_ns for one in found), key=lambda ns: -(ns or 0)
    )
