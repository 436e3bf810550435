"""The collector: receivers, decoding, buffer, settling and store, wired; runs until told to stop.

Guarantee, until the write-ahead log comes: a request is acknowledged when its rows are in memory,
and they are durable in Parquet about a second later. SIGTERM and SIGINT lose nothing. A kill -9 or
a power cut loses at most that second. While the disk is full nothing is lost: rows wait in memory,
and beyond `buffer_bytes` new requests are refused with a time to retry.
Received = written + rejected + waiting, for spans, points and log records.
"""

import asyncio
import logging
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pyarrow.parquet as pq

from perfledger.collectors.attribute_values import DEFAULT_MAX_VALUE_BYTES
from perfledger.collectors.buffering import RowBuffer
from perfledger.collectors.otlp_receiver import (
    DEFAULT_MAX_REQUEST_BYTES,
    Refusal,
    failed,
    overloaded,
    undecodable,
)
from perfledger.collectors.otlp_rows import Decoded, Signal, UndecodableRequest, decode
from perfledger.collectors.settling import SettleLimits, Settling
from perfledger.schema.clocks import monotonic_ns
from perfledger.schema.errors import PerfledgerError
from perfledger.schema.store import Store, written_ns

log = logging.getLogger("perfledger.collect")
_TICK_S = 0.1
_RETRY_WRITE_S = 1.0


@dataclass(frozen=True)
class CollectLimits:
    """What one collector takes and holds.

    Memory is about `buffer_bytes`, some times `request_bytes`, and what settling holds.
    """

    request_bytes: int = DEFAULT_MAX_REQUEST_BYTES
    value_bytes: int = DEFAULT_MAX_VALUE_BYTES
    buffer_bytes: int = 256 * 2**20
    flush_bytes: int = 32 * 2**20
    flush_after_s: float = 0.8
    settle: SettleLimits = field(default_factory=SettleLimits)


class Collector:
    """Takes OTLP requests (a `Sink`) and turns them into files of one store.

    All methods run on one event loop; decoding, writing and deriving run in threads.
    """

    def __init__(self, store: Store, limits: CollectLimits) -> None:
        self._store = store
        self._limits = limits
        self._buffer = RowBuffer(
            store.write, flush_bytes=limits.flush_bytes, flush_after_s=limits.flush_after_s
        )
        self._settling = Settling(limits.settle)
        # One thread: a second would only take turns with it.
        self._decoding = ThreadPoolExecutor(1, "decode")
        self._reserved_bytes = 0
        self._counts: Counter[str] = Counter()
        self._stopping = asyncio.Event()

    @property
    def most_read_at_once(self) -> int:
        """Return how many of the largest requests fill the buffer, and one more."""
        return self._limits.buffer_bytes // self._limits.request_bytes + 1

    def check_room(self) -> None:
        """Raise `overloaded()` while rows in memory and requests under way fill the buffer."""
        if self._buffer.bytes + self._reserved_bytes >= self._limits.buffer_bytes:
            raise overloaded()

    def reserve(self, size_bytes: int) -> None:
        """Count bytes of a request as held; one request may go over the buffer's limit."""
        held_bytes = self._buffer.bytes + self._reserved_bytes + size_bytes
        if held_bytes > self._limits.buffer_bytes + self._limits.request_bytes:
            raise overloaded()
        self._reserved_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        """Give reserved bytes back."""
        self._reserved_bytes -= size_bytes

    def refused(self, refusal: Refusal) -> None:
        """Count a request that was refused, by its HTTP status."""
        self._counts[f"requests_refused_{refusal.http_status}"] += 1

    async def export(self, signal: Signal, body: bytes) -> Decoded:
        """Decode a request and take its rows. Raises Refusal."""
        loop = asyncio.get_running_loop()
        received_ns = time.time_ns()
        decoded: Decoded | None = None
        with self._contained("decoding"):
            try:
                decoded = await loop.run_in_executor(
                    self._decoding, decode, signal, body, received_ns, self._limits.value_bytes
                )
            except UndecodableRequest as error:
                raise undecodable(error.what) from None
        if decoded is None:
            raise failed()
        self._take(decoded)
        return decoded

    def _take(self, decoded: Decoded) -> None:
        table, tally = decoded.signal.table, decoded.tally
        self._buffer.add(table, decoded.rows)
        if table == "spans" and decoded.rows.num_rows:
            self._settling.add(decoded.rows, monotonic_ns())
        self._counts[f"{table}_received"] += tally.items
        self._counts[f"{table}_rejected"] += decoded.rejected
        self._counts["values_cut"] += tally.cut
        self._counts["values_denied"] += tally.denied
        self._counts["duplicate_keys"] += tally.duplicate_keys
        self._counts["exemplars_dropped"] += tally.exemplars_dropped

    def counts(self) -> Counter[str]:
        """Return what happened so far, by name; `TABLE_written` and `TABLE_waiting` are rows."""
        written, waiting = self._buffer.written(), self._buffer.waiting()
        rows = {f"{table}_written": count for table, count in written.items()}
        rows |= {f"{table}_waiting": count for table, count in waiting.items()}
        return self._counts + self._settling.counts + Counter(rows)

    async def resume(self) -> None:
        """Go on where an earlier collector on this store ended."""
        with self._contained("resuming"):
            await asyncio.to_thread(_resume, self._settling, self._store)

    async def run(self) -> None:
        """Write and settle what is due, until `stop`; then write everything.

        Raises PerfledgerError where acknowledged rows could not be written in the end.
        """
        await asyncio.gather(self._write_when_due(), self._settle_when_due())
        self._decoding.shutdown()
        await self._write()
        await self._settle(everything=True)
        await self._write()
        if lost := self._buffer.waiting().total():
            raise PerfledgerError(
                f"{lost} rows could not be written and are lost",
                where=f"store {self._store.root}",
                fix="free space or repair the disk; what was written before is whole",
            )

    def stop(self) -> None:
        """Let `run` end. Call it when no request can come any more."""
        self._stopping.set()

    async def _write_when_due(self) -> None:
        while not await self._pause(_TICK_S):
            if self._buffer.is_due() and not await self._write():
                await self._pause(_RETRY_WRITE_S)

    async def _settle_when_due(self) -> None:
        while not await self._pause(min(1.0, self._limits.settle.settle_s / 2)):
            await self._settle()

    async def _pause(self, seconds: float) -> bool:
        """Wait and return False, or return True as soon as the collector is to stop."""
        try:
            await asyncio.wait_for(self._stopping.wait(), seconds)
        except TimeoutError:
            return False
        return True

    async def _write(self) -> bool:
        """Write what is in memory, each table for itself; return whether all went well."""
        return all([await self._write_table(table) for table in self._buffer.waiting()])

    async def _write_table(self, table: str) -> bool:
        done = False
        with self._contained("writing"):
            try:
                await asyncio.to_thread(self._buffer.flush, table)
                done = True
            except OSError as error:
                self._counts["write_failures"] += 1
                log.error("cannot write to the store, rows wait in memory: %s", error.strerror)
        return done

    async def _settle(self, everything: bool = False) -> None:
        with self._contained("deriving"):
            now_ns, wall_ns = monotonic_ns(), time.time_ns()
            settled = await asyncio.to_thread(
                self._settling.settle, now_ns, wall_ns, everything=everything
            )
            self._buffer.add("steps", settled.steps)
            self._buffer.add("requests", settled.requests)
            for defect in settled.defects:
                with self._contained("deriving"):
                    raise defect

    @contextmanager
    def _contained(self, what: str) -> Iterator[None]:
        """Keep a defect of ours from ending the collector: count it, and log where it was.

        Never what it said: the message of an error may quote a value.
        """
        try:
            yield
        except (PerfledgerError, Refusal):
            raise
        except Exception as error:
            self._counts["defects"] += 1
            lines = "".join(traceback.format_tb(error.__traceback__))
            log.error("%s failed: %s\n%s", what, type(error).__name__, lines)


def _resume(settling: Settling, store: Store) -> None:
    """Hand the newest spans of a store, with their steps and requests, to settling."""
    since_ns = _recent_since_ns(store.files("spans"), settling.limits)
    spans, steps, requests = (
        store.scan(name, since_ns).collect() for name in ("spans", "steps", "requests")
    )
    settling.resume(spans, steps, requests, since_ns=since_ns, now_ns=monotonic_ns())


def _recent_since_ns(files: list[Path], limits: SettleLimits) -> int:
    """Return when the oldest file was written that settling would still hold; 0 means all."""
    rows, since_ns = 0, time.time_ns()
    for path in reversed(files):
        rows += pq.read_metadata(path).num_rows
        age_ns = written_ns(files[-1]) - written_ns(path)
        if age_ns > limits.hold_s * 1e9 or rows > limits.max_spans:
            return since_ns
        since_ns = written_ns(path)
    return 0
