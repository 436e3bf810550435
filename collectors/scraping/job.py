"""One job: follows its targets as they come and go, and scrapes each at the job's pace."""

import asyncio
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Executor
from dataclasses import dataclass

import aiohttp

from perfledger.collectors.scraping.config import ScrapeConfig
from perfledger.collectors.scraping.delivery import Delivery
from perfledger.collectors.scraping.discovery import Discovery
from perfledger.collectors.scraping.exposition import UnusableScrape
from perfledger.collectors.scraping.fetching import fetch
from perfledger.collectors.scraping.target_telemetry import TargetTelemetry
from perfledger.collectors.scraping.targets import Target


@dataclass(frozen=True)
class Shared:
    """What all jobs share: the way out, the counts, the clock (wall, ns) and the bounds."""

    delivery: Delivery
    counts: Counter[str]
    clock_ns: Callable[[], int]
    asking: asyncio.Semaphore
    converting: Executor


class Job:
    """The targets of one [[scrape]] table, each with a task of its own."""

    def __init__(
        self,
        config: ScrapeConfig,
        discovery: Discovery,
        session: aiohttp.ClientSession,
        shared: Shared,
    ) -> None:
        self._config = config
        self._discovery = discovery
        self._session = session
        self._shared = shared
        self._tasks: dict[Target, tuple[TargetTelemetry, asyncio.Task[None]]] = {}

    async def watch(self, refresh_s: float) -> None:
        """Follow the targets until cancelled, looking for changes every `refresh_s`."""
        try:
            while True:
                with self._shared.delivery.contained():
                    await self._follow(await asyncio.to_thread(self._discovery.targets))
                await asyncio.sleep(refresh_s)
        finally:
            await end(task for _, task in self._tasks.values())
            self._tasks.clear()
            self._note_targets()

    async def _follow(self, targets: list[Target]) -> None:
        gone = [target for target in self._tasks if target not in set(targets)]
        ended = [self._tasks.pop(target) for target in gone]
        await end(task for _, task in ended)
        for target in targets:
            if target not in self._tasks:
                told = TargetTelemetry(target, self._config.limits, self._shared.clock_ns())
                task = asyncio.create_task(self._keep_scraping(target, told))
                self._tasks[target] = (told, task)
        self._note_targets()
        for told, _ in ended:
            await self._say_gone(told)

    def _note_targets(self) -> None:
        self._shared.counts[f"scrape_targets_of_{self._config.job}"] = len(self._tasks)

    async def _keep_scraping(self, target: Target, told: TargetTelemetry) -> None:
        """Scrape at fixed moments; those that pass during a slow scrape are skipped."""
        loop, interval_s = asyncio.get_running_loop(), self._config.interval_s
        due_s = loop.time() + share(target) * interval_s
        while True:
            await asyncio.sleep(due_s - loop.time())
            with self._shared.delivery.contained():
                await self._scrape(target, told)
            missed = max(0, int((loop.time() - due_s) / interval_s))
            self._shared.counts["scrapes_skipped"] += missed
            due_s += (missed + 1) * interval_s

    async def _scrape(self, target: Target, told: TargetTelemetry) -> None:
        """Ask once and send what was told, or that the target is down. Raises Refusal."""
        shared = self._shared
        shared.counts["scrapes"] += 1
        before = told.counts()
        with shared.delivery.reserved() as take:
            async with shared.asking:
                request = await self._answer(target, told, take)
            shared.counts.update(told.counts() - before)
            take(len(request))
            await shared.delivery.send(request)

    async def _answer(
        self, target: Target, told: TargetTelemetry, take: Callable[[int], None]
    ) -> bytes:
        """Return the request for one scrape, stamped with the time at which it began."""
        time_ns, began_s = self._shared.clock_ns(), time.monotonic()
        try:
            page = await fetch(self._session, target.url, self._config, take)
        except UnusableScrape as failure:
            return told.failed(failure.reason, time_ns, time.monotonic() - began_s)
        duration_s = time.monotonic() - began_s
        return await asyncio.get_running_loop().run_in_executor(
            self._shared.converting,
            told.scraped,
            page.body,
            page.openmetrics,
            time_ns,
            duration_s,
        )

    async def _say_gone(self, told: TargetTelemetry) -> None:
        delivery = self._shared.delivery
        with delivery.contained(), delivery.reserved() as take:
            request = told.gone(self._shared.clock_ns())
            take(len(request))
            await delivery.send(request)


def share(target: Target) -> float:
    """Return from 0 to 1 when in an interval a target is asked: spread out, always the same."""
    return zlib.crc32(f"{target.job} {target.url}".encode()) / 2**32


async def end(tasks: Iterable[asyncio.Task[None]]) -> None:
    """Cancel tasks and wait until they have ended."""
    cancelled = list(tasks)
    for task in cancelled:
        task.cancel()
    await asyncio.gather(*cancelled, return_exceptions=True)
