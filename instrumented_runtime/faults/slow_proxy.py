"""A TCP proxy between client and server that is far away, or reads slowly.

It forwards bytes as they are. `delay_s` passes in each direction before they go on (the order is
kept, and nothing is held up by what came before); `bytes_per_s` bounds what the client takes, with
small socket buffers, so that the server soon has to wait for room.
"""

import asyncio
import contextlib
import socket
import time
from dataclasses import dataclass

_PIECE_BYTES = 16 * 1024
_SLOW_PIECE_BYTES = 256
_SLOW_BUFFER_BYTES = 4096
_QUEUED_PIECES = 4096


@dataclass(frozen=True, slots=True)
class Path:
    """What lies between client and server."""

    delay_s: float = 0.0
    bytes_per_s: float = 0.0  # from the server to the client; 0: as fast as they come


class SlowProxy:
    """Listens on a port of its own and forwards each connection to `target`."""

    def __init__(self, path: Path, target: tuple[str, int]) -> None:
        self._path, self._target = path, target
        self._tasks: set[asyncio.Task[None]] = set()

    async def listen(self, host: str = "127.0.0.1", port: int = 0) -> asyncio.Server:
        """Begin to accept connections; close the server to end."""
        return await asyncio.start_server(self._accept, host, port)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            to_reader, to_writer = await self._connect()
        except OSError:
            writer.close()
            return
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(_forward(reader, to_writer, self._path.delay_s, 0.0))
                path = self._path
                group.create_task(_forward(to_reader, writer, path.delay_s, path.bytes_per_s))
        except* OSError:
            pass  # one side has gone: so does the other
        finally:
            for one in (writer, to_writer):
                one.close()

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        link = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        link.setblocking(False)
        if self._path.bytes_per_s:
            link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _SLOW_BUFFER_BYTES)
        try:
            await asyncio.get_running_loop().sock_connect(link, self._target)
        except OSError:
            link.close()
            raise
        limit = _SLOW_BUFFER_BYTES if self._path.bytes_per_s else 2**16
        return await asyncio.open_connection(sock=link, limit=limit)


async def _forward(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, delay_s: float, bytes_per_s: float
) -> None:
    """Forward one direction until its end, then end the other side's reading."""
    waiting: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue(_QUEUED_PIECES)

    async def read() -> None:
        size = _SLOW_PIECE_BYTES if bytes_per_s else _PIECE_BYTES
        while piece := await reader.read(size):
            await waiting.put((time.monotonic() + delay_s, piece))
            if bytes_per_s:
                await asyncio.sleep(len(piece) / bytes_per_s)
        await waiting.put((0.0, b""))

    async def write() -> None:
        while True:
            due_s, piece = await waiting.get()
            if not piece:
                break
            await asyncio.sleep(max(0.0, due_s - time.monotonic()))
            writer.write(piece)
            await writer.drain()
        with contextlib.suppress(OSError):
            writer.write_eof()

    async with asyncio.TaskGroup() as group:
        group.create_task(read())
        group.create_task(write())
