"""The rings of all ranks, each with the state machine that makes spans of it, and their totals."""

from collections import Counter
from collections.abc import Iterator, Sequence
from random import Random

from perfledger.instrumented_runtime.finished_spans import FinishedSpan
from perfledger.instrumented_runtime.record_spans import RecordSpans
from perfledger.instrumented_runtime.ring import Reader
from perfledger.instrumented_runtime.telemetry import EngineRecord, RankRing, RequestRecord
from perfledger.schema import metrics
from perfledger.schema.metrics import Metric

READ_RECORDS = 8192
# What every rank of a replica records alike: rank 0 speaks for them.
SAID_BY_RANK_0 = frozenset({metrics.STEPS})


class RingSpans:
    """One rank: its ring, and the spans of the process that writes there now."""

    def __init__(self, ring: RankRing, random: Random) -> None:
        """Attach to the ring. Raises PerfledgerError if there is no such ring."""
        self.place = ring
        self.reader = Reader.attach(ring.name)
        self.taken = 0  # records read so far
        self._random = random
        self._known = False  # a process has said that it is ready
        self.spans = self._new_spans()

    def read(self) -> Iterator[list[FinishedSpan]]:
        """Take all that is there, in pieces."""
        while records := self.reader.read(READ_RECORDS):
            self.taken += len(records)
            for record in records:
                yield self.spans.feed(record)
        for gap in self.reader.gap_at_end():
            yield self.spans.feed(gap)

    def started(self, engine: EngineRecord) -> Iterator[list[FinishedSpan]]:
        """A process of this rank is ready. What an earlier one left open is closed first: steps
        are counted from 1 again, in a trace of their own."""
        if self._known:
            yield from self.read()
            yield self.spans.end()
            spans = self._new_spans()
            spans.counts = self.spans.counts  # in one piece: another thread may be counting
            self.spans = spans
        self._known = True
        yield self.spans.feed(engine)

    def _new_spans(self) -> RecordSpans:
        return RecordSpans(self._random, replica=self.place.replica, rank=self.place.rank)


class AllRings:
    """Every rank of every replica. `own_counts` are the exporter's."""

    def __init__(self, rings: Sequence[RankRing], random: Random) -> None:
        self._rings = {(ring.replica, ring.rank): RingSpans(ring, random) for ring in rings}
        self._several = len({ring.replica for ring in rings}) > 1
        self.own_counts: Counter[tuple[Metric, str]] = Counter()
        for metric in metrics.METRICS:  # from 0 on: the first loss is an increase too
            if metric.kind == "counter" and not metric.attribute:
                self.own_counts[metric, ""] = 0
        for where in metrics.LOST_WHERE:
            self.own_counts[metrics.TELEMETRY_LOST, where] = 0

    def __iter__(self) -> Iterator[RingSpans]:
        return iter(self._rings.values())

    @property
    def taken(self) -> int:
        """Records read from all rings so far."""
        return sum(ring.taken for ring in self)

    def started(self, engine: EngineRecord) -> Iterator[list[FinishedSpan]]:
        """See RingSpans.started."""
        return self._rings[engine.replica, engine.rank].started(engine)

    def finished(self, request: RequestRecord) -> list[FinishedSpan]:
        """Return the spans of a request that has ended, in the replica that it was sent to."""
        return self._rings[request.replica, 0].spans.feed(request)

    def counts(self) -> Counter[tuple[Metric, str]]:
        """Return the counters of all ranks, summed. Callable from another thread."""
        total = Counter(dict(self.own_counts))
        for ring in self:
            for (metric, value), count in dict(ring.spans.counts).items():
                if ring.place.rank == 0 or metric not in SAID_BY_RANK_0:
                    total[metric, value] += count
        return total

    def take_gauge(self, metric: Metric) -> Iterator[tuple[int, dict[str, str]]]:
        """Return a gauge's values, one a replica that made a step since it was last taken, with
        the replica's number where there are several."""
        for ring in self:
            value = ring.spans.gauges.pop(metric, None)
            if value is not None and ring.place.rank == 0:
                yield value, {"perfledger.replica": ring.place.replica} if self._several else {}
