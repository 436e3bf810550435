"""Runs a collector with its two OTLP servers in one event loop, from bind to the last file."""

import asyncio
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn

from perfledger.collectors.address import Address
from perfledger.collectors.collecting import Collector
from perfledger.collectors.otlp_grpc import grpc_server
from perfledger.collectors.otlp_http import http_app
from perfledger.collectors.otlp_receiver import READ_TIMEOUT_S, cannot_listen

# How long requests under way may take to end after the signal to stop.
_GRACE_S = 3


async def serve(
    collector: Collector,
    grpc_address: Address,
    http_address: Address,
    request_bytes: int,
    stop: asyncio.Event,
    started: Callable[[Address, Address], None],
    *,
    read_timeout_s: float = READ_TIMEOUT_S,
) -> None:
    """Serve until `stop` is set, then finish requests under way and write everything.

    `started` is told the addresses bound. Raises UsageError where one cannot be bound, and
    PerfledgerError where acknowledged rows could not be written in the end.
    """
    listening = _listen(http_address)
    server, grpc_port = grpc_server(
        collector,
        grpc_address,
        request_bytes,
        most_read_at_once=collector.most_read_at_once,
        read_timeout_s=read_timeout_s,
    )
    web = _WebServer(
        uvicorn.Config(
            http_app(collector, request_bytes, read_timeout_s),
            http="h11",
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="warning",
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
    )
    await collector.resume()
    await server.start()
    serving = asyncio.create_task(web.serve([listening]))
    running = asyncio.create_task(collector.run())
    started(Address(grpc_address.host, grpc_port), Address(http_address.host, _port(listening)))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([stopping, serving, running], return_when=asyncio.FIRST_COMPLETED)
    web.should_exit = True
    await asyncio.gather(server.stop(_GRACE_S), serving)
    collector.stop()
    await running


class _WebServer(uvicorn.Server):
    """Leaves signals to whoever runs the loop."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(address: Address) -> socket.socket:
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    try:
        return socket.create_server((address.host, address.port), family=family)
    except OSError as error:
        raise cannot_listen(str(address), "--otlp-http") from error


def _port(listening: socket.socket) -> int:
    return int(listening.getsockname()[1])
