"""SIGKILL under load: every acknowledged span is in the store exactly once.

A few kills only; the soak with many is benchmarks/soak_collect.py.
"""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from perfledger.schema.store import Store
from perfledger.schema.tables import SPANS

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
from fresh_requests import span_ids  # noqa: E402
from otlp_load import Acks, write_bodies  # noqa: E402
from soak_collect import Found, compare, soak  # noqa: E402

KILLS, SPANS_A_SECOND = 5, 6_000
SEED, SPANS_A_REQUEST = 3, 512


@pytest.mark.timeout(120)
def test_killed_under_load_the_collector_keeps_every_acknowledged_span_once(
    tmp_path: Path,
) -> None:
    bodies = write_bodies(tmp_path / "bodies", "reference", 4)
    found, kills = soak(tmp_path, bodies, KILLS, 1, SPANS_A_SECOND)
    assert found.is_right, found
    assert found.acknowledged > KILLS * SPANS_A_SECOND / 4
    assert len(kills) == KILLS
    assert any(kill.serving for kill in kills)


# --- That the comparison would notice -------------------------------------------------------------


def spans(request: int, first: int = 0, later_ns: int = 0) -> list[dict[str, object]]:
    """Return the rows of a request's spans, from number `first` on."""
    ids = span_ids(SEED, request, SPANS_A_REQUEST)[first:]
    rows = {"name": "work", "kind": "internal", "start_ns": 1, "received_ns": 3}
    return [
        {**rows, "trace_id": b"t" * 16, "span_id": word.tobytes(), "end_ns": 2 + later_ns}
        for word in ids
    ]


def told() -> Acks:
    """Return what a client notes: request 0 acknowledged, 1 not, 2 refused for good."""
    number = np.arange(3)
    acked = np.array([9, 0, -1])
    return Acks(number, number, number, acked, np.array([1, 3, 1]), SEED, SPANS_A_REQUEST, 0, ())


def found_in(folder: Path, rows: list[dict[str, object]]) -> Found:
    store = Store.at(str(folder / "store"))
    store.write("spans", pa.Table.from_pylist(rows, schema=SPANS.arrow()))
    return compare(store, [told()])


def test_what_was_acknowledged_and_all_or_nothing_of_the_rest_is_right(tmp_path: Path) -> None:
    everything = found_in(tmp_path, spans(0) + spans(1))
    assert everything == Found(0, 0, 0, 0, 1, 512, 512, 2, 0)
    assert not everything.is_right  # one was refused for good


def test_a_resent_span_counts_as_the_readers_and_not_as_there_twice(tmp_path: Path) -> None:
    assert found_in(tmp_path, spans(0) + spans(0)) == Found(0, 0, 0, 0, 1, 512, 0, 2, 512)


def test_missing_double_foreign_and_torn_spans_are_counted(tmp_path: Path) -> None:
    rows = spans(0, first=5) + spans(0, first=500, later_ns=1) + spans(1, first=510) + spans(7)
    assert found_in(tmp_path, rows) == Found(5, 12, 512, 1, 1, 512, 2, 2, 0)
