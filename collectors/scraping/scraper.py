"""Runs all scraping: finds targets, asks each at its pace, hands every answer to the sink.

A target that is slow, down or hostile costs its own scrapes only. An answer that the sink refuses
is lost and counted: the next one tells the same counters again.
"""

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

from perfledger.collectors.scraping.config import ScrapeConfig
from perfledger.collectors.scraping.delivery import Delivery
from perfledger.collectors.scraping.discovery import Discovery
from perfledger.collectors.scraping.fetching import open_session
from perfledger.collectors.scraping.job import Job, Shared, end
from perfledger.collectors.transport.otlp_receiver import Sink

_MOST_ASKED_AT_ONCE = 256
_TARGETS_OF = "scrape_targets_of_"


class Scraper:
    """Scrapes the targets of all jobs into one sink."""

    def __init__(
        self,
        configs: Iterable[ScrapeConfig],
        *,
        refresh_s: float = 5.0,
        clock_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        self._jobs = [(config, Discovery(config)) for config in configs]
        self._refresh_s = refresh_s
        self._clock_ns = clock_ns
        self._counts: Counter[str] = Counter()

    def counts(self) -> Counter[str]:
        """Return what happened so far: `scrapes`, of which failed, refused and skipped, …

        `scrape_targets` and `scrape_targets_refused` are those of now.
        """
        counts = Counter({k: v for k, v in self._counts.items() if not k.startswith(_TARGETS_OF)})
        counts["scrape_targets"] = self._counts.total() - counts.total()
        for _, discovery in self._jobs:
            counts["scrape_targets_refused"] += discovery.refused
            counts["scrape_discovery_failures"] += discovery.failures
        return counts

    async def run(self, sink: Sink, stop: asyncio.Event) -> None:
        """Scrape until `stop` is set; what was handed to the sink by then is waited for.

        Raises UsageError where a job's `ca_file` cannot be used.
        """
        delivery = Delivery(sink, self._counts)
        async with AsyncExitStack() as stack:
            # One thread: pages are parsed beside the event loop, and never two at a time.
            converting = ThreadPoolExecutor(1, "scrape")
            stack.callback(converting.shutdown, wait=True, cancel_futures=True)
            asking = asyncio.Semaphore(_MOST_ASKED_AT_ONCE)
            shared = Shared(delivery, self._counts, self._clock_ns, asking, converting)
            jobs = [
                Job(
                    config, discovery, await stack.enter_async_context(open_session(config)), shared
                )
                for config, discovery in self._jobs
            ]
            watching = [asyncio.create_task(job.watch(self._refresh_s)) for job in jobs]
            try:
                await stop.wait()
            finally:
                await end(watching)
                await delivery.drain()
