"""A collector's servers in a thread of the test, for limits that have no flag."""

import asyncio
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import uvloop

from perfledger.collectors.collecting import CollectLimits, Collector
from perfledger.collectors.serving import Endpoints, Transport, serve
from perfledger.collectors.transport.access import Access, Token
from perfledger.collectors.transport.address import Address
from perfledger.schema.store import Store

FREE = Address("127.0.0.1", 0)


@contextmanager
def serving(
    folder: Path,
    limits: CollectLimits | None = None,
    tokens: Sequence[Token] = (),
    **transport: object,
) -> Iterator[Endpoints]:
    """Serve as `perfledger collect` does; yield where. Without tokens all is for `default`."""
    limits = limits or CollectLimits()
    bound: list[Endpoints] = []
    handle: list[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = []
    ready = threading.Event()

    async def main() -> None:
        stop = asyncio.Event()
        handle.append((asyncio.get_running_loop(), stop))

        def started(endpoints: Endpoints) -> None:
            bound.append(endpoints)
            ready.set()

        namespaces = {token.namespace for token in tokens} or {"default"}
        collectors = {name: Collector(Store.at(str(folder), name), limits) for name in namespaces}
        access = Access(collectors, tokens, "default")
        options = Transport(request_bytes=limits.request_bytes, **transport)
        await serve(collectors, access, Endpoints(FREE, FREE, FREE), options, stop, started)

    with ThreadPoolExecutor(1) as pool:
        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        running = pool.submit(runner.run, main())
        assert ready.wait(30)
        try:
            yield bound[0]
        finally:
            loop, stop = handle[0]
            loop.call_soon_threadsafe(stop.set)
            running.result(60)
            pool.submit(runner.close).result(60)
