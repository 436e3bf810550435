"""Send spans to an OTLP receiver from a process of its own, and note what was acknowledged when.

    python benchmarks/otlp_load.py --protocol http --port 4318 --requests 1000 --out acks.npz

Flat out on each connection, or at a rate (`--rate`, requests a second) at which requests are due
whether the earlier ones were answered or not. A refusal that may be retried is, after the time the
receiver asks for, and so is a broken connection: with the same bytes, until they are acknowledged.
The bodies are copies with new ids (fresh_requests.py), so that a request is known by its number.
"""

import argparse
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Self

import grpc
import numpy as np
from google.rpc.error_details_pb2 import RetryInfo
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves it out
import llm_payload  # noqa: E402
import reference_payload  # noqa: E402
from fresh_requests import FreshRequests, Words, span_ids  # noqa: E402

GENERATORS = {"reference": reference_payload.one_request, "llm": llm_payload.one_request}
EXPORT = "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
ANSWER_TIMEOUT_S = 60.0
RECONNECT_S = 0.05  # after a broken connection, if the receiver says nothing better
_REFUSED = -1
GIVE_UP_S = 15.0  # how long a stopped client goes on trying to deliver what it has begun
_GRPC_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),  # a connection for each channel
    ("grpc.initial_reconnect_backoff_ms", 50),
    ("grpc.min_reconnect_backoff_ms", 50),
    ("grpc.max_reconnect_backoff_ms", 200),
)
_RETRYABLE = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
}


# --- The bodies, made once and read by every client -----------------------------------------------


def write_bodies(path: Path, payload: str, count: int, seed: int = 0, workers: int = 2) -> Path:
    """Make `count` different requests of a payload ("reference" or "llm") for clients to copy."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        numbers = range(count)
        made = pool.map(_body, [payload] * count, [seed] * count, numbers, chunksize=8)
        path.write_bytes(pickle.dumps(list(made)))
    return path


def _body(payload: str, seed: int, number: int) -> FreshRequests:
    request = GENERATORS[payload](random.Random(f"{seed}/{number}"), number)
    return FreshRequests.of(request.SerializeToString())


def read_bodies(path: Path, seed: int) -> list[FreshRequests]:
    """Read what `write_bodies` wrote; the copies' ids follow from `seed`."""
    return [replace(body, seed=seed) for body in pickle.loads(path.read_bytes())]


# --- One request over one connection --------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """What became of one attempt: acknowledged in full, or when to try again, or refused."""

    acknowledged: bool
    retry_s: float | None = None
    what: str = ""


class HttpConnection:
    """OTLP over HTTP on one kept connection, made anew after it broke."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._socket: socket.socket | None = None

    def send(self, body: bytearray) -> Answer:
        try:
            return self._exchange(body)
        except OSError as error:
            self.close()
            return Answer(False, RECONNECT_S, type(error).__name__)

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _exchange(self, body: bytearray) -> Answer:
        if self._socket is None:
            self._socket = socket.create_connection(("127.0.0.1", self._port), ANSWER_TIMEOUT_S)
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        head = (
            "POST /v1/traces HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            f"Content-Type: application/x-protobuf\r\nContent-Length: {len(body)}\r\n\r\n"
        )
        sent = self._socket.sendmsg([head.encode(), body])
        self._socket.sendall(memoryview(body)[max(0, sent - len(head)) :])
        status, headers, answer = self._read()
        if headers.get("connection", "") == "close":
            self.close()
        if status == 200:
            return Answer(not answer, None, "partial" if answer else "")
        wait = headers.get("retry-after")
        retryable = status in (429, 502, 503, 504)
        return Answer(False, float(wait or RECONNECT_S) if retryable else None, str(status))

    def _read(self) -> tuple[int, dict[str, str], bytes]:
        received = b""
        while b"\r\n\r\n" not in received:
            received += self._some()
        head, _, body = received.partition(b"\r\n\r\n")
        first, *lines = head.decode("latin-1").split("\r\n")
        headers = {name.lower(): v.strip() for name, _, v in (x.partition(":") for x in lines)}
        while len(body) < int(headers.get("content-length", "0")):
            body += self._some()
        return int(first.split()[1]), headers, body

    def _some(self) -> bytes:
        assert self._socket is not None
        if some := self._socket.recv(65_536):
            return some
        raise ConnectionResetError("closed before the answer was whole")


class GrpcConnection:
    """OTLP over gRPC on one channel, which makes its connection anew by itself."""

    def __init__(self, port: int) -> None:
        self._channel = grpc.insecure_channel(f"127.0.0.1:{port}", options=_GRPC_OPTIONS)
        self._export = self._channel.unary_unary(EXPORT)

    def send(self, body: bytearray) -> Answer:
        try:
            answer = self._export(bytes(body), timeout=ANSWER_TIMEOUT_S)
        except grpc.RpcError as error:
            return _refusal(error)
        return Answer(not answer, None, "partial" if answer else "")

    def close(self) -> None:
        self._channel.close()


def _refusal(error: grpc.RpcError) -> Answer:
    code, trailers = error.code(), dict(error.trailing_metadata() or ())
    if info := trailers.get("google.rpc.retryinfo-bin"):
        delay = RetryInfo.FromString(info).retry_delay
        return Answer(False, delay.seconds + delay.nanos / 1e9, code.name)
    return Answer(False, RECONNECT_S if code in _RETRYABLE else None, code.name)


CONNECTIONS = {"http": HttpConnection, "grpc": GrpcConnection}


# --- Many requests --------------------------------------------------------------------------------


class Schedule:
    """Hands out request numbers with the moment each is due (monotonic ns), until stopped."""

    def __init__(self, rate: float | None, requests: int | None, seconds: float | None) -> None:
        self.stopped = threading.Event()
        self._lock, self._next, self._requests = threading.Lock(), 0, requests
        self._every_ns = 1e9 / rate if rate else 0.0
        self._start_ns = time.monotonic_ns()
        self._end_ns = self._start_ns + int(seconds * 1e9) if seconds else None

    def take(self) -> tuple[int, int] | None:
        """Return the next number and when it is due, or None at the end."""
        with self._lock:
            now_ns = time.monotonic_ns()
            due_ns = self._start_ns + int(self._next * self._every_ns) if self._every_ns else now_ns
            late = self._end_ns is not None and due_ns >= self._end_ns
            if self.stopped.is_set() or late or self._next == self._requests:
                return None
            self._next += 1
            return self._next - 1, due_ns

    def gives_up(self, since_ns: int) -> bool:
        """Return whether to abandon a delivery that was begun at `since_ns`."""
        if not self.stopped.is_set():
            return False
        return time.monotonic_ns() - since_ns > GIVE_UP_S * 1e9


@dataclass(frozen=True)
class Acks:
    """One row a request, times in monotonic ns.

    `acked_ns` is 0 where the client gave up at its end, and -1 where it was refused for good.
    """

    number: NDArray[np.int64]
    due_ns: NDArray[np.int64]
    sent_ns: NDArray[np.int64]
    acked_ns: NDArray[np.int64]
    attempts: NDArray[np.int64]
    seed: int
    spans_a_request: int
    cpu_ns: int
    refusals: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Self:
        found = np.load(path)
        rows = found["rows"].reshape(-1, 5).T
        seed, spans, cpu_ns = (int(value) for value in found["facts"])
        return cls(*rows, seed, spans, cpu_ns, tuple(found["refusals"].tolist()))

    @property
    def acknowledged(self) -> NDArray[np.bool_]:
        return np.asarray(self.acked_ns > 0)

    @property
    def refused(self) -> int:
        """How many requests were refused for good, or not taken whole."""
        return int((self.acked_ns == _REFUSED).sum())

    @property
    def spans(self) -> int:
        """How many spans were acknowledged."""
        return int(self.acknowledged.sum()) * self.spans_a_request

    def ids(self, acknowledged: bool) -> Words:
        """Return the span ids of requests that were acknowledged, or of those that never were."""
        numbers = self.number[self.acknowledged == acknowledged].tolist()
        ids = [span_ids(self.seed, number, self.spans_a_request) for number in numbers]
        return np.concatenate(ids) if ids else np.empty(0, np.uint64)

    def latency_ms(self) -> NDArray[np.float64]:
        """Return ms from the moment a request was due until it was acknowledged."""
        return (self.acked_ns - self.due_ns)[self.acknowledged] / 1e6

    def answer_ms(self) -> NDArray[np.float64]:
        """Return ms from the first byte sent until the acknowledgement."""
        return (self.acked_ns - self.sent_ns)[self.acknowledged] / 1e6


def send_all(
    protocol: str, port: int, connections: int, bodies: Sequence[FreshRequests], plan: Schedule
) -> tuple[list[tuple[int, ...]], list[str]]:
    """Send until the schedule ends; return the rows of `Acks` and the refusals met."""
    rows: list[tuple[int, ...]] = []
    refusals: list[str] = []

    def run() -> None:
        connection = CONNECTIONS[protocol](port)
        while slot := plan.take():
            number, due_ns = slot
            body = bodies[number % len(bodies)].make(number, time.time_ns())
            time.sleep(max(0, due_ns - time.monotonic_ns()) / 1e9)
            rows.append((number, due_ns, *_deliver(connection.send, body, plan, refusals)))
        connection.close()

    threads = [threading.Thread(target=run) for _ in range(connections)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return rows, refusals


def _deliver(
    send: Callable[[bytearray], Answer], body: bytearray, plan: Schedule, refusals: list[str]
) -> tuple[int, int, int]:
    """Try until a request is acknowledged or refused for good; return sent, acked, attempts."""
    sent_ns, attempts = time.monotonic_ns(), 0
    while True:
        answer = send(body)
        attempts += 1
        if answer.acknowledged:
            return sent_ns, time.monotonic_ns(), attempts
        refusals.append(answer.what)
        if answer.retry_s is None:
            return sent_ns, _REFUSED, attempts
        if plan.gives_up(sent_ns):
            return sent_ns, 0, attempts
        time.sleep(answer.retry_s)


# --- The process ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Load:
    """What one client process is to send. Without a rate, each connection sends flat out."""

    protocol: str
    port: int
    bodies: Path
    seed: int = 0
    connections: int = 4
    requests: int | None = None
    seconds: float | None = None
    rate: float | None = None  # requests a second
    cpu: int | None = None  # the core that it is bound to


class RunningLoad:
    """A client process, ready to send; `with` ends it. It also ends with the process here."""

    def __init__(self, load: Load, out: Path) -> None:
        given = {name: value for name, value in vars(load).items() if value is not None}
        flags = [part for name, value in given.items() for part in (f"--{name}", str(value))]
        command = [sys.executable, __file__, *flags, "--out", str(out), "--wait"]
        pipe = subprocess.PIPE
        self._out = out
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        assert self._process.stdout and self._process.stdout.readline() == "ready\n"

    def start(self) -> None:
        assert self._process.stdin
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def stop(self) -> None:
        """Begin no more requests; those under way are still delivered."""
        self._process.send_signal(signal.SIGTERM)

    def result(self) -> Acks:
        """Wait for its end and return what was acknowledged."""
        if self._process.wait() != 0:
            raise SystemExit("the load client failed")
        return Acks.read(self._out)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()


def run_load(load: Load, out: Path) -> Acks:
    """Send a load from a process of its own; return when it is done."""
    with RunningLoad(load, out) as running:
        running.start()
        return running.result()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--protocol", choices=tuple(CONNECTIONS), default="grpc")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--bodies", type=Path, help="from write_bodies; otherwise 8 are made")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--connections", type=int, default=4)
    parser.add_argument("--requests", type=int, help="end after so many")
    parser.add_argument("--seconds", type=float, help="end after so long")
    parser.add_argument("--rate", type=float, help="requests a second, all connections together")
    parser.add_argument("--cpu", type=int, help="bind to this core")
    parser.add_argument("--wait", action="store_true", help="say ready, wait for a line on stdin")
    parser.add_argument("--out", type=Path, required=True, help="write acknowledgements (.npz)")
    run(parser.parse_args())


def run(asked: argparse.Namespace) -> None:
    if asked.cpu is not None:
        os.sched_setaffinity(0, {asked.cpu})
    if asked.bodies:
        bodies = read_bodies(asked.bodies, asked.seed)
    else:
        bodies = [replace(_body("reference", 0, n), seed=asked.seed) for n in range(8)]
    if asked.wait:
        print("ready", flush=True)
        sys.stdin.readline()
        threading.Thread(target=_end_with_parent, daemon=True).start()
    started_ns = time.process_time_ns()
    plan = Schedule(asked.rate, asked.requests, asked.seconds)
    signal.signal(signal.SIGTERM, lambda *_: plan.stopped.set())
    rows, refusals = send_all(asked.protocol, asked.port, asked.connections, bodies, plan)
    facts = [asked.seed, bodies[0].spans, time.process_time_ns() - started_ns]
    np.savez(
        asked.out, rows=np.array(rows, np.int64), facts=facts, refusals=np.array(refusals, "U")
    )
    with suppress(BrokenPipeError):
        print(f"{len(rows)} requests, {len(refusals)} attempts refused or broken")


def _end_with_parent() -> None:
    """Wait for the end of stdin, which is that of whoever started us."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
