"""Forwarding: what this collector took goes to another OTLP endpoint too (a tee).

It never holds anything up: a request that finds the queue full is dropped and counted. A peer that
is dead, slow or hostile costs nothing but this queue. What the peer may take later is sent again,
later each time and not before the peer wants it; what it refuses is not, nor what it took in part.
Requests, not spans, are counted, as their bytes are not looked at:
offered = forwarded + dropped + waiting. A restart loses what waits: durability is the store's, and
a peer that must have everything is better sent to by the services themselves.
"""

import asyncio
import logging
import random
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from perfledger.collectors.forward.forward_loop import hops_header
from perfledger.collectors.forward.forward_peer import Answer, Fate, Peer, peer_of
from perfledger.collectors.forward.forward_queue import Batch, ForwardQueue, Request
from perfledger.collectors.forward.forward_target import ForwardTarget
from perfledger.collectors.otlp_rows import Signal
from perfledger.schema.clocks import monotonic_ns

COUNTS = (
    "forward_offered",
    "forwarded",
    "forward_dropped_full",
    "forward_dropped_old",
    "forward_dropped_refused",
    "forward_dropped_stopped",
    "forward_retries",
    "forward_rejected",
    "forward_answers_unreadable",
    "forward_defects",
)
log = logging.getLogger("perfledger.forward")
_LOG_EVERY_NS = 10 * 10**9


class Forwarder:
    """Sends what it is offered to one target. `instance_id` names this collector process."""

    def __init__(self, target: ForwardTarget, instance_id: str) -> None:
        self._target = target
        self._instance_id = instance_id
        self._queue = ForwardQueue(target.queue_bytes, target.batch_bytes)
        self._counts = Counter(dict.fromkeys(COUNTS, 0))
        self._counting = threading.Lock()  # held where a request changes its place and its count
        self._loop: asyncio.AbstractEventLoop | None = None
        self._arrived = asyncio.Event()
        self._stopping = asyncio.Event()
        self._drained_by_ns = 0
        self._hold_until_ns = 0
        self._said, self._said_ns = "", 0

    def offer(self, signal: Signal, body: bytes, hops: tuple[str, ...] = ()) -> None:
        """Forward a request if there is room; from any thread, and without waiting.

        `body` is its protobuf, content removed already; `hops` is what `hops_of` returned for it.
        """
        if signal.name not in self._target.signals or not body:
            return
        with self._counting:
            self._counts["forward_offered"] += 1
            if why_not := self._queue.put(Request(signal, body, hops, monotonic_ns())):
                self._counts[f"forward_dropped_{why_not}"] += 1
                return
        if (loop := self._loop) is not None:
            # A loop that was closed just now has nobody to wake.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(self._arrived.set)

    def counts(self) -> Counter[str]:
        """Return COUNTS and what waits now, in requests and in bytes.

        All count requests, but `forward_rejected`: spans, points and log records of requests that
        the peer took in part.
        """
        with self._counting:
            waiting = {
                "forward_waiting": self._queue.waiting(),
                "forward_queue_bytes": self._queue.size_bytes,
            }
            return Counter({**self._counts, **waiting})

    def oldest_s(self) -> float:
        """Return the age of the oldest request not yet forwarded; 0 where there is none."""
        oldest_ns = self._queue.oldest_ns()
        return 0.0 if oldest_ns is None else (monotonic_ns() - oldest_ns) / 1e9

    async def run(self, stop: asyncio.Event) -> None:
        """Send until `stop`, then for `drain_s` at most; what is left is dropped and counted."""
        self._loop = asyncio.get_running_loop()
        threads = ThreadPoolExecutor(self._target.concurrency, "forward")
        peer = peer_of(self._target, threads)
        workers = [asyncio.create_task(self._work(peer)) for _ in range(self._target.concurrency)]
        try:
            await stop.wait()
            self._drained_by_ns = monotonic_ns() + round(self._target.drain_s * 1e9)
            self._stopping.set()
            self._arrived.set()
            await asyncio.wait(workers, timeout=self._target.drain_s)
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
            self._loop = None
            with self._counting:
                self._counts["forward_dropped_stopped"] += self._queue.close()
            await peer.close()
            threads.shutdown(wait=False, cancel_futures=True)

    async def _work(self, peer: Peer) -> None:
        while True:
            while (batch := self._queue.take()) is not None:
                await self._deliver(peer, batch)
            if self._stopping.is_set():
                return
            self._arrived.clear()
            await self._arrived.wait()

    async def _deliver(self, peer: Peer, batch: Batch) -> None:
        """Send a batch until it is taken, refused or too old, or the collector stops."""
        tries, earliest_ns, max_age_ns = 0, 0, round(self._target.max_age_s * 1e9)
        while (batch := self._without_old(batch)).requests:
            due_ns = max(earliest_ns, self._hold_until_ns)
            if due_ns > monotonic_ns():
                if not await self._wait(min(due_ns, batch.requests[0].offered_ns + max_age_ns)):
                    self._done(batch, "forward_dropped_stopped")
                    return
                continue
            if tries:
                self._count("forward_retries")
            answer = await self._attempt(peer, batch)
            if answer.fate is not Fate.FAILED:
                self._finish(batch, answer)
                return
            earliest_ns = self._back_off(answer, tries)
            tries += 1

    def _without_old(self, batch: Batch) -> Batch:
        oldest_ns = monotonic_ns() - round(self._target.max_age_s * 1e9)
        with self._counting:
            young = self._queue.without_older(batch, oldest_ns)
            self._counts["forward_dropped_old"] += len(batch.requests) - len(young.requests)
        return young

    async def _attempt(self, peer: Peer, batch: Batch) -> Answer:
        first = batch.requests[0]
        hops = hops_header(first.hops, self._instance_id)
        try:
            answer = await peer.send(first.signal, batch.body, hops)
        except Exception as error:  # the boundary: forwarding never ends the collector
            self._count("forward_defects")
            answer = Answer(Fate.REFUSED, type(error).__name__)
        self._say("" if answer.fate is Fate.TAKEN else answer.why)
        return answer

    def _finish(self, batch: Batch, answer: Answer) -> None:
        if answer.fate is Fate.TAKEN:
            self._done(batch, "forwarded")
            self._count("forward_rejected", answer.rejected)
            self._count("forward_answers_unreadable", int(bool(answer.why)))
        elif len(batch.requests) > 1:
            self._queue.split(batch)
            self._arrived.set()
        else:
            self._done(batch, "forward_dropped_refused")

    def _done(self, batch: Batch, name: str) -> None:
        with self._counting:
            self._queue.done(batch)
            self._counts[name] += len(batch.requests)

    def _back_off(self, answer: Answer, tries: int) -> int:
        """Return when to try again: exponential with jitter, and no one before the peer's wish.

        A wish holds for all requests, and counts up to the greatest age.
        """
        target, now_ns = self._target, monotonic_ns()
        if answer.retry_after_s:
            wish_s = min(answer.retry_after_s, target.max_age_s)
            self._hold_until_ns = max(self._hold_until_ns, now_ns + round(wish_s * 1e9))
        longest_s = min(target.last_retry_s, target.first_retry_s * 2.0 ** min(tries, 30))
        return now_ns + round(longest_s * random.uniform(0.5, 1.0) * 1e9)

    async def _wait(self, until_ns: int) -> bool:
        """Return True at that time, or False as soon as the collector is to end before it."""
        while (left_ns := until_ns - monotonic_ns()) > 0:
            if not self._stopping.is_set():
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._stopping.wait(), left_ns / 1e9)
            elif until_ns > self._drained_by_ns:
                return False
            else:
                await asyncio.sleep(left_ns / 1e9)
        return True

    def _say(self, trouble: str) -> None:
        """Log when forwarding begins to fail or works again, but not at each request."""
        now_ns = monotonic_ns()
        if trouble == self._said or (self._said_ns and now_ns - self._said_ns < _LOG_EVERY_NS):
            return
        self._said, self._said_ns = trouble, now_ns
        if trouble:
            log.warning("forwarding to %s fails: %s", self._target.endpoint, trouble)
        else:
            log.info("forwarding to %s works again", self._target.endpoint)

    def _count(self, name: str, count: int = 1) -> None:
        with self._counting:
            self._counts[name] += count
