"""`perfledger load` as a user runs it: a process, against a server in this one."""

import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import polars as pl
import pytest

from perfledger.schema.store import Store


@dataclass
class Server:
    """A server that answers every completion with 3 chunks, or refuses all."""

    url: str = ""
    refuse: bool = False
    bodies: list[dict[str, object]] = field(default_factory=list)


@pytest.fixture
def server() -> Iterator[Server]:
    state = Server()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: object) -> None:
            pass

        def do_GET(self) -> None:
            self.answer(200, "application/json", b'{"data": [{"id": "scripted"}]}')

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            state.bodies.append(body)
            if state.refuse:
                self.answer(400, "text/plain", b"too long")
                return
            usage = {"prompt_tokens": len(body["prompt"]), "completion_tokens": body["max_tokens"]}
            events = [{"choices": [{"text": "a"}]}] * 3 + [{"choices": [], "usage": usage}]
            lines = [f"data: {json.dumps(event)}\n\n" for event in events]
            self.answer(200, "text/event-stream", "".join([*lines, "data: [DONE]\n\n"]).encode())

        def answer(self, status: int, kind: str, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        http.daemon_threads = True
        state.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, daemon=True)
        thread.start()
        yield state
        http.shutdown()
        thread.join()


def command(server: Server, store: Path, *extra: str) -> list[str]:
    words = [sys.executable, "-P", "-m", "perfledger", "load", "--url", server.url]
    return [*words, "--store", str(store), *extra]


def perfledger_load(server: Server, store: Path, *extra: str) -> subprocess.CompletedProcess[str]:
    arguments = command(server, store, *extra)
    return subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)


SMALL = ("--generate", "azure-code", "--limit", "8", "--rate", "40", "--max-input", "64")


def test_the_command_prints_within_80_columns_and_keeps_samples(
    server: Server, tmp_path: Path
) -> None:
    done = perfledger_load(server, tmp_path, *SMALL, "--max-output", "5", "--run", "mine")
    again = perfledger_load(server, tmp_path, *SMALL, "--run", "mine")
    assert done.returncode == 0, done.stderr
    assert max(len(line) for line in done.stdout.splitlines()) <= 80
    assert [
        w for w in ("TTFT, from schedule", "CV of gaps", "rate 40") if w not in done.stdout
    ] == []
    spans = Store.at(str(tmp_path)).scan("spans").filter(pl.col("run_id") == "mine").collect()
    assert len(spans) == 10
    assert again.returncode == 2
    assert "run 'mine' is already there" in again.stderr


def test_json_carries_numbers_and_definitions(server: Server, tmp_path: Path) -> None:
    trace = tmp_path / "trace.csv"
    rows = "".join(f"2024-05-10 00:00:00.{at}00000+00:00,20,3\n" for at in range(4))
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + rows)
    done = perfledger_load(
        server, tmp_path / "store", "--workload", str(trace), "--json", "--warmup", "0"
    )
    summary = json.loads(done.stdout)
    assert (done.returncode, summary["ok"], summary["warm_up"]) == (0, 4, 0)
    assert (summary["workload"], summary["workload_source"]) == ("azure", "trace.csv")
    assert summary["asked"]["span_s"] == 0.3
    assert summary["realised_output_tokens"]["mean"] == 3
    assert set(summary["metrics"]["ttft_ns"]) == {"mean", "std", "p50", "p95", "p99", "n"}
    assert summary["definition"]["itl_ns"].startswith("gaps between chunks")


def test_ctrl_c_keeps_what_was_measured(server: Server, tmp_path: Path) -> None:
    arguments = ("--generate", "servegen", "--limit", "50", "--rate", "0.2", "--max-input", "9")
    process = subprocess.Popen(
        command(server, tmp_path, *arguments),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while len(server.bodies) < 3 and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    out, error = process.communicate(timeout=60)
    assert process.returncode == 130, error
    assert "interrupted: what was measured until then is kept" in out
    spans = Store.at(str(tmp_path)).scan("spans").collect()
    assert len(spans) == len(server.bodies) >= 3


@pytest.mark.parametrize(
    ("extra", "said"),
    [
        (("--generate", "azure-code", "--rate", "0"), "must be above 0"),
        (("--generate", "azure-code", "--rate", "2", "--time-scale", "2"), "both set the time"),
        (("--workload", "/nowhere/trace.csv"), "no such workload file"),
        (("--generate", "azure-code", "--token-ids", "9:9"), "not a range of token ids"),
        (("--generate", "azure-code", "--workload", "x"), "not allowed with"),
        ((), "one of the arguments --workload --generate is required"),
    ],
)
def test_wrong_usage_is_said(
    server: Server, tmp_path: Path, extra: tuple[str, ...], said: str
) -> None:
    done = perfledger_load(server, tmp_path, *extra)
    assert (done.returncode, said in done.stderr) == (2, True), done.stderr


def test_no_success_is_exit_1(server: Server, tmp_path: Path) -> None:
    server.refuse = True
    done = perfledger_load(server, tmp_path, *SMALL)
    assert done.returncode == 1
    assert "http_400, for example: too long" in done.stdout
    assert Store.at(str(tmp_path)).scan("spans").collect()["outcome"].to_list() == ["refused"] * 10
