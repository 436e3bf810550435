"""Segments into files: exactly once whatever fails, and counts that add up at every moment."""

import asyncio
import errno
import random
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from collect_pipeline import (
    AT_NS,
    GatedLog,
    adds_up,
    logs,
    metrics,
    pipeline,
    rows_in_files,
    run,
    same_spans,
    span_numbers,
)
from otlp_client import number, span, traces

from perfledger.collectors.collecting import CollectLimits, Collector
from perfledger.collectors.otlp_rows import LOGS, METRICS, TRACES
from perfledger.collectors.sampling.sampling_policy import SamplingPolicy
from perfledger.collectors.sampling.tail_sampling import TailSampler
from perfledger.collectors.settling import SettleLimits
from perfledger.collectors.transport.otlp_receiver import Refusal
from perfledger.collectors.wal.write_ahead_log import LogRecord, Segment, WriteAheadLog
from perfledger.collectors.wire.recent_spans import Hashes, RecentSpans
from perfledger.schema.errors import PerfledgerError
from perfledger.schema.store import Store
from perfledger.schema.tables import SPANS

# --- A crash at any point -----------------------------------------------------------------


class Crash(BaseException):
    """The process ends here."""


class CrashingStore(Store):
    def write(self, *arguments: object, **options: object) -> Path:
        raise Crash


class CrashingAfterWrite(RecentSpans):
    def remember(self, segment: str, hashes: Hashes) -> None:
        raise Crash


class CrashingBeforeDrop(GatedLog):
    def drop(self, segment: Segment) -> None:
        raise Crash


class CrashingAtTheSecond(Store):
    def write(self, table: str, *arguments: object, **options: object) -> Path:
        if table != "points":
            raise Crash
        return super().write(table, *arguments, **options)


CRASHES = {
    "before any file": {"store": CrashingStore},
    "between two files": {"store": CrashingAtTheSecond},
    "before the hashes": {"recent": CrashingAfterWrite},
    "before the log goes": {"log": CrashingBeforeDrop},
}


@pytest.mark.parametrize("where", CRASHES)
def test_a_crash_anywhere_loses_nothing_and_duplicates_nothing(tmp_path: Path, where: str) -> None:
    requests = [(TRACES, same_spans(1, 2)), (METRICS, metrics(1.0, 2.0)), (LOGS, logs(9))]
    for crashes in (CRASHES[where], {}, {}):
        with pipeline(tmp_path, **crashes) as parts:
            if crashes:
                parts.send(*requests)
                parts.send((TRACES, same_spans(2, 3)))
                with pytest.raises(Crash):
                    parts.store_all()
                assert parts.log.segments == 1
                continue
            parts.replay()
            assert (parts.log.segments, parts.log.bytes) == (0, 0)
            assert adds_up(parts.counts.read())
            assert {t: rows_in_files(parts.store, t) for t in ("spans", "points", "logs")} == {
                "spans": 3,
                "points": 2,
                "logs": 1,
            }
            # Sent again, over a restart: dropped.
            parts.send((TRACES, same_spans(1, 2, 3)))
            parts.store_all()
            assert rows_in_files(parts.store) == 3
            assert parts.counts.read()["spans_deduplicated"] >= 3


def test_every_state_between_two_writes_replays_to_the_same_rows(tmp_path: Path) -> None:
    """The folder as it was before each step, copied, is what a crash there leaves."""
    copies = []

    class Copying(GatedLog):
        def drop(self, segment: Segment) -> None:
            copies.append(tmp_path / f"copy{len(copies)}")
            shutil.copytree(tmp_path / "live", copies[-1])
            super().drop(segment)
            copies.append(tmp_path / f"copy{len(copies)}")
            shutil.copytree(tmp_path / "live", copies[-1])

    with pipeline(tmp_path / "live", log=Copying) as parts:
        for first in (1, 3, 5):
            parts.send((TRACES, same_spans(first, first + 1, first + 2)))
            parts.send((METRICS, metrics(float(first))))
            segment = parts.ingest.next_cut(everything=True)
            prepared, _ = parts.storing.prepare(*segment)
            parts.storing.store(prepared)
    assert len(copies) == 6
    for number_of, copy in enumerate(copies):
        with pipeline(copy) as parts:
            parts.replay()
            segments = number_of // 2 + 1
            assert span_numbers(parts.store) == list(range(1, 2 + 2 * segments))
            assert rows_in_files(parts.store) == 1 + 2 * segments
            assert rows_in_files(parts.store, "points") == segments


def test_a_file_that_went_missing_is_written_again_from_the_log(tmp_path: Path) -> None:
    with pipeline(tmp_path, log=CrashingBeforeDrop, recent=Forgetful) as parts:
        parts.send((TRACES, same_spans(1, 2)))
        with pytest.raises(Crash):
            parts.store_all()
        (file,) = parts.store.files("spans")
    content = pq.read_table(file, partitioning=None)
    file.unlink()
    with pipeline(tmp_path) as parts:
        parts.replay()
        assert pq.read_table(file, partitioning=None).equals(content)


class Forgetful(RecentSpans):
    def remember(self, segment: str, hashes: Hashes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_hashes_that_cannot_be_kept_do_not_keep_the_log(tmp_path: Path) -> None:
    with pipeline(tmp_path, recent=Forgetful) as parts:
        parts.send((TRACES, same_spans(1)))
        parts.store_all()
        assert (parts.log.segments, parts.counts.read()["write_failures"]) == (0, 1)
        assert adds_up(parts.counts.read())
    with pipeline(tmp_path) as parts:
        parts.send((TRACES, same_spans(1)))
        parts.store_all()
        assert rows_in_files(parts.store) == 2  # the restart knows nothing of it
        assert span_numbers(parts.store) == [1]  # and the reader drops it


class NotDropping(GatedLog):
    refusals = 2

    def drop(self, segment: Segment) -> None:
        if self.refusals:
            self.refusals -= 1
            raise OSError(errno.EIO, "Input/output error")
        super().drop(segment)


def test_a_log_that_cannot_be_dropped_is_tried_again_and_counts_once(tmp_path: Path) -> None:
    with pipeline(tmp_path, log=NotDropping) as parts:
        parts.send((TRACES, same_spans(1, 2)))
        prepared, _ = parts.storing.prepare(*parts.ingest.next_cut(everything=True))
        for _ in range(2):
            with pytest.raises(OSError):
                parts.storing.store(prepared)
        parts.storing.store(prepared)
        counts = parts.counts.read()
        assert (counts["spans_written"], parts.log.segments) == (2, 0)
        assert adds_up(counts)
        assert len(list((tmp_path / "log" / "recent").iterdir())) == 1


# --- What is the same ---------------------------------------------------------------------


def test_only_spans_equal_in_every_byte_are_dropped(tmp_path: Path) -> None:
    times = {"start_time_unix_nano": AT_NS, "end_time_unix_nano": AT_NS + 5}
    same_ids = [
        span(1, **times),
        span(1, **{**times, "end_time_unix_nano": AT_NS + 6}),
        span(1, **times, name="other"),
        span(1, **times, attributes=[number("a", 1)]),
        span(1, trace_id=2, **times),
    ]
    with pipeline(tmp_path) as parts:
        parts.send((TRACES, traces(*same_ids)))
        parts.send((TRACES, traces(*same_ids[:2])))
        parts.store_all()
        parts.send((TRACES, traces(*same_ids)), (TRACES, traces(same_ids[0], same_ids[0])))
        parts.store_all()
        counts = parts.counts.read()
        assert (counts["spans_written"], counts["spans_deduplicated"]) == (5, 9)
        assert rows_in_files(parts.store) == 5
        assert adds_up(counts)


# --- A defect of ours, or a disk that refuses ---------------------------------------------


class FailingStore(Store):
    """Cannot write the spans of segments while `error` is set."""

    error: Exception | None = None

    def write(self, table: str, rows: pa.Table, **options: object) -> Path:
        if table == "spans" and self.error is not None:
            raise self.error
        return super().write(table, rows, **options)


LIMITS = CollectLimits(
    segment_s=0.05, low_water_bytes=0, settle=SettleLimits(settle_s=0.1, window_s=0.2)
)


async def until(ready: Callable[[], object], timeout_s: float = 20) -> None:
    async with asyncio.timeout(timeout_s):
        while not ready():
            await asyncio.sleep(0.02)


async def started_until_written(store: Store, spans: int) -> Counter[str]:
    """Run a collector until it has written so many spans of its log, and return its counts."""
    collector = Collector(store, LIMITS)
    await collector.resume()
    running = asyncio.create_task(collector.run())
    await until(lambda: collector.counts()["spans_written"] == spans)
    collector.stop()
    await running
    return collector.counts()


def test_a_segment_set_aside_waits_in_the_log_and_is_stored_at_the_next_start(
    tmp_path: Path,
) -> None:
    store = FailingStore.at(str(tmp_path))

    async def fail() -> Counter[str]:
        collector = Collector(store, LIMITS)
        await collector.resume()
        running = asyncio.create_task(collector.run())
        store.error = KeyError("PRIVATE")
        await collector.export(TRACES, same_spans(1, 2))
        await until(lambda: collector.counts()["segments_set_aside"])
        store.error = None
        # Sent again with a new one: the old ones are in the log, so they are dropped here.
        await collector.export(TRACES, same_spans(1, 2, 3))
        await until(lambda: collector.counts()["spans_written"] == 1)
        collector.stop()
        with pytest.raises(PerfledgerError, match="2 items could not be written"):
            await running
        return collector.counts()

    counts = run(fail())
    assert adds_up(counts)
    assert (counts["spans_waiting"], counts["spans_deduplicated"]) == (2, 2)

    assert adds_up(run(started_until_written(store, 2)))
    assert span_numbers(store) == [1, 2, 3]
    assert rows_in_files(store) == 3


def leave_in_log(folder: Path, segments: int) -> None:
    """Leave segments of one request each, as a killed collector would."""
    log = WriteAheadLog.open(folder / "default" / "wal")
    for at in range(segments):
        log.append([LogRecord(0, AT_NS, same_spans(*range(at * 50 + 1, at * 50 + 51)))])
        log.cut()
    log.close()


def test_a_long_backlog_is_not_read_into_memory_while_nothing_can_be_written(
    tmp_path: Path,
) -> None:
    leave_in_log(tmp_path, 40)
    store = FailingStore.at(str(tmp_path))
    store.error = OSError(errno.ENOSPC, "No space left on device")

    async def work() -> Counter[str]:
        collector = Collector(store, LIMITS)
        await collector.resume()
        running = asyncio.create_task(collector.run())
        await until(lambda: collector.counts()["write_failures"] >= 3)
        assert collector.counts()["log_replayed_requests"] == 1
        assert collector.lag_s() > 1
        await collector.export(TRACES, same_spans(9001))  # new ones are taken meanwhile
        store.error = None
        await until(lambda: collector.counts()["spans_written"] == 2001)
        await until(lambda: collector.lag_s() == 0)
        collector.stop()
        await running
        return collector.counts()

    counts = run(work())
    assert adds_up(counts) and counts["log_replayed_requests"] == 40
    assert rows_in_files(store) == 2001


def test_a_segment_that_cannot_be_read_back_does_not_keep_the_others(tmp_path: Path) -> None:
    leave_in_log(tmp_path, 3)
    store = Store.at(str(tmp_path))
    second = sorted((tmp_path / "default" / "wal").glob("*.wal"))[1]
    collector = Collector(store, LIMITS)
    second.unlink()  # after the log has listed it: the disk cannot open it

    async def work() -> None:
        await collector.resume()
        running = asyncio.create_task(collector.run())
        await until(lambda: collector.counts()["spans_written"] == 100)
        collector.stop()
        with pytest.raises(PerfledgerError, match="could not be written to the store yet"):
            await running

    run(work())
    assert collector.counts()["segments_set_aside"] == 1
    assert len(span_numbers(store)) == 100


# --- Counts -------------------------------------------------------------------------------


def test_at_every_moment_the_counts_add_up(tmp_path: Path) -> None:
    """Polled from another thread: all signals, rejections, re-sent spans, sampling, failures."""
    store = FailingStore.at(str(tmp_path))
    sampler = TailSampler(SamplingPolicy(share=0.5))
    collector = Collector(store, LIMITS, sampler=sampler, sample_after_s=0.05)
    wrong: list[Counter[str]] = []
    reads, done = [0], threading.Event()

    def poll() -> None:
        while not done.wait(0.001):  # without it the thread takes half of all time
            counts = collector.counts()
            reads[0] += 1
            if not adds_up(counts):
                wrong.append(counts)

    async def send(client: int) -> None:
        draw = random.Random(client)
        for at in range(60):
            first = client * 100_000 + draw.randrange(30) * 50
            trace_id = draw.getrandbits(127) + 1
            spans = [span(first + n, trace_id=trace_id) for n in range(1, 40)]
            requests = [
                (TRACES, traces(*spans, span(0))),
                (TRACES, traces(*spans)),
                (METRICS, metrics(1.0, float(at))),
                (LOGS, logs(1, 2)),
                (TRACES, b"\xff" * 9),
            ]
            answers = await asyncio.gather(
                *(collector.export(*request) for request in requests), return_exceptions=True
            )
            assert sum(isinstance(answer, Refusal) for answer in answers) == 1
            store.error = OSError(errno.EIO, "Input/output error") if at == 30 else None

    async def work() -> None:
        await collector.resume()
        running = asyncio.create_task(collector.run())
        await asyncio.gather(*(send(client) for client in range(6)))
        store.error = None
        collector.stop()
        await running

    poller = threading.Thread(target=poll)
    poller.start()
    try:
        run(work())
    finally:
        done.set()
        poller.join()
    counts = collector.counts()
    assert wrong == [] and reads[0] > 100
    assert adds_up(counts)
    assert counts["spans_waiting"] == counts["points_waiting"] == counts["logs_waiting"] == 0
    assert counts["spans_rejected"] == sum(collector.rejected_by_reason().values()) == 360
    assert counts["spans_deduplicated"] >= 360 * 39 and counts["spans_sampled_away"] > 0
    assert rows_in_files(store) == counts["spans_written"]
    assert (counts["points_written"], counts["logs_written"]) == (720, 720)


def test_after_the_clock_was_set_back_names_go_on_and_lag_is_not_negative(tmp_path: Path) -> None:
    tomorrow_ns = time.time_ns() + 86_400 * 10**9
    log = WriteAheadLog.open(tmp_path / "log", clock_ns=lambda: tomorrow_ns)
    log.append([LogRecord(0, AT_NS, same_spans(1))])
    log.close()
    store = Store.at(str(tmp_path))

    async def work() -> None:
        collector = Collector(store, replace(LIMITS, segment_s=9.0), tmp_path / "log")
        assert collector.lag_s() == 0.0
        await collector.resume()
        assert collector.lag_s() == 0.0
        running = asyncio.create_task(collector.run())
        await collector.export(TRACES, same_spans(2))
        collector.stop()
        await running

    run(work())
    names = [int(file.name.partition("-")[0]) for file in store.files("spans")]
    assert names == [tomorrow_ns, tomorrow_ns + 1]
    assert span_numbers(store) == [1, 2]


def test_a_record_that_cannot_be_read_any_more_goes_alone(tmp_path: Path) -> None:
    """As after an update that decodes more strictly: the others of its segment are stored."""
    folder = tmp_path / "default" / "wal"
    wal = WriteAheadLog.open(folder)
    bodies = (same_spans(1), b"\xff" * 9, b"of another kind", same_spans(2))
    kinds = (0, 0, 9, 0)
    wal.append([LogRecord(k, AT_NS + k, body) for k, body in zip(kinds, bodies, strict=True)])
    wal.close()
    store = Store.at(str(tmp_path))

    counts = run(started_until_written(store, 2))
    assert adds_up(counts)
    assert (counts["log_unreadable_requests"], counts["log_replayed_requests"]) == (2, 2)
    assert span_numbers(store) == [1, 2]
    kept = sorted(path.read_bytes() for path in (folder / "quarantine").glob("*.unreadable"))
    assert kept == sorted(bodies[1:3])
    assert not list(folder.glob("*.wal"))


def test_a_file_that_is_there_is_made_durable_before_the_log_goes(tmp_path: Path) -> None:
    """A sync of its folder may have failed after it was linked."""
    settled = []

    class Place(type(Store.at(str(tmp_path)).place)):  # type: ignore[misc]
        def settle(self, key: str) -> None:
            settled.append(key)
            super().settle(key)

    store = Store.at(str(tmp_path))
    store.place = Place(store.place.root)
    rows = SPANS.from_rows(
        [
            {
                "trace_id": b"t" * 16,
                "span_id": b"s" * 8,
                "name": "n",
                "kind": "server",
                "start_ns": 1,
                "end_ns": 2,
                "received_ns": 3,
            }
        ]
    )
    name = f"{AT_NS}-0123abcd"
    paths = {store.write("spans", rows, name=name) for _ in range(2)}
    (path,) = paths
    assert [tmp_path / key for key in settled] == [path]
