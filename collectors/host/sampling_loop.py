"""The loop that all samplers here run in: at a declared period, off the event loop.

A sample that comes late is taken late, with its real time, and counted; one that is missed whole
is not made up for. While the collector is busy with a request of a sampler, its next one is
skipped and counted: counters are cumulative, so what it would have said is in the one after.
"""

import asyncio
import logging
import random
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol, runtime_checkable

from perfledger.collectors.defects import tell_defect
from perfledger.collectors.otlp_rows import LOGS, METRICS, Signal
from perfledger.collectors.transport.otlp_receiver import Refusal, Sink, reservation
from perfledger.schema.clocks import monotonic_ns

# Telemetry must not slow what it watches: a process of hundreds of busy threads is sampled less.
MOST_CPU_SHARE = 0.05

logger = logging.getLogger("perfledger.samplers")


class Sampler(Protocol):
    """Takes samples, and counts what goes wrong. Its methods run in one thread of its own."""

    name: str
    period_s: float
    # Share of the period by which a sample may be moved at random, so that it does not march in
    # step with what it watches.
    jitter: float
    counts: Counter[str]

    def sample(self) -> bytes | None:
        """Take a sample; return an OTLP metrics request, or None where it is not time for one."""
        ...

    def close(self) -> bytes | None:
        """Return what is still to be said, and close files."""
        ...

    def ended(self) -> bool:
        """Return whether there will be nothing more to sample."""
        ...


@runtime_checkable
class TellsEvents(Protocol):
    """A sampler that also tells of things that happen once, as a device that is lost."""

    def events(self) -> bytes | None:
        """Return an OTLP logs request of what happened since, or None. Called between samples."""
        ...


async def run_sampler(sampler: Sampler, sink: Sink, stop: asyncio.Event) -> None:
    """Sample until `stop` is set, or until there is nothing more to sample."""
    loop = asyncio.get_running_loop()
    delivery: asyncio.Task[None] | None = None
    pace = Pace(round(sampler.period_s * 1e9), sampler.jitter, sampler.counts)
    with ThreadPoolExecutor(1, f"perfledger {sampler.name}") as thread:
        while not stop.is_set() and not sampler.ended():
            body, cost_ns = await loop.run_in_executor(thread, _guarded, sampler, sampler.sample)
            if body is not None and delivery is not None and not delivery.done():
                sampler.counts["requests_skipped"] += 1
            elif body is not None:
                if delivery is not None:
                    await delivery  # it is done; what it raised ends this
                delivery = asyncio.create_task(_deliver(sampler, sink, METRICS, body))
            if isinstance(sampler, TellsEvents) and (events := sampler.events()) is not None:
                await _deliver(sampler, sink, LOGS, events)
            with suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), pace.wait_s(monotonic_ns(), cost_ns))
        last, _ = await loop.run_in_executor(thread, _guarded, sampler, sampler.close)
    if delivery is not None:
        await delivery
    if last is not None:
        await _deliver(sampler, sink, METRICS, last)


class Pace:
    """When samples are due.

    Counts samples that are `late` (by over half a period), `missed` (by over a whole one), and
    `skipped`, so that sampling takes no more of a CPU than MOST_CPU_SHARE.
    """

    def __init__(self, period_ns: int, jitter: float, counts: Counter[str]) -> None:
        self._period_ns, self._jitter, self._counts = period_ns, jitter, counts
        self._due_ns: int | None = None
        self._random = random.Random()

    def wait_s(self, now_ns: int, cost_ns: int = 0) -> float:
        """Return how long to wait for the next sample, right after one that took `cost_ns` CPU."""
        grid_ns = now_ns if self._due_ns is None else self._due_ns
        behind_ns = now_ns - grid_ns
        missed = max(0, behind_ns // self._period_ns)
        self._counts["missed"] += missed
        self._counts["late"] += behind_ns > self._period_ns // 2
        skipped = int(cost_ns / MOST_CPU_SHARE) // self._period_ns
        self._counts["skipped"] += skipped
        self._due_ns = grid_ns + (missed + skipped + 1) * self._period_ns
        shift_ns = self._jitter * (self._random.random() - 0.5) * self._period_ns
        return max(0.0, (self._due_ns + shift_ns - now_ns) / 1e9)


def _guarded(sampler: Sampler, take: Callable[[], bytes | None]) -> tuple[bytes | None, int]:
    """Take a sample, and return its cost in CPU ns; a defect of ours is counted and logged."""
    started_ns = time.thread_time_ns()
    try:
        body = take()
    except Exception as error:
        if not sampler.counts["defects"]:
            tell_defect(f"a sample of {sampler.name}, and further ones are only counted,", error)
        sampler.counts["defects"] += 1
        body = None
    else:
        sampler.counts["samples"] += 1
    return body, time.thread_time_ns() - started_ns


async def _deliver(sampler: Sampler, sink: Sink, signal: Signal, body: bytes) -> None:
    try:
        with reservation(sink) as reserve:
            reserve(len(body))
            await sink.export(signal, body)
    except Refusal as refusal:
        sampler.counts["requests_refused"] += 1
        if sampler.counts["requests_refused"] == 1:
            logger.warning("%s: the collector refused a request: %s", sampler.name, refusal)
        return
    sampler.counts["requests"] += 1
