"""Hands requests to the sink, and keeps what goes wrong with one scrape from ending the others."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

from perfledger.collectors.defects import tell_defect
from perfledger.collectors.otlp_rows import SIGNALS
from perfledger.collectors.transport.otlp_receiver import Refusal, Sink, reservation

log = logging.getLogger("perfledger.scrape")
_METRICS = next(signal for signal in SIGNALS if signal.name == "metrics")


class Delivery:
    """The way to one sink; `counts` gets `scrapes_refused` and `scrape_defects`."""

    def __init__(self, sink: Sink, counts: Counter[str]) -> None:
        self._sink = sink
        self._counts = counts
        self._exports: set[asyncio.Task[None]] = set()

    def reserved(self) -> AbstractContextManager[Callable[[int], None]]:
        """Yield a function that counts bytes as held by the sink. Raises Refusal."""
        return reservation(self._sink)

    async def send(self, request: bytes) -> None:
        """Export a request. Where this is cancelled the export goes on; `drain` waits for it."""
        export = asyncio.create_task(self._export(request))
        self._exports.add(export)
        export.add_done_callback(self._exports.discard)
        await asyncio.shield(export)

    async def drain(self) -> None:
        """Wait for the exports under way."""
        await asyncio.gather(*self._exports)

    @contextmanager
    def contained(self) -> Iterator[None]:
        """Count a refusal, which loses one scrape; count a defect of ours and log where it was.

        Never what it said: the message of an error may quote a value.
        """
        try:
            yield
        except Refusal as refusal:
            self._sink.refused(refusal)
            self._counts["scrapes_refused"] += 1
        except Exception as error:
            self._counts["scrape_defects"] += 1
            tell_defect("scraping", error)

    async def _export(self, request: bytes) -> None:
        with self.contained():
            await self._sink.export(_METRICS, request)
