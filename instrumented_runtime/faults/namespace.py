"""A network namespace in which all ranks stand, its loopback as thin as asked (Linux, root).

The kernel's token bucket (tbf) bounds the loopback device of the namespace; nothing outside it is
touched. Ports cross its border over Unix sockets, which namespaces of the network do not divide.
"""

import asyncio
import secrets
import shutil
import subprocess
import sys
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from perfledger.schema.errors import PerfledgerError, UsageError

_PIECE_BYTES = 64 * 1024
# The loopback's packets are 64 KiB by default, and the bucket drops what is larger than itself.
_PACKET_BYTES, _BURST = 1500, "16kb"
_LONGEST_WAIT = "400ms"
_READY = "ready"


@contextmanager
def thin_namespace(megabits_per_s: float) -> Iterator[str]:
    """Make a namespace whose loopback carries so much; give its name; remove it at the end.

    Raises UsageError without the programs or the rights.
    """
    for program in ("ip", "tc"):
        if shutil.which(program) is None:
            raise UsageError(f"the program {program} is needed", fix="apt install iproute2")
    name = f"net-{secrets.token_hex(4)}"
    _run("ip", "netns", "add", name)
    try:
        inside = ("ip", "netns", "exec", name)
        _run(*inside, "ip", "link", "set", "lo", "up", "mtu", str(_PACKET_BYTES))
        bucket = ("rate", f"{megabits_per_s:g}mbit", "burst", _BURST, "latency", _LONGEST_WAIT)
        _run(*inside, "tc", "qdisc", "add", "dev", "lo", "root", "tbf", *bucket)
        yield name
    finally:
        subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextmanager
def crossing(
    name: str, folder: Path, inward: Sequence[int], outward: Sequence[int]
) -> Iterator[None]:
    """Let TCP ports of 127.0.0.1 cross the border for the time of the block.

    Connections to a port of `inward` out here reach the same port inside, and those to one of
    `outward` in there the same port out here.
    """
    ends = []
    for place, accepts, reaches in (("out", inward, outward), ("in", outward, inward)):
        command = [sys.executable, "-P", "-m", __name__, str(folder)]
        command += [",".join(map(str, accepts)), ",".join(map(str, reaches))]
        if place == "in":
            command = ["ip", "netns", "exec", name, *command]
        # A Ctrl-C of the terminal is not for them: telemetry crosses until the command has ended.
        ends.append(
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        )
    try:
        for end in ends:
            assert end.stdout is not None
            if end.stdout.readline().strip() != _READY:
                raise PerfledgerError("a port cannot cross into the network namespace")
        yield
    finally:
        for end in ends:
            end.terminate()
            end.wait()


async def relay(folder: Path, accepts: Sequence[int], reaches: Sequence[int]) -> None:
    """Be one end of the border: TCP ports to Unix sockets in `folder`, and back."""
    for port in accepts:
        path = str(folder / str(port))

        async def outgoing(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, path: str = path
        ) -> None:
            await _join(reader, writer, asyncio.open_unix_connection(path))

        await asyncio.start_server(outgoing, "127.0.0.1", port)
    for port in reaches:

        async def incoming(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int = port
        ) -> None:
            await _join(reader, writer, asyncio.open_connection("127.0.0.1", port))

        await asyncio.start_unix_server(incoming, str(folder / str(port)))
    print(_READY, flush=True)
    await asyncio.Event().wait()


async def _join(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    opening: "Coroutine[Any, Any, tuple[asyncio.StreamReader, asyncio.StreamWriter]]",
) -> None:
    with suppress(OSError):
        to_reader, to_writer = await opening
        await asyncio.gather(_copy(reader, to_writer), _copy(to_reader, writer))
    writer.close()


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while piece := await reader.read(_PIECE_BYTES):
            writer.write(piece)
            await writer.drain()
        writer.write_eof()


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise UsageError(
            f"cannot make the network namespace: {done.stderr.strip() or done.returncode}",
            fix="run as root on a Linux whose kernel has tbf",
        )


def main() -> None:
    """Run one end (a child of `crossing`)."""
    folder, accepts, reaches = sys.argv[1:4]
    ports = [[int(port) for port in text.split(",") if port] for text in (accepts, reaches)]
    asyncio.run(relay(Path(folder), *ports))


if __name__ == "__main__":
    main()
