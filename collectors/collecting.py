"""The collector of one namespace: ingest, storing and settling, wired; runs until told to stop.

A request is acknowledged when its bytes, without content, are synced in the log; some seconds
later it is in files. Nothing acknowledged is lost by kill -9, nor by a power cut where the disk
keeps its word. Always: received = accepted + rejected, and accepted = written + waiting +
deduplicated + sampled away.
"""

import asyncio
import logging
import shutil
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow as pa

from perfledger.collectors.attribute_values import DEFAULT_MAX_VALUE_BYTES
from perfledger.collectors.defects import tell_defect
from perfledger.collectors.ingesting import Forward, Ingest, IngestLimits
from perfledger.collectors.item_counts import ItemCounts
from perfledger.collectors.otlp_rows import Outcome, Signal
from perfledger.collectors.segments import OpenSegment
from perfledger.collectors.settling import SettleLimits, Settling
from perfledger.collectors.storing import Prepared, Sampler, Storing
from perfledger.collectors.transport.collector_metrics import DISK_LOW, MEMORY_FULL
from perfledger.collectors.transport.otlp_receiver import (
    DEFAULT_MAX_REQUEST_BYTES,
    Refusal,
    overloaded,
)
from perfledger.collectors.wal.write_ahead_log import Segment, WriteAheadLog
from perfledger.collectors.wire.recent_spans import DEFAULT_MAX_SPANS, RecentSpans
from perfledger.schema.clocks import monotonic_ns
from perfledger.schema.errors import PerfledgerError
from perfledger.schema.store import Store
from perfledger.schema.store_places import LocalPlace

log = logging.getLogger("perfledger.collect")
_TICK_S = 0.1
_RETRY_WRITE_S = 1.0
# How often a segment may fail for a defect of ours before it is left in the log.
_MOST_DEFECTS = 3


@dataclass(frozen=True)
class CollectLimits:
    """What one collector takes and holds.

    `buffer_bytes` bounds requests and rows in memory; beyond it and below `low_water_bytes` of
    free disk new requests are refused with a time to retry.
    """

    request_bytes: int = DEFAULT_MAX_REQUEST_BYTES
    value_bytes: int = DEFAULT_MAX_VALUE_BYTES
    buffer_bytes: int = 384 * 2**20
    segment_bytes: int = 72 * 2**20
    segment_s: float = 1.0
    log_bytes: int = 4 * 2**30
    low_water_bytes: int = 256 * 2**20
    recent_spans: int = DEFAULT_MAX_SPANS
    settle: SettleLimits = field(default_factory=SettleLimits)


class Collector:
    """Takes OTLP requests (a `Sink`) and turns them into files of one store.

    All methods run on one event loop; scanning, writing and deriving run in threads. Opening it
    takes the log's folder: raises UsageError where another process has it.
    """

    def __init__(
        self,
        store: Store,
        limits: CollectLimits,
        log_folder: Path | None = None,
        *,
        forward: Forward | None = None,
        sampler: Sampler | None = None,
        sample_after_s: float = 0.0,
    ) -> None:
        self._store = store
        self._limits = limits
        log_folder = log_folder or default_log_folder(store)
        self._log_folder = log_folder
        self._wal = WriteAheadLog.open(log_folder, max_bytes=limits.log_bytes)
        ingest = IngestLimits(
            *(limits.value_bytes, limits.segment_bytes, limits.segment_s),
            most_held_bytes=limits.buffer_bytes + limits.request_bytes,
        )
        self._items = ItemCounts()
        self._ingest = Ingest(self._wal, ingest, self._items, forward)
        self._settling = Settling(limits.settle)
        self._recent = RecentSpans(log_folder / "recent", limits.recent_spans)
        self._storing = Storing(
            *(store, self._wal, self._recent, self._items),
            *(self._settle_later, sampler, sample_after_s),
        )
        self._backlog: deque[Segment] = deque()
        self._prepared: deque[Prepared] = deque()
        self._preparing: OpenSegment | None = None
        self._derived: dict[str, list[pa.Table]] = {"steps": [], "requests": [], "collectives": []}
        self._failed: Counter[str] = Counter()
        self._reserved_bytes = 0
        self._is_disk_low = False
        self._counts: Counter[str] = Counter()
        self._stopping = asyncio.Event()

    @property
    def most_read_at_once(self) -> int:
        """Return how many of the largest requests fill the buffer, and one more."""
        return self._limits.buffer_bytes // self._limits.request_bytes + 1

    @property
    def held_bytes(self) -> int:
        """Return about how much memory requests and rows take."""
        prepared = sum(one.bytes for one in tuple(self._prepared))
        preparing = self._preparing
        under_way = 0 if preparing is None else preparing.held_bytes
        return self._ingest.held_bytes + under_way + prepared + self._reserved_bytes

    def refusing(self) -> str:
        """Return why every request is refused at this moment, or ""."""
        if self._is_disk_low:
            return DISK_LOW
        return MEMORY_FULL if self.held_bytes >= self._limits.buffer_bytes else ""

    def check_room(self) -> None:
        """Raise `overloaded()` while memory, or the disk, is full."""
        if reason := self.refusing():
            raise overloaded("log's disk") if reason == DISK_LOW else overloaded()

    def reserve(self, size_bytes: int) -> None:
        """Count bytes of a request as held; one request may go over the buffer's limit."""
        if self.held_bytes + size_bytes > self._limits.buffer_bytes + self._limits.request_bytes:
            raise overloaded()
        self._reserved_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Give reserved bytes back."""
        self._reserved_bytes -= size_bytes

    def refused(self, refusal: Refusal) -> None:
        """Count a request that was refused, by its HTTP status."""
        self._counts[f"requests_refused_{refusal.http_status}"] += 1

    async def export(self, signal: Signal, body: bytes, hops: tuple[str, ...] = ()) -> Outcome:
        """Take a request; it is durable when this returns. Raises Refusal."""
        return await self._ingest.submit(signal, body, hops)

    def counts(self) -> Counter[str]:
        """Return what happened so far, by name; `TABLE_written` and `TABLE_waiting` are items."""
        found = self._counts + self._items.read() + self._settling.counts
        found["log_bytes"] = self._wal.bytes
        found["log_segments"] = self._wal.segments
        found["log_quarantined_bytes"] = self._wal.quarantined_bytes
        found["log_torn_bytes"] = self._wal.torn_bytes
        return found

    def rejected_by_reason(self) -> Counter[tuple[str, str]]:
        """Return how many items were rejected, by table and reason."""
        return self._items.rejected()

    def lag_s(self) -> float:
        """Return the age of the oldest acknowledged item that is not in a file; 0 without any.

        Waiting for the rest of its trace, before tail sampling decides, is no lag.
        """
        preparing = self._preparing
        opened = [one.opened_s for one in (*self._prepared, preparing) if one is not None]
        oldest_s = self._ingest.oldest_s()
        opened += [] if oldest_s is None else [oldest_s]
        ages = [time.monotonic() - min(opened) - self._storing.wait_s] if opened else []
        ages += [(time.time_ns() - one.name.created_ns) / 1e9 for one in tuple(self._backlog)[:1]]
        return max([0.0, *ages])

    async def resume(self) -> None:
        """Go on where an earlier collector on this store ended, and begin to take requests."""
        with self._contained("resuming"):
            try:
                await asyncio.to_thread(_resume, self._settling, self._store)
            except PerfledgerError as error:
                # Requests that are not derived for it are derived by `attribute`.
                log.error("starting without the newest spans of the store: %s", error)
        with self._contained("resuming"):
            await asyncio.to_thread(self._recent.load)
        self._backlog.extend(self._wal.leftover())
        self._look_at_disk()
        self._ingest.start()

    async def run(self) -> None:
        """Write and settle what is due, until `stop`; then write everything.

        Raises PerfledgerError where acknowledged rows could not be written in the end; they stay
        in the log.
        """
        await asyncio.gather(self._store_when_due(), self._settle_when_due())
        await asyncio.to_thread(self._ingest.stop)
        await self._store_due(everything=True)
        await self._settle(everything=True)
        await self._write_derived()
        left = self._items.waiting()
        self._wal.close()
        if self._wal.segments:
            raise PerfledgerError(
                f"{left} items could not be written to the store yet; they are in the log",
                where=f"log {self._log_folder}",
                fix="free space or repair the disk, and start the collector again",
            )

    def stop(self) -> None:
        """Let `run` end. Call it when no request can come any more."""
        self._stopping.set()

    async def _store_when_due(self) -> None:
        while not await self._pause(_TICK_S):
            if not await self._store_due():
                await self._pause(_RETRY_WRITE_S)

    async def _settle_when_due(self) -> None:
        while not await self._pause(min(1.0, self._limits.settle.settle_s / 2)):
            await self._settle()
            await self._write_derived()

    async def _pause(self, seconds: float) -> bool:
        """Wait and return False, or return True as soon as the collector is to stop."""
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return False
        return True

    def _look_at_disk(self) -> None:
        try:
            free_bytes = shutil.disk_usage(self._log_folder).free
        except OSError:
            free_bytes = -1
        is_low = free_bytes < self._limits.low_water_bytes
        if is_low != self._is_disk_low:
            self._say_disk(free_bytes, is_low=is_low)
        self._is_disk_low = is_low

    def _say_disk(self, free_bytes: int, *, is_low: bool) -> None:
        free = f"{free_bytes // 2**20:,} MiB free" if free_bytes >= 0 else "unknown free space"
        told = (self._log_folder, free, self._limits.low_water_bytes // 2**20)
        if is_low:
            log.error("requests are refused: the disk of %s has %s, --low-water-mib is %d", *told)
        else:
            log.warning(
                "requests are taken again: the disk of %s has %s (--low-water-mib %d)", *told
            )

    async def _store_due(self, *, everything: bool = False) -> bool:
        """Store the segments that are due, in their order; return whether all went well."""
        while True:
            self._look_at_disk()
            if self._prepared and (everything or self._must_store(self._prepared[0])):
                if not await self._store_one(self._prepared[0]):
                    return False
            elif not await self._prepare_next(everything):
                return True

    def _must_store(self, oldest: Prepared) -> bool:
        """Return whether the oldest segment has waited for its traces, or memory will not do."""
        if self._storing.is_due(oldest):
            return True
        is_full = self.held_bytes >= self._limits.buffer_bytes // 2
        self._counts["segments_sampled_early"] += is_full
        return is_full

    async def _prepare_next(self, everything: bool) -> bool:
        """Make tables of the next segment of the log; return whether there was one."""
        if self._backlog:
            # Left over, and in the log until it is stored: a defect must not meet it again.
            segment, opened = self._backlog.popleft(), None
        else:
            cut = await asyncio.to_thread(self._ingest.next_cut, everything=everything)
            if cut is None:
                return False
            segment, opened = cut
        self._preparing = opened
        try:
            self._prepared.append(await asyncio.to_thread(self._prepare, segment, opened))
        except Exception as error:
            # It stays in the log, for the next start.
            self._defect("preparing a segment", error)
            self._counts["segments_set_aside"] += 1
        finally:
            self._preparing = None
        return True

    def _prepare(self, segment: Segment, opened: OpenSegment | None) -> Prepared:
        if opened is None:
            return self._storing.prepare(segment, self._ingest.replay(segment))[0]
        prepared, columns = self._storing.prepare(segment, opened)
        self._ingest.give_back(columns)
        return prepared

    async def _store_one(self, prepared: Prepared) -> bool:
        """Store a segment. A disk that refuses is waited for; a defect leaves it in the log."""
        name = str(prepared.log.name)
        try:
            await asyncio.to_thread(self._storing.store, prepared)
        except OSError as error:
            self._counts["write_failures"] += 1
            log.error("cannot write to the store, rows wait: %s", error.strerror or error)
            return False
        except Exception as error:
            self._defect("storing a segment", error)
            self._failed[name] += 1
            if self._failed[name] < _MOST_DEFECTS:
                return False
            self._counts["segments_set_aside"] += 1
        self._prepared.popleft()
        return True

    def _settle_later(self, spans: pa.Table) -> None:
        self._settling.add(spans, monotonic_ns())

    async def _settle(self, everything: bool = False) -> None:
        with self._contained("deriving"):
            now_ns, wall_ns = monotonic_ns(), time.time_ns()
            settled = await asyncio.to_thread(
                self._settling.settle, now_ns, wall_ns, everything=everything
            )
            made = (settled.steps, settled.requests, settled.collectives)
            for name, rows in zip(("steps", "requests", "collectives"), made, strict=True):
                if rows.num_rows:
                    self._derived[name].append(rows)
            for defect in settled.defects:
                self._defect("deriving", defect)

    async def _write_derived(self) -> bool:
        """Write derived rows, each table for itself; return whether all went well."""
        done = True
        for name, parts in self._derived.items():
            if not parts:
                continue
            taken, written = len(parts), False
            with self._contained("writing derived rows"):
                rows = pa.concat_tables(parts[:taken])
                try:
                    await asyncio.to_thread(self._store.write, name, rows)
                    written = True
                    self._counts[f"{name}_written"] += rows.num_rows
                except OSError as error:
                    self._counts["write_failures"] += 1
                    log.error("cannot write to the store, rows wait: %s", error.strerror or error)
                    done = False
                    continue
            # What a defect keeps from being written is derived again by `attribute`.
            self._counts[f"{name}_lost"] += 0 if written else 1
            del parts[:taken]
        return done

    @contextmanager
    def _contained(self, what: str) -> Iterator[None]:
        """Keep a defect of ours from ending the collector: count it, and log where it was."""
        try:
            yield
        except (PerfledgerError, Refusal):
            raise
        except Exception as error:
            self._defect(what, error)

    def _defect(self, what: str, error: Exception) -> None:
        """Count and tell a defect of ours."""
        self._counts["defects"] += 1
        tell_defect(what, error)


def default_log_folder(store: Store) -> Path:
    """Return where the log of a namespace is: beside its tables, or here for a remote store."""
    if isinstance(store.place, LocalPlace):
        return store.place.root / store.namespace / "wal"
    return Path("perfledger-log") / store.namespace


def _resume(settling: Settling, store: Store) -> None:
    """Hand the newest spans of a store, with their steps and requests, to settling."""
    since_ns = _recent_since_ns(store, settling.limits)
    spans, steps, requests, collectives = (
        store.collect(name, since_ns=since_ns)
        for name in ("spans", "steps", "requests", "collectives")
    )
    settling.resume(spans, steps, requests, collectives, since_ns=since_ns, now_ns=monotonic_ns())


def _recent_since_ns(store: Store, limits: SettleLimits) -> int:
    """Return when the oldest file was written that settling would still hold; 0 means all."""
    files = store.visible("spans")
    rows, since_ns = 0, time.time_ns()
    for file in reversed(files):
        rows += store.footer(file).num_rows
        age_ns = files[-1].written_ns - file.written_ns
        if age_ns > limits.hold_s * 1e9 or rows > limits.max_spans:
            return since_ns
        since_ns = file.written_ns
    return 0
