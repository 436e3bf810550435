"""`perfledger serve` as a process: how it starts, what it survives, and how it ends."""

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import psutil
import pytest
from raw_streams import open_stream, rest_of

from perfledger.cli import build_parser
from perfledger.collectors.transport.address import is_loopback
from perfledger.instrumented_runtime.messages import Ready
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.serve import introduction, shared_threads
from perfledger.schema.errors import UsageError
from perfledger.serve_command import refuse_contradictions
from perfledger.serve_flags import memory_bytes, options_of

PROMPT = {"prompt": "The licence", "max_tokens": 1000, "temperature": 0, "ignore_eos": True}


EVERY_FLAG = (
    "--model smollm2 --host 127.0.0.2 --port 0 --device cuda:1 --dtype bfloat16 --threads 2"
    " --quantization int8 --max-num-seqs 8 --max-num-batched-tokens 64 --block-size 32"
    " --kv-memory 1GiB --max-model-len 512 --no-prefix-cache --preemption swap"
    " --swap-memory 1MiB --watermark 0.1 --degrade refuse-n,shrink-chunk --replicas 3"
    " --route round-robin --health-timeout 2.5 --tp 2 --pp 3 --ep 4 --cp 5 --microbatches 6"
    " --run-id r1 --service-name s --no-telemetry --allow-faults"
)


def options(*flags: str) -> RuntimeOptions:
    return options_of(build_parser().parse_args(["serve", *flags]))


def test_without_flags_the_options_are_the_defaults() -> None:
    assert options() == RuntimeOptions()


def test_every_flag_sets_its_option() -> None:
    assert options(*EVERY_FLAG.split()) == RuntimeOptions(
        model="smollm2",
        host="127.0.0.2",
        port=0,
        device="cuda:1",
        dtype="bfloat16",
        threads=2,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        block_size=32,
        kv_memory_bytes=1024**3,
        max_model_len=512,
        quantization="int8",
        prefix_cache=False,
        preemption="swap",
        swap_memory_bytes=1024**2,
        watermark=0.1,
        degrade=("refuse-n", "shrink-chunk"),
        replicas=3,
        route="round-robin",
        health_timeout_s=2.5,
        tensor_parallel=2,
        pipeline_parallel=3,
        expert_parallel=4,
        context_parallel=5,
        microbatches=6,
        run_id="r1",
        service_name="s",
        telemetry=False,
        allow_faults=True,
    )


def test_every_option_has_a_flag() -> None:
    changed = options(*EVERY_FLAG.split())
    same = [f.name for f in fields(RuntimeOptions) if getattr(changed, f.name) == f.default]
    assert same == ["ring_slots"]  # of no use to anyone but tests


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ("--route prefix-affinity --no-prefix-cache", "--no-prefix-cache keeps none"),
        ("--microbatches 2", "--microbatches is for a pipeline"),
        ("--replicas 9 --tp 8", "9 replicas of 8 ranks are too many processes"),
    ],
)
def test_flags_that_contradict_each_other(flags: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        refuse_contradictions(options(*flags.split()))


@pytest.mark.parametrize(
    "flags",
    ["--replicas 0", "--tp 65", "--watermark 1", "--health-timeout 0", "--route fastest"],
)
def test_values_out_of_range_are_refused(flags: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        options(*flags.split())
    assert flags.split()[1] in capsys.readouterr().err


def test_by_default_all_processes_share_the_cores() -> None:
    cores = len(os.sched_getaffinity(0))
    shared = shared_threads(options("--replicas", "2", "--tp", "2"))
    assert shared.threads == max(1, cores // 4)
    assert shared_threads(options("--replicas", "2", "--threads", "3")).threads == 3
    assert shared_threads(options()).threads == 0


@pytest.mark.parametrize(
    ("text", "bytes_"),
    [("1048576", 1048576), ("512MiB", 512 * 1024**2), ("2G", 2 * 1024**3), ("3 kb", 3072)],
)
def test_memory_sizes(text: str, bytes_: int) -> None:
    assert memory_bytes(text) == bytes_


@pytest.mark.parametrize("text", ["", "0", "-1", "1.5GiB", "many", "5X", "1e9"])
def test_bad_memory_sizes(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="is not a size like 512MiB"):
        memory_bytes(text)


def test_loopback() -> None:
    hosts = ("127.0.0.1", "127.8.8.8", "::1", "localhost", "0.0.0.0", "::", "10.0.0.1", "host")
    assert [is_loopback(host) for host in hosts] == [True] * 4 + [False] * 4


READY = Ready("cpu", "float32", "sdpa", 1, 8, 128, 1000, "w")


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        ({}, "OTLP (grpc) to http://localhost:4317, run r1"),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}, "off"),
        ({"OTEL_SDK_DISABLED": "True"}, "off"),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"},
            "off: cannot export traces by otlp http/json",
        ),
    ],
)
def test_it_says_where_telemetry_goes_or_that_it_is_off(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], said: str
) -> None:
    for name in [name for name in os.environ if name.startswith("OTEL_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    lines = introduction(options("--run-id", "r1"), READY, "http://h:1")
    assert [line for line in lines if line.startswith("telemetry")] == [f"telemetry  {said}"]


def refused(*flags: str) -> str:
    """Run `perfledger serve` to its end; return what it says on stderr, with exit code 2."""
    command = [sys.executable, "-P", "-m", "perfledger", "serve", "--port", "0", *flags]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ran.returncode == 2, ran
    return ran.stderr


def test_a_port_in_use_is_refused() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert refused("--model", "reference-small", "--port", port) == (
            f"perfledger: cannot listen on 127.0.0.1:{port}: Address already in use\n"
            "  try: another --port, or end the process that has it (ss -ltnp shows it)\n"
        )


def test_an_unknown_model_is_refused(tmp_path: Path) -> None:
    assert f"perfledger: {tmp_path}/none is not a folder" in refused("--model", f"{tmp_path}/none")


def test_listening_beyond_this_host_needs_a_key() -> None:
    assert refused("--host", "0.0.0.0") == (
        "perfledger: --host 0.0.0.0 is reachable from outside and has no API key\n"
        "  try: set PERFLEDGER_API_KEY, or say --insecure\n"
    )


def test_options_that_never_work_are_refused() -> None:
    flags = ("--max-num-batched-tokens", "4", "--max-num-seqs", "8")
    assert "max_num_batched_tokens is 4, but each of 8 sequences" in refused(*flags)
    assert "'panic' is no step of degrading" in refused("--degrade", "refuse-n,panic")


def family(process: Any) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def child(runtime: Any, number: int) -> psutil.Process:
    """Return a running child, in the order in which they are started: exporter, engine."""
    running = [one for one in family(runtime.process) if one.status() != "zombie"]
    spawned = [one for one in running if "spawn_main" in " ".join(one.cmdline())]
    return sorted(spawned, key=lambda one: one.create_time())[number]


def wait_for(ready: Callable[[], bool], timeout_s: float = 60) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def health(runtime: Any) -> tuple[int, dict[str, Any]]:
    try:
        with urllib.request.urlopen(f"{runtime.url}/health", timeout=10) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def start_stream(runtime: Any, **more: object) -> socket.socket:
    """Start a long streamed answer and read its first chunk."""
    return open_stream(runtime.url, {**PROMPT, **more})


def complete(runtime: Any) -> int:
    request = urllib.request.Request(
        f"{runtime.url}/v1/completions",
        json.dumps({**PROMPT, "max_tokens": 3}).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return int(response.status)
    except urllib.error.HTTPError as error:
        return error.code


def gone(processes: list[psutil.Process]) -> bool:
    return not [one for one in processes if one.is_running() and one.status() != "zombie"]


SHUTDOWN_EVENT = (
    'data: {"error":{"message":"the server is stopping","type":"server_error","param":null,'
    '"code":"shutdown"}}\n\n'
)


def test_it_says_what_runs_and_ends_clean_in_the_middle_of_an_answer(
    tmp_path: Path, start_runtime: Any
) -> None:
    with start_runtime(tmp_path, "--no-telemetry", "--max-num-seqs", "2") as runtime:
        assert [line.split()[0] for line in runtime.log.read_text().splitlines()] == [
            "loading",
            "model",
            "engine",
            "attention",
            "KV",
            "memory",
            "capacity",
            "telemetry",
            "API",
        ]
        assert f"API        {runtime.url}/v1\n" in runtime.log.read_text()
        children = family(runtime.process)
        stream = start_stream(runtime, max_tokens=4000)
        runtime.process.send_signal(signal.SIGTERM)
        assert SHUTDOWN_EVENT in rest_of(stream)
        assert runtime.process.wait(30) == 0
        wait_for(lambda: gone(children))
        assert runtime.log.read_text().splitlines()[-2:] == ["stopping", "stopped"]


def test_ctrl_c_to_the_whole_process_group_ends_it_clean(tmp_path: Path) -> None:
    """As a terminal does it; a second Ctrl-C waits for nobody."""
    log = (tmp_path / "log").open("wb")
    command = [sys.executable, "-P", "-m", "perfledger", "serve", "--model", "reference-small"]
    command += ["--port", "0", "--threads", "1", "--no-telemetry"]
    process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)

    def lines() -> list[str]:
        assert process.poll() is None or process.returncode == 0, (tmp_path / "log").read_text()
        return (tmp_path / "log").read_text().splitlines()

    try:
        wait_for(lambda: any(line.startswith("API") for line in lines()), 120)
        children = family(process)
        os.killpg(process.pid, signal.SIGINT)
        os.killpg(process.pid, signal.SIGINT)
        process.wait(30)
        wait_for(lambda: gone(children))
        assert lines()[-2:] == ["stopping", "stopped"]
    finally:
        process.kill()


def test_ctrl_c_while_the_model_loads(tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "perfledger", "serve", "--model", "reference-small"]
    process = subprocess.Popen(
        [*command, "--port", "0", "--no-telemetry"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    try:
        wait_for(lambda: len(family(process)) == 2)  # the engine and multiprocessing's tracker
        children = family(process)
        time.sleep(0.5)
        process.send_signal(signal.SIGINT)
        out = process.communicate(timeout=30)[0].decode()
        assert (process.returncode, out.splitlines()[-2:]) == (0, ["stopping", "stopped"])
        wait_for(lambda: gone(children))
    finally:
        process.kill()


def test_no_child_outlives_a_killed_parent(tmp_path: Path, start_runtime: Any) -> None:
    with start_runtime(tmp_path, OTEL_TRACES_EXPORTER="none", OTEL_METRICS_EXPORTER="none") as it:
        children = family(it.process)
        assert len(children) == 3
        with start_stream(it):
            it.process.kill()
            it.process.wait()
        wait_for(lambda: gone(children))


MANY = ("--replicas", "2", "--tp", "2")  # an exporter, a tracker and four ranks


def own_temporary_folder(folder: Path) -> dict[str, str]:
    """Return the variable that has all temporary files of a runtime made in its own folder."""
    (folder / "temporary").mkdir()
    return {"TMPDIR": str(folder / "temporary")}


def left_in(folder: Path) -> list[str]:
    return [path.name for path in (folder / "temporary").glob("perfledger-*")]


def test_no_rank_of_no_replica_outlives_a_killed_parent(tmp_path: Path, start_runtime: Any) -> None:
    quiet = {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}
    quiet |= own_temporary_folder(tmp_path)
    with start_runtime(tmp_path, *MANY, **quiet) as it:
        children = family(it.process)
        assert (len(children), len(left_in(tmp_path))) == (6, 2)
        assert "ranks      2 an engine: tp=2\n" in it.log.read_text()
        with start_stream(it):
            it.process.kill()
            it.process.wait()
        wait_for(lambda: gone(children))
        wait_for(lambda: left_in(tmp_path) == [])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_ranks_and_replicas_end_clean_in_the_middle_of_answers(
    tmp_path: Path, start_runtime: Any, number: signal.Signals
) -> None:
    own = own_temporary_folder(tmp_path)
    with start_runtime(tmp_path, *MANY, "--no-telemetry", **own) as it:
        children = family(it.process)
        streams = [start_stream(it, max_tokens=4000) for _ in range(2)]
        busy = [one["in_flight"] for one in health(it)[1]["replicas"]]
        it.process.send_signal(number)
        assert [SHUTDOWN_EVENT in rest_of(stream) for stream in streams] == [True, True]
        assert it.process.wait(30) == 0
        wait_for(lambda: gone(children))
        assert (busy, it.log.read_text().splitlines()[-2:]) == ([1, 1], ["stopping", "stopped"])
        assert left_in(tmp_path) == []


def test_a_killed_rank_is_named_and_its_replica_comes_back(
    tmp_path: Path, start_runtime: Any
) -> None:
    with start_runtime(tmp_path, *MANY, "--no-telemetry") as it:
        ranks = sorted(family(it.process), key=lambda one: one.create_time())[-4:]
        ranks[1].kill()  # of replica 0
        said = "perfledger: replica 0: rank 1 (tp=1) ended with exit code -9: it is started again"
        wait_for(lambda: said in it.log.read_text())
        assert complete(it) == 200
        wait_for(lambda: [r["state"] for r in health(it)[1]["replicas"]] == ["ok", "ok"], 120)
        wait_for(lambda: gone(ranks[:2]))
        assert [complete(it) for _ in range(4)] == [200] * 4


def test_what_a_dead_child_takes_with_it(tmp_path: Path, start_runtime: Any) -> None:
    """Without the exporter all goes on, and the loss is counted; without the engine, no answers."""
    quiet = {"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}
    with start_runtime(tmp_path, **quiet) as runtime:
        child(runtime, 0).kill()
        wait_for(lambda: health(runtime)[1]["telemetry"]["exporter"] == "ended")
        assert [complete(runtime), complete(runtime)] == [200, 200]
        status, report = health(runtime)  # each: its own record and 6 of the engine
        assert (status, report["status"], report["telemetry"]["dropped"]) == (200, "ok", 14)

        stream = start_stream(runtime)
        child(runtime, 0).kill()  # the engine: the exporter is gone
        assert rest_of(stream).endswith(
            'data: {"error":{"message":"the engine process ended","type":"server_error",'
            '"param":null,"code":"error"}}\n\n\r\n0\r\n\r\n'
        )
        status, report = health(runtime)
        assert (status, report["status"], report["detail"], report["in_flight"]) == (
            503,
            "failed",
            "the engine process ended",
            0,
        )
        assert complete(runtime) == 503
        runtime.process.send_signal(signal.SIGTERM)
        assert runtime.process.wait(30) == 1
        assert "perfledger: the engine process ended (exit code -9)" in runtime.log.read_text()


def test_a_model_that_cannot_be_loaded_ends_it_with_the_reason(
    tmp_path: Path, start_runtime: Any
) -> None:
    command = [sys.executable, "-P", "-m", "perfledger", "serve", "--model", "reference-small"]
    command += ["--port", "0", "--no-telemetry", "--kv-memory", "1KiB"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = "perfledger: the KV memory holds no block\n  try: raise --kv-memory\n"
    assert (ran.returncode, ran.stderr) == (2, said)


def test_what_never_reached_a_collector_is_said_at_the_end(
    tmp_path: Path, start_runtime: Any
) -> None:
    environment = {"OTEL_EXPORTER_OTLP_TIMEOUT": "1"}
    with start_runtime(tmp_path, otlp_port=1, **environment) as runtime:
        assert complete(runtime) == 200
        runtime.process.send_signal(signal.SIGINT)
        assert runtime.process.wait(30) == 0
        said = [line for line in runtime.log.read_text().splitlines() if "telemetry lost" in line]
    (line,) = said
    assert re.fullmatch(
        r"telemetry lost: 0 records and [1-9]\d* spans \(OTLP .*127.0.0.1:1\)", line
    )
