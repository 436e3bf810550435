"""Start an OTLP receiver as a process, and measure the CPU and memory that it takes.

Ours is `perfledger collect`; the other is rotel, a collector in Rust, told to throw away what it
decodes. rotel is not a dependency: put `rotel` on PATH, or name it with ROTEL.
"""

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pyarrow.parquet as pq

from perfledger.schema.store import Store

ROTEL_HINT = (
    "rotel not found: python -m venv rotelvenv; rotelvenv/bin/pip install rotel==0.0.1a15; "
    "ROTEL=rotelvenv/lib/python3.*/site-packages/rotel/rotel-agent"
)
_POLL_S = 0.05
_START_S = 90.0
_STOP_S = 120.0
_QUIET_SHARE = 0.05  # of a core, over a second: nothing is being worked off any more
_QUIET_WITHIN_S = 30.0


@dataclass(frozen=True)
class Server:
    """A receiver on two ports of the loopback; `store` is None where nothing is kept."""

    name: str
    process: subprocess.Popen[bytes]
    ports: dict[str, int]  # protocol -> port
    store: Store | None

    def cpu_ns(self) -> int:
        """Return the CPU time of the process and its children, ended ones too, so far."""
        return sum(_cpu_ns(pid) for pid in self._pids())

    def rss_bytes(self) -> int:
        """Return what the process and its children hold in memory now."""
        return sum(_status_bytes(pid, "VmRSS") for pid in self._pids())

    def peak_rss_bytes(self) -> int:
        """Return the sum of the peaks of the process and its children."""
        return sum(_status_bytes(pid, "VmHWM") for pid in self._pids())

    def bind(self, cpu: int) -> None:
        """Let all threads run on one core only; later ones inherit it."""
        for pid in self._pids():
            for thread in Path(f"/proc/{pid}/task").iterdir():
                os.sched_setaffinity(int(thread.name), {cpu})

    def rows(self) -> int:
        """Return how many spans lie in files; 0 where nothing is kept."""
        if self.store is None:
            return 0
        return sum(_rows(str(path)) for path in self.store.files("spans"))

    def settle(self, at_least_s: float = 1) -> None:
        """Wait until it works no more: the last second at less than 5 % of a core."""
        start_s = time.monotonic()
        before_ns = self.cpu_ns()
        while (waited_s := time.monotonic() - start_s) < _QUIET_WITHIN_S:
            time.sleep(1)
            now_ns = self.cpu_ns()
            if now_ns - before_ns < _QUIET_SHARE * 1e9 and waited_s + 1 >= at_least_s:
                return
            before_ns = now_ns

    def _pids(self) -> list[int]:
        return list(_descendants(self.process.pid))


@cache
def _rows(path: str) -> int:
    return int(pq.read_metadata(path).num_rows)  # of a file that never changes


def wait_until(ready: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Wait for something; raises SystemExit if it does not come."""
    deadline = time.monotonic() + timeout_s
    while not ready():
        if time.monotonic() > deadline:
            raise SystemExit(f"{what}: not within {timeout_s:g} s")
        time.sleep(_POLL_S)


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(
    name: str,
    command: Sequence[str],
    ports: dict[str, int],
    store: Store | None,
    log: Path,
    **environment: str,
) -> Iterator[Server]:
    """Run a receiver until it listens on its ports; end it with SIGTERM."""
    environ = {**os.environ, **environment}
    with open(log, "ab") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=sink, env=environ, start_new_session=True
        )
    server = Server(name, process, ports, store)
    try:
        wait_until(lambda: _serves(server, log), _START_S, name)
        yield server
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
        try:
            process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _serves(server: Server, log: Path) -> bool:
    if server.process.poll() is not None:
        raise SystemExit(f"{server.name} ended: {log.read_text()}")
    return all(listens(port) for port in server.ports.values())


@contextmanager
def collector(folder: Path, *extra: str, **environment: str) -> Iterator[Server]:
    """Run `perfledger collect` on a store in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    ports = {"grpc": free_port(), "http": free_port()}
    command = collect_command(folder / "store", ports, *extra)
    store = Store.at(str(folder / "store"))
    log = folder / "collect.log"
    with running("perfledger", command, ports, store, log, **environment) as server:
        yield server


def collect_command(store: Path, ports: dict[str, int], *extra: str) -> list[str]:
    addresses = [f"--otlp-{name}=127.0.0.1:{port}" for name, port in ports.items()]
    command = [sys.executable, "-P", "-m", "perfledger", "collect", "--store", str(store)]
    return [*command, *addresses, f"--metrics=127.0.0.1:{free_port()}", *extra]


@contextmanager
def rotel(folder: Path) -> Iterator[Server]:
    """Run rotel with its blackhole exporter."""
    folder.mkdir(parents=True, exist_ok=True)
    ports = {"grpc": free_port(), "http": free_port()}
    endpoints = [f"--otlp-{name}-endpoint=127.0.0.1:{port}" for name, port in ports.items()]
    files = [f"--pid-file={folder / 'rotel.pid'}", f"--log-file={folder / 'rotel.log'}"]
    command = [find_rotel() or "rotel", "start", "--exporter", "blackhole", *endpoints, *files]
    with running("rotel", command, ports, None, folder / "rotel.out") as server:
        yield server


def find_rotel() -> str | None:
    """Return rotel's program: $ROTEL, or `rotel` or `rotel-agent` on PATH; None without it."""
    named = os.environ.get("ROTEL")
    return named or shutil.which("rotel") or shutil.which("rotel-agent")


# --- /proc ----------------------------------------------------------------------------------------


def _descendants(pid: int) -> Iterator[int]:
    yield pid
    try:
        tasks = list(Path(f"/proc/{pid}/task").iterdir())
        children = [child for task in tasks for child in (task / "children").read_text().split()]
    except OSError:
        return
    for child in children:
        yield from _descendants(int(child))


def _cpu_ns(pid: int) -> int:
    """Return the CPU time of all threads of a process, and of the children it has waited for."""
    try:
        own_ns = time.clock_gettime_ns(
            (~pid << 3) | 2
        )  # the process's CPU clock, as Linux numbers it
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0
    return own_ns + (int(fields[13]) + int(fields[14])) * 10**9 // os.sysconf("SC_CLK_TCK")


def _status_bytes(pid: int, field: str) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(field)), 0)
