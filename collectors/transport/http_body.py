"""A request's body over ASGI: read within limits, and inflated piece by piece where it is gzip."""

import asyncio
import zlib
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

from perfledger.collectors.transport.otlp_receiver import too_large, undecodable

Receive = Callable[[], Awaitable[dict[str, Any]]]

_GZIP = zlib.MAX_WBITS | 16
_INFLATE_AT_ONCE_BYTES = 2**20
# Small pieces are joined now and then: each costs more than its bytes.
_MOST_PIECES = 1024
# A member costs its head and its end however little is in it; who compresses makes one, or few.
_MOST_MEMBERS = 1000
_PIECES_A_TURN = 32


class DisconnectedError(Exception):
    """The client went away before its request was whole."""


async def read_body(
    receive: Receive,
    limit_bytes: int,
    take: Callable[[int], None],
    *,
    announced_bytes: int | None,
    gzipped: bool,
) -> bytes:
    """Return the body, inflated. Raises Refusal over the limit, or where it is damaged.

    The limit holds for the bytes as they come and as they are inflated; what announces itself as
    larger is not read at all. Raises DisconnectedError.
    """
    if announced_bytes is not None and announced_bytes > limit_bytes:
        raise too_large(limit_bytes)
    inflater = _Inflater(limit_bytes) if gzipped else None
    body, size_bytes = [], 0
    pieces = 0
    more = True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise DisconnectedError
        more = message.get("more_body", False)
        chunk = message.get("body", b"")
        for piece in inflater.pieces(chunk) if inflater else (chunk,):
            take(len(piece))
            size_bytes += len(piece)
            if size_bytes > limit_bytes:
                raise too_large(limit_bytes)
            body.append(piece)
            pieces += 1
            if len(piece) == _INFLATE_AT_ONCE_BYTES or pieces % _PIECES_A_TURN == 0:
                await asyncio.sleep(0)  # others' turn: inflating so much takes milliseconds
        if len(body) > _MOST_PIECES:
            body = [b"".join(body)]
    if inflater:
        inflater.end()
    return body[0] if len(body) == 1 else b"".join(body)


class _Inflater:
    """Inflates a gzip stream, of several members too.

    A piece is bounded however well it was compressed, so that a bomb is met at the limit.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._member = zlib.decompressobj(_GZIP)
        self._compressed_bytes = 0
        self._members = 0
        self._is_whole = False

    def pieces(self, chunk: bytes) -> Iterator[bytes]:
        """Yield what a chunk inflates to. Raises Refusal over the limit, or on damage."""
        self._compressed_bytes += len(chunk)
        if self._compressed_bytes > self._limit_bytes:
            raise too_large(self._limit_bytes)
        while chunk:
            try:
                yield self._member.decompress(chunk, _INFLATE_AT_ONCE_BYTES)
            except zlib.error as error:
                raise undecodable("the body is not gzip, or damaged") from error
            self._is_whole = self._member.eof
            chunk = self._member.unused_data or self._member.unconsumed_tail
            if self._is_whole:
                self._members += 1
                if self._members > _MOST_MEMBERS:
                    raise undecodable(f"the body has more than {_MOST_MEMBERS} gzip members")
                self._member = zlib.decompressobj(_GZIP)

    def end(self) -> None:
        """Raise Refusal where the stream ends early."""
        if not self._is_whole:
            raise undecodable("the gzip stream ends early")
