"""The collector's inner parts on real files: log, ingest, storing; and ways to look at them."""

import asyncio
import threading
from collections import Counter
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
import pyarrow.parquet as pq
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord as OtlpLog
from opentelemetry.proto.logs.v1.logs_pb2 import ResourceLogs, ScopeLogs
from opentelemetry.proto.metrics.v1 import metrics_pb2
from otlp_client import span, traces

from perfledger.collectors.ingesting import Ingest, IngestLimits
from perfledger.collectors.item_counts import ItemCounts
from perfledger.collectors.otlp_rows import Outcome, Signal
from perfledger.collectors.storing import Storing
from perfledger.collectors.transport.otlp_receiver import Refusal
from perfledger.collectors.wal.write_ahead_log import LogRecord, WriteAheadLog
from perfledger.collectors.wire.recent_spans import RecentSpans
from perfledger.schema.store import Store

LIMITS = IngestLimits(value_bytes=2048, segment_bytes=64 * 2**20, segment_s=3600.0)
AT_NS = 1_700_000_000_000_000_000
TABLES = ("spans", "points", "logs")
Result = TypeVar("Result")


class GatedLog(WriteAheadLog):
    """A log that notes how many records each append has, and waits while the gate is shut."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)
        self.appends: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.reached = threading.Event()

    def append(self, records: Sequence[LogRecord]) -> None:
        self.reached.set()
        assert self.gate.wait(30)
        super().append(records)
        self.appends.append(len(records))


@dataclass
class Pipeline:
    """What a Collector wires, without its loop: a test does each step itself."""

    store: Store
    log: GatedLog
    counts: ItemCounts
    ingest: Ingest
    recent: RecentSpans
    storing: Storing
    observed: list[pa.Table] = field(default_factory=list)

    async def submit(self, signal: Signal, body: bytes) -> Outcome | Refusal:
        try:
            return await self.ingest.submit(signal, body, ())
        except Refusal as refusal:
            return refusal

    def send(self, *requests: tuple[Signal, bytes]) -> list[Outcome | Refusal]:
        """Submit requests at once and return their answers."""

        async def all_of_them() -> list[Outcome | Refusal]:
            return list(await asyncio.gather(*(self.submit(*one) for one in requests)))

        return asyncio.run(all_of_them())

    def store_all(self) -> None:
        """Store what has gathered."""
        while cut := self.ingest.next_cut(everything=True):
            prepared, columns = self.storing.prepare(*cut)
            self.ingest.give_back(columns)
            self.storing.store(prepared)

    def replay(self) -> None:
        """Store what an earlier process left in the log."""
        for segment in self.log.leftover():
            prepared, _ = self.storing.prepare(segment, self.ingest.replay(segment))
            self.storing.store(prepared)


@contextmanager
def pipeline(
    folder: Path,
    *,
    limits: IngestLimits = LIMITS,
    log_bytes: int | None = None,
    max_spans: int = 10_000,
    store: type[Store] = Store,
    log: type[GatedLog] = GatedLog,
    recent: type[RecentSpans] = RecentSpans,
    **options: object,
) -> Iterator[Pipeline]:
    """Open the parts in a folder; leave as kill -9 would: nothing is written at the end."""
    place, counts = store.at(str(folder / "store")), ItemCounts()
    opened = log.open(folder / "log", max_bytes=log_bytes)
    known = recent(folder / "log" / "recent", max_spans)
    known.load()
    observed: list[pa.Table] = []
    ingest = Ingest(opened, limits, counts)
    storing = Storing(place, opened, known, counts, observed.append, **options)
    ingest.start()
    try:
        yield Pipeline(place, opened, counts, ingest, known, storing, observed)
    finally:
        opened.gate.set()
        ingest.stop()
        opened.close()


def adds_up(counts: Counter[str]) -> bool:
    """Return whether nothing is lost between what was received and where it is."""
    return all(
        counts[f"{table}_received"] == counts[f"{table}_accepted"] + counts[f"{table}_rejected"]
        and counts[f"{table}_accepted"]
        == counts[f"{table}_written"]
        + counts[f"{table}_waiting"]
        + counts[f"{table}_deduplicated"]
        + counts[f"{table}_sampled_away"]
        for table in TABLES
    )


def rows_in_files(store: Store, table: str = "spans") -> int:
    """Return how many rows lie in files, those included that a reader would drop."""
    return sum(pq.read_metadata(path).num_rows for path in store.files(table))


def span_numbers(store: Store) -> list[int]:
    """Return the span ids that the reader shows, as numbers, in order."""
    spans = store.collect("spans")
    return sorted(int.from_bytes(span_id, "big") for span_id in spans["span_id"])


def same_spans(*numbers: int, name: str = "work") -> bytes:
    """Return a request of spans with these ids; the same bytes each time."""
    times = {"start_time_unix_nano": AT_NS, "end_time_unix_nano": AT_NS + 5}
    return traces(*(span(one, name=name, **times) for one in numbers))


def metrics(*values: float) -> bytes:
    points = [
        metrics_pb2.NumberDataPoint(time_unix_nano=at, as_double=value)
        for at, value in enumerate(values, 1)
    ]
    metric = metrics_pb2.Metric(name="depth", gauge=metrics_pb2.Gauge(data_points=points))
    scoped = metrics_pb2.ScopeMetrics(metrics=[metric])
    group = metrics_pb2.ResourceMetrics(scope_metrics=[scoped])
    return ExportMetricsServiceRequest(resource_metrics=[group]).SerializeToString()


def logs(*severities: int) -> bytes:
    records = [OtlpLog(time_unix_nano=1, severity_number=number) for number in severities]
    group = ResourceLogs(scope_logs=[ScopeLogs(log_records=records)])
    return ExportLogsServiceRequest(resource_logs=[group]).SerializeToString()


def run(work: Coroutine[object, object, Result], timeout_s: float = 60) -> Result:
    """Run a coroutine; it must end in time."""

    async def within() -> Result:
        async with asyncio.timeout(timeout_s):
            return await work

    return asyncio.run(within())
