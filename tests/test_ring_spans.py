"""Several rings: who wrote a record says whose span it is, and totals are of all ranks."""

from collections.abc import Iterator
from random import Random

import pytest

from perfledger.instrumented_runtime.finished_spans import FinishedSpan
from perfledger.instrumented_runtime.records import ADMIT, CHUNK, STEP
from perfledger.instrumented_runtime.ring import Ring, Writer
from perfledger.instrumented_runtime.ring_spans import AllRings
from perfledger.instrumented_runtime.telemetry import EngineRecord, RankRing, RequestRecord
from perfledger.schema import metrics

PLACES = (("0", 0), ("0", 1), ("1", 0))
Place = tuple[str, int]


class Written:
    """Three rings of four records, what the readers make of them, and how to write there."""

    def __init__(self) -> None:
        self._rings = {place: Ring.create(4) for place in PLACES}
        self._writers = {place: Writer.attach(ring.name) for place, ring in self._rings.items()}
        self.all = AllRings([RankRing(r.name, *at) for at, r in self._rings.items()], Random(7))

    def step(self, place: Place, seq: int, prefill_tokens: int = 0, waiting: int = 0) -> None:
        times = (10, 11, 12, 13, 14)
        self.write(place, STEP, seq, *times, 1, prefill_tokens, 1, waiting, 0, 9, 5, 0)

    def write(self, place: Place, kind: int, *record: int) -> None:
        self._writers[place].write(kind, record)

    def read(self) -> list[FinishedSpan]:
        return [span for ring in self.all for spans in ring.read() for span in spans]

    def started(self, engine: EngineRecord) -> list[FinishedSpan]:
        return [span for spans in self.all.started(engine) for span in spans]

    def close(self) -> None:
        for ring in self._rings.values():
            ring.close()


@pytest.fixture
def written() -> Iterator[Written]:
    rings = Written()
    yield rings
    rings.close()


def steps_of(spans: list[FinishedSpan]) -> list[tuple[object, object, object]]:
    names = ("perfledger.replica", "perfledger.rank", "perfledger.step.seq")
    found = [tuple(span.attributes.get(name) for name in names) for span in spans]
    return [(a, b, c) for a, b, c in found if c is not None]


def test_steps_carry_their_replica_and_rank_in_a_trace_of_each_rank(written: Written) -> None:
    for seq in (1, 2):
        for place in PLACES:
            written.step(place, seq)
    spans = written.read()
    assert steps_of(spans) == [(*place, seq) for place in PLACES for seq in (1, 2)]
    assert len({span.trace_id for span in spans}) == 3
    assert written.all.taken == 6


def test_loss_is_counted_in_the_ring_where_it_was(written: Written) -> None:
    for seq in range(7):
        written.step(("0", 1), seq)  # four fit
    written.step(("1", 0), 1)
    dropped = [span.attributes for span in written.read() if span.name == "telemetry_dropped"]
    assert dropped == []  # nothing follows the gap yet
    written.step(("0", 1), 7)
    dropped = [span.attributes for span in written.read() if span.name == "telemetry_dropped"]
    assert dropped == [{"perfledger.replica": "0", "perfledger.rank": 1, "perfledger.dropped": 3}]
    assert written.all.counts()[metrics.TELEMETRY_LOST, "ring"] == 3


def test_totals_count_each_step_once_and_the_work_of_every_rank(written: Written) -> None:
    for place, waiting in zip(PLACES, (3, 4, 5), strict=True):
        written.step(place, 1, waiting=waiting)
    written.read()
    counts = written.all.counts()
    assert counts[metrics.STEPS, ""] == 2  # of two replicas
    assert counts[metrics.ENGINE_CPU, ""] == 15  # of three processes
    of = "perfledger.replica"
    assert list(written.all.take_gauge(metrics.QUEUE_LENGTH)) == [(3, {of: "0"}), (5, {of: "1"})]
    assert list(written.all.take_gauge(metrics.QUEUE_LENGTH)) == []


def test_a_restarted_rank_begins_a_new_trace_and_closes_what_was_open(written: Written) -> None:
    place = ("1", 0)
    assert written.started(EngineRecord({"perfledger.device": "cpu"}, *place)) == []
    written.write(place, ADMIT, 7, 1, 0, 77, 78, 1, 2, 3, 5, 0, 0, 0, 0)
    written.write(place, CHUNK, 7, 1, 5, 0, 1, 1, 1, 1, 0, 5, 25, 0, 0)
    written.step(place, 1, prefill_tokens=5)
    first = written.read()
    written.step(place, 2)  # its last one: not read when the next process is ready
    closed = written.started(EngineRecord({"perfledger.device": "cpu"}, *place))
    assert steps_of(closed) == [("1", 0, 2)]
    assert [(span.trace_id, span.name) for span in closed if span.parent_span_id == 78] == [
        (77, "decode")
    ]
    written.step(place, 1)
    again = written.read()
    assert steps_of(again) == [("1", 0, 1)]
    assert {span.attributes.get("perfledger.device") for span in again if span.links == ()} >= {
        "cpu"
    }
    engine = [span.trace_id for span in (*first, *closed, *again) if span.trace_id != 77]
    assert len(set(engine)) == 2
    assert again[0].trace_id != first[-1].trace_id
    assert written.all.counts()[metrics.STEPS, ""] == 3


def test_a_request_belongs_to_the_replica_it_was_sent_to(written: Written) -> None:
    """Requests of the same number are told apart by the replica."""
    for place, span_id in ((("0", 0), 70), (("1", 0), 80)):
        written.write(place, ADMIT, 7, 1, 0, 77, span_id, 1, 2, 3, 5, 4, 0, 0, 0)
    written.read()
    record = RequestRecord(7, 77, 80, None, "chat", 1, 9, "ok", {}, [], 1, replica="1")
    (root,) = written.all.finished(record)
    assert root.attributes["gen_ai.usage.cache_read.input_tokens"] == 4
    open_ones = [len(list(ring.spans.end())) for ring in written.all]
    assert written.all.counts()[metrics.REQUESTS, "ok"] == 1
    assert open_ones == [0, 0, 0]
