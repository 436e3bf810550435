"""One attempt to send a request to another OTLP endpoint, and what its answer means.

What may be sent again is what OTLP 1.11 says: HTTP 429, 502, 503, 504; of gRPC the codes below, and
RESOURCE_EXHAUSTED where RetryInfo comes with it; and whatever broke before there was an answer.
The peer is not trusted: no redirect is followed, no more is read than an answer may need, nothing
it says is logged, and everything ends at the target's timeout. What blocks (looking up a name,
compressing, gRPC's calls, which compress on the caller's thread) runs in the forwarder's threads.
"""

import asyncio
import io
import socket
import ssl
import zlib
from collections.abc import Iterable
from concurrent.futures import Executor
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Protocol

import aiohttp
import grpc
from aiohttp.abc import AbstractResolver, ResolveResult
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import RetryInfo
from google.rpc.status_pb2 import Status

from perfledger.collectors.forward.forward_target import HTTP, ForwardTarget
from perfledger.collectors.otlp_rows import Signal

_RETRYABLE_HTTP = frozenset({429, 502, 503, 504})
_RETRYABLE_GRPC = frozenset(
    {
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.OUT_OF_RANGE,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DATA_LOSS,
    }
)
# OTLP 1.11 asks a client to bear no more; it only needs the counts of a partial success.
_MOST_ANSWER_BYTES = 4 * 2**20
_GZIP = zlib.MAX_WBITS | 16


class Fate(Enum):
    """What became of one attempt."""

    TAKEN = "taken"
    REFUSED = "refused"
    FAILED = "failed"  # it may be sent again


@dataclass(frozen=True)
class Answer:
    """The fate of an attempt, and why, in words of ours."""

    fate: Fate
    why: str = ""
    rejected: int = 0
    retry_after_s: float | None = None


class Peer(Protocol):
    """Sends requests to one endpoint."""

    async def send(self, signal: Signal, body: bytes, hops: tuple[str, str]) -> Answer:
        """Make one attempt; `hops` is the header that keeps forwarding out of circles."""

    async def close(self) -> None:
        """End every connection and every attempt under way."""


def peer_of(target: ForwardTarget, threads: Executor) -> Peer:
    """Return the peer of a target; it connects when it sends. Call it on the event loop."""
    return _HttpPeer(target, threads) if target.protocol == HTTP else _GrpcPeer(target, threads)


class _HttpPeer:
    def __init__(self, target: ForwardTarget, threads: Executor) -> None:
        self._target = target
        self._threads = threads
        cadata = None if target.ca is None else target.ca.decode("ascii")
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(
                limit=target.concurrency,
                resolver=_Resolver(threads),
                ssl=ssl.create_default_context(cadata=cadata) if target.is_secure else True,
            ),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=target.timeout_s),
            auto_decompress=False,
            headers={"User-Agent": "perfledger", "Accept-Encoding": "identity"},
        )

    async def send(self, signal: Signal, body: bytes, hops: tuple[str, str]) -> Answer:
        headers = [*self._target.headers, hops, ("Content-Type", "application/x-protobuf")]
        if self._target.compression == "gzip":
            loop = asyncio.get_running_loop()
            body = await loop.run_in_executor(self._threads, _gzipped, body)
            headers.append(("Content-Encoding", "gzip"))
        url = f"{self._target.endpoint}{signal.path}"
        try:
            async with self._session.post(
                url, data=io.BytesIO(body), headers=headers, allow_redirects=False
            ) as response:
                return await _http_answer(signal, response)
        except TimeoutError:
            return Answer(Fate.FAILED, "no answer in time")
        except (aiohttp.ClientError, OSError) as error:
            return Answer(Fate.FAILED, type(error).__name__)

    async def close(self) -> None:
        await self._session.close()


async def _http_answer(signal: Signal, response: aiohttp.ClientResponse) -> Answer:
    status = response.status
    if 200 <= status < 300:
        return _taken(signal, await _content(response))
    if status in _RETRYABLE_HTTP:
        after_s = _retry_after_s(response.headers.get("Retry-After", ""))
        return Answer(Fate.FAILED, f"HTTP {status}", retry_after_s=after_s)
    return Answer(Fate.REFUSED, f"HTTP {status}")


async def _content(response: aiohttp.ClientResponse) -> bytes | None:
    """Return the body, or None where it is too long, compressed or broken: 200 says enough."""
    content = bytearray()
    try:
        while chunk := await response.content.readany():
            content += chunk
            if len(content) > _MOST_ANSWER_BYTES:
                return None
    except (TimeoutError, aiohttp.ClientError, OSError):
        return None
    return None if "Content-Encoding" in response.headers else bytes(content)


def _retry_after_s(text: str) -> float | None:
    """Read Retry-After: seconds or a date (RFC 9110, 10.2.3); None where it is neither."""
    if text.isascii() and text.isdigit():
        return float(text[:9])
    try:
        until = parsedate_to_datetime(text)
    except (ValueError, OverflowError):
        return None
    until = until if until.tzinfo else until.replace(tzinfo=UTC)
    return max(0.0, (until - datetime.now(UTC)).total_seconds())


def _gzipped(body: bytes) -> bytes:
    # Level 1: the collector's cores are dearer than the network.
    packer = zlib.compressobj(1, wbits=_GZIP)
    return packer.compress(body) + packer.flush()


class _Resolver(AbstractResolver):
    """Looks names up in the forwarder's threads: a stuck name server stops nothing else."""

    def __init__(self, threads: Executor) -> None:
        self._threads = threads

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        found = await asyncio.get_running_loop().run_in_executor(
            self._threads, lambda: socket.getaddrinfo(host, port, family, socket.SOCK_STREAM)
        )
        return [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=port,
                family=kind,
                proto=proto,
                flags=socket.AI_NUMERICHOST,
            )
            for kind, _, proto, _, address in found
        ]

    async def close(self) -> None:
        pass


class _GrpcPeer:
    def __init__(self, target: ForwardTarget, threads: Executor) -> None:
        self._target = target
        self._threads = threads
        options = [
            ("grpc.max_send_message_length", -1),
            ("grpc.max_receive_message_length", _MOST_ANSWER_BYTES),
            ("grpc.enable_retries", 0),
            ("grpc.enable_http_proxy", 0),
            ("grpc.primary_user_agent", "perfledger"),
            # Its own default would leave a peer that is back alone for up to two minutes.
            ("grpc.max_reconnect_backoff_ms", 5000),
        ]
        if target.is_secure:
            credentials = grpc.ssl_channel_credentials(target.ca)
            self._channel = grpc.secure_channel(target.address, credentials, options)
        else:
            self._channel = grpc.insecure_channel(target.address, options)
        gzip = target.compression == "gzip"
        self._compression = grpc.Compression.Gzip if gzip else grpc.Compression.NoCompression

    async def send(self, signal: Signal, body: bytes, hops: tuple[str, str]) -> Answer:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._call, signal, body, hops)

    def _call(self, signal: Signal, body: bytes, hops: tuple[str, str]) -> Answer:
        method: grpc.UnaryUnaryMultiCallable[bytes, bytes]
        method = self._channel.unary_unary(f"/{signal.grpc_service}/Export")
        try:
            answer = method(
                body,
                timeout=self._target.timeout_s,
                metadata=(*self._target.headers, hops),
                compression=self._compression,
            )
        except grpc.RpcError as error:
            return _grpc_answer(error)
        except ValueError:  # the channel was closed meanwhile
            return Answer(Fate.FAILED, "closed")
        return _taken(signal, answer)

    async def close(self) -> None:
        self._channel.close()


def _grpc_answer(error: grpc.RpcError) -> Answer:
    code: grpc.StatusCode = error.code()
    after_s = _retry_info_s((item.key, item.value) for item in error.trailing_metadata() or ())
    exhausted = code is grpc.StatusCode.RESOURCE_EXHAUSTED and after_s is not None
    fate = Fate.FAILED if exhausted or code in _RETRYABLE_GRPC else Fate.REFUSED
    return Answer(fate, code.name, retry_after_s=after_s)


def _retry_info_s(trailers: Iterable[tuple[str, str | bytes]]) -> float | None:
    """Read RetryInfo from a status's details, or from the trailer that Python's SDK reads."""
    for key, value in trailers:
        try:
            if key == "google.rpc.retryinfo-bin" and isinstance(value, bytes):
                return _delay_s(RetryInfo.FromString(value))
            if key == "grpc-status-details-bin" and isinstance(value, bytes):
                retry = RetryInfo()
                if any(detail.Unpack(retry) for detail in Status.FromString(value).details):
                    return _delay_s(retry)
        except DecodeError:
            continue
    return None


def _delay_s(retry: RetryInfo) -> float:
    return max(0.0, float(retry.retry_delay.seconds + retry.retry_delay.nanos / 1e9))


def _taken(signal: Signal, content: bytes | None) -> Answer:
    """Return the answer to a success: a partial one says how much the peer did not want."""
    try:
        response = signal.response.FromString(content or b"")
    except DecodeError:
        content = None
    if content is None:
        return Answer(Fate.TAKEN, "unreadable answer")
    rejected = getattr(response.partial_success, signal.rejected_field)
    return Answer(Fate.TAKEN, rejected=max(0, rejected))
