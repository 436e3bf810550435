"""Fixtures shared by the tests: real processes of ours, on free ports."""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import settings

# A slow example on a busy machine is no failure; hangs are pytest-timeout's.
settings.register_profile("shared-cores", deadline=None)
settings.load_profile("shared-cores")

# Two shared cores: spinning OpenMP threads starve the others (and slow the tests tenfold).
QUIET_TORCH = {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "OMP_NUM_THREADS": "1"}
SHARED_DATA = Path(__file__).parent.parent.parent / "shared" / "data"


def pytest_sessionstart() -> None:
    """Compile the scanner before any test: that takes a minute once, and then a second."""
    from perfledger.collectors.wire.warm_up import warm_up

    warm_up()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(ready: Callable[[], bool], timeout_s: float, what: str) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, f"{what}: not within {timeout_s} s"
        time.sleep(0.05)


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@contextmanager
def perfledger(*arguments: str, log: Path, **environment: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run `perfledger …` as a process; on exit end it with SIGTERM and wait."""
    command = [sys.executable, "-P", "-m", "perfledger", *arguments]
    with open(log, "ab") as sink:
        process = subprocess.Popen(
            command, stdout=sink, stderr=sink, env={**os.environ, **QUIET_TORCH, **environment}
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise AssertionError(f"{arguments[0]} ignored SIGTERM: {log.read_text()}") from None


@dataclass(frozen=True)
class Collector:
    """A running `perfledger collect`."""

    store: Path
    grpc_port: int
    http_port: int
    process: subprocess.Popen[bytes]
    log: Path


@dataclass(frozen=True)
class Runtime:
    """A running `perfledger serve`."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path


@contextmanager
def running_collector(folder: Path, *extra: str) -> Iterator[Collector]:
    grpc_port, http_port, log = free_port(), free_port(), folder / "collect.log"
    store = folder / "store"
    arguments = ["collect", "--store", str(store), "--otlp-grpc", f"127.0.0.1:{grpc_port}"]
    arguments += ["--otlp-http", f"127.0.0.1:{http_port}", "--metrics", "off", *extra]
    with perfledger(*arguments, log=log) as process:
        wait_until(lambda: _listens(grpc_port) and _listens(http_port), 60, "collector")
        yield Collector(store, grpc_port, http_port, process, log)


@contextmanager
def running_runtime(
    folder: Path,
    *extra: str,
    otlp_port: int | None = None,
    under: tuple[str, ...] = (),
    **environment: str,
) -> Iterator[Runtime]:
    port, log = free_port(), folder / "serve.log"
    if otlp_port is not None:
        environment["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{otlp_port}"
    arguments = ["serve", "--model", "reference-small", "--port", str(port), "--threads", "1"]
    with perfledger(*under, *arguments, *extra, log=log, **environment) as process:
        url = f"http://127.0.0.1:{port}"

        def ready() -> bool:
            assert process.poll() is None, f"serve ended: {log.read_text()}"
            return answers(f"{url}/health")

        wait_until(ready, 120, "runtime")
        yield Runtime(url, process, log)


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.fixture
def collector(tmp_path: Path) -> Iterator[Collector]:
    """A collector with an empty store."""
    with running_collector(tmp_path) as running:
        yield running


@pytest.fixture
def runtime(tmp_path: Path, collector: Collector) -> Iterator[Runtime]:
    """A small runtime that sends its telemetry to `collector`."""
    with running_runtime(tmp_path, otlp_port=collector.grpc_port) as running:
        yield running


@pytest.fixture(scope="session")
def start_collector() -> Callable[..., object]:
    """`with start_collector(folder): …`, for tests that need their own flags."""
    return running_collector


@pytest.fixture(scope="session")
def start_runtime() -> Callable[..., object]:
    """`with start_runtime(folder, "--max-num-seqs", "2", otlp_port=…): …`."""
    return running_runtime


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Public data that may stand beside the checkout; tests skip without it."""
    if not SHARED_DATA.exists():
        pytest.skip("no public data beside this checkout")
    return SHARED_DATA
