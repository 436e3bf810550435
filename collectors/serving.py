"""Runs collectors with their servers in one event loop, from bind to the last file."""

import asyncio
import socket
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from perfledger.collectors.collecting import Collector
from perfledger.collectors.companions import Companions
from perfledger.collectors.transport.access import Access
from perfledger.collectors.transport.address import Address, is_loopback
from perfledger.collectors.transport.collector_metrics import metrics_app
from perfledger.collectors.transport.cors import Cors
from perfledger.collectors.transport.http_server import ConnectionLimits, WebServer, listen
from perfledger.collectors.transport.otlp_grpc import grpc_server
from perfledger.collectors.transport.otlp_http import http_app
from perfledger.collectors.transport.otlp_receiver import DEFAULT_MAX_REQUEST_BYTES, READ_TIMEOUT_S
from perfledger.collectors.transport.tls import TlsFiles

# How long requests under way may take to end after the signal to stop.
_GRACE_S = 3


@dataclass(frozen=True)
class Endpoints:
    """Where a collector listens; `metrics` is its own, and may be none."""

    grpc: Address
    http: Address
    metrics: Address | None = None


@dataclass(frozen=True)
class Transport:
    """How both servers take requests."""

    request_bytes: int = DEFAULT_MAX_REQUEST_BYTES
    read_timeout_s: float = READ_TIMEOUT_S
    connections: int = ConnectionLimits.connections
    head_timeout_s: float = ConnectionLimits.head_s
    tls: TlsFiles | None = None
    cors: Cors = field(default_factory=Cors)


async def serve(
    collectors: Mapping[str, Collector],
    access: Access,
    endpoints: Endpoints,
    transport: Transport,
    stop: asyncio.Event,
    started: Callable[[Endpoints], None],
    companions: Companions | None = None,
) -> None:
    """Serve until `stop` is set, then finish requests under way and write everything.

    There is a collector for each namespace, and `access` knows whose requests are whose; what the
    companions collect goes to the first. `started` is told the addresses bound. Raises UsageError
    where one cannot be bound, and PerfledgerError where acknowledged rows could not be written in
    the end.
    """
    http_socket, metrics_socket = _listen(endpoints)
    server, grpc_port = grpc_server(
        access,
        endpoints.grpc,
        transport.request_bytes,
        most_read_at_once=sum(one.most_read_at_once for one in collectors.values()),
        read_timeout_s=transport.read_timeout_s,
        tls=transport.tls,
    )
    companions = companions or Companions()
    webs = _web_servers(collectors, access, companions, transport, http_socket, metrics_socket)
    await asyncio.gather(*(one.resume() for one in collectors.values()))
    await server.start()
    serving = [asyncio.create_task(web.serve([sock])) for web, sock in webs]
    running = [asyncio.create_task(one.run()) for one in collectors.values()]
    started(_bound(endpoints, grpc_port, http_socket, metrics_socket))
    received = asyncio.Event()
    forwarding = asyncio.create_task(companions.forward(received))
    collecting = asyncio.create_task(companions.collect(next(iter(collectors.values())), stop))
    stopping = asyncio.create_task(_ended(stop, collecting))
    await asyncio.wait([stopping, *serving, *running], return_when=asyncio.FIRST_COMPLETED)
    stop.set()
    for web, _ in webs:
        web.should_exit = True
    ends = await asyncio.gather(
        stopping, server.stop(_GRACE_S), *serving, collecting, return_exceptions=True
    )
    # Whatever went wrong, each writes what it has.
    for one in collectors.values():
        one.stop()
    ends += await asyncio.gather(*running, return_exceptions=True)
    received.set()
    ends += await asyncio.gather(forwarding, return_exceptions=True)
    _raise_first(ends)


async def _ended(stop: asyncio.Event, collecting: "asyncio.Task[None]") -> None:
    """Return once `stop` is set; raise where the companions cannot do what they were asked."""
    waiting = asyncio.create_task(stop.wait())
    done, _ = await asyncio.wait([waiting, collecting], return_when=asyncio.FIRST_COMPLETED)
    if collecting in done:
        collecting.result()
    await waiting


def _raise_first(ends: Iterable[object]) -> None:
    for end in ends:
        if isinstance(end, BaseException):
            raise end


def _listen(endpoints: Endpoints) -> tuple[socket.socket, socket.socket | None]:
    http_socket = listen(endpoints.http, "--otlp-http")
    if endpoints.metrics is None:
        return http_socket, None
    return http_socket, listen(endpoints.metrics, "--metrics")


def _web_servers(
    collectors: Mapping[str, Collector],
    access: Access,
    companions: Companions,
    transport: Transport,
    http_socket: socket.socket,
    metrics_socket: socket.socket | None,
) -> list[tuple[WebServer, socket.socket]]:
    tls = transport.tls.http_context() if transport.tls else None
    limits = ConnectionLimits(
        connections=transport.connections,
        body_bytes=transport.request_bytes,
        head_s=transport.head_timeout_s,
        body_s=2 * transport.read_timeout_s,
    )
    otlp = http_app(access, transport.request_bytes, transport.read_timeout_s, transport.cors)
    servers = [(WebServer(otlp, limits, tls, _GRACE_S), http_socket)]
    if metrics_socket is not None:
        app = metrics_app(collectors, _Others(access, companions))
        few = ConnectionLimits(connections=100)
        # On loopback it is for this host's scrapers and health checks, which have no certificates.
        tls = None if is_loopback(metrics_socket.getsockname()[0]) else tls
        servers.append((WebServer(app, few, tls, _GRACE_S), metrics_socket))
    return servers


@dataclass(frozen=True)
class _Others:
    """What belongs to no namespace: requests turned away, and what the companions did."""

    access: Access
    companions: Companions

    def counts(self) -> Counter[str]:
        return self.access.counts() + self.companions.counts()


def _bound(
    endpoints: Endpoints,
    grpc_port: int,
    http_socket: socket.socket,
    metrics_socket: socket.socket | None,
) -> Endpoints:
    metrics = endpoints.metrics
    if metrics is not None and metrics_socket is not None:
        metrics = replace(metrics, port=_port(metrics_socket))
    return Endpoints(
        replace(endpoints.grpc, port=grpc_port),
        replace(endpoints.http, port=_port(http_socket)),
        metrics,
    )


def _port(listening: socket.socket) -> int:
    return int(listening.getsockname()[1])
