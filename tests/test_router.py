"""Two real engines behind one API and a real collector: affinity, death and retry, rolling restart,
and what the store says of each choice."""

import json
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import polars as pl
import psutil
import pytest
from raw_streams import open_stream, rest_of

from perfledger.schema.store import Store

PARENT_SPAN = "b7ad6b7169203331"
TOKEN = "let-me-in"
LONG = "The licence is granted to anyone who reads this sentence again and again. " * 12
# Trace ids of the requests that the store is asked about.
FIRST_A, FIRST_B, AGAIN_A, AGAIN_B, HELD, CUT = range(0x100, 0x106)


def post(
    url: str, path: str, body: dict[str, Any] | None = None, **headers: str
) -> tuple[int, dict[str, Any]]:
    content = None if body is None else json.dumps(body).encode()
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    method = "GET" if body is None else "POST"
    named |= {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}{path}", content, named, method=method)
    try:
        with urllib.request.urlopen(request, timeout=120) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def ask(url: str, trace: int, prompt: str, fault: str = "", **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "ignore_eos": True, **more}
    headers = {"traceparent": f"00-{trace:032x}-{PARENT_SPAN}-01"}
    if fault:
        headers["x_perfledger_fault"] = fault
    status, answer = post(url, "/v1/completions", body, **headers)
    assert status == 200, answer
    return answer


def admin(url: str, path: str, body: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
    return post(url, f"/admin/{path}", body, Authorization=f"Bearer {TOKEN}")


def states(url: str) -> list[str]:
    return [one["state"] for one in post(url, "/health")[1]["replicas"]]


def wait_for(ready: Callable[[], bool], what: str, timeout_s: float = 120) -> None:
    deadline = time.monotonic() + timeout_s
    while not ready():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def start_stream(url: str, trace: int) -> socket.socket:
    """Start a long streamed answer and read its first chunk."""
    body = {"prompt": "Hello", "max_tokens": 3500, "ignore_eos": True}
    return open_stream(url, body, f"traceparent: 00-{trace:032x}-{PARENT_SPAN}-01")


def engines(runtime: Any) -> list[psutil.Process]:
    """Return the engine processes by start: exporter first, then replica 0, replica 1."""
    children = psutil.Process(runtime.process.pid).children(recursive=True)
    spawned = [one for one in children if "spawn_main" in " ".join(one.cmdline())]
    return sorted(spawned, key=lambda one: one.create_time())[1:]


def affinity(url: str) -> None:
    """Two prompts come back to the replicas that have computed them, and hit their caches. In this
    order taking turns would send both to the other one."""
    prompts = {FIRST_A: "A " + LONG, FIRST_B: "B " + LONG}
    for trace, prompt in prompts.items():
        usage = ask(url, trace, prompt)["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
    for trace, prompt in ((AGAIN_B, prompts[FIRST_B]), (AGAIN_A, prompts[FIRST_A])):
        usage = ask(url, trace, prompt + " And then?")["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] >= 128


def death(url: str, runtime: Any) -> None:
    """Kill the engine that streams one answer and holds others back."""
    with ThreadPoolExecutor(4) as pool:
        cut = start_stream(url, CUT)
        (busy,) = [r["replica"] for r in post(url, "/health")[1]["replicas"] if r["in_flight"]]
        other = "1" if busy == "0" else "0"
        assert admin(url, f"replicas/{other}/drain", {})[1]["state"] == "draining"
        held = [pool.submit(ask, url, HELD, "Hi", "queue=9s", max_tokens=2) for _ in range(3)]
        wait_for(lambda: post(url, "/health")[1]["in_flight"] == 4, "requests held back")
        assert admin(url, f"replicas/{other}/resume", {})[1]["state"] == "ok"
        status, kv = admin(url, f"replicas/{busy}/kv")
        assert (status, len(kv["requests"])) == (200, 1)
        assert kv["blocks_used"] + kv["blocks_cached"] + kv["blocks_free"] == kv["blocks_total"]
        engines(runtime)[int(busy)].kill()
        last = rest_of(cut).split("data: ")[-1]
        error = json.loads(last.partition("\n\n")[0])["error"]
        assert error["message"] == f"replica {busy}: the engine process ended"
        assert [one.result(120)["usage"]["completion_tokens"] for one in held] == [2, 2, 2]
    wait_for(lambda: states(url) == ["ok", "ok"], "the restart of the replica")


def rolling(url: str) -> None:
    """Restart both under load: every request is answered."""
    done, answered = threading.Event(), []

    def load(worker: int) -> None:
        while not done.is_set():
            answered.append(ask(url, 0x200 + worker, f"worker {worker}", max_tokens=8))

    with ThreadPoolExecutor(3) as pool:
        workers = [pool.submit(load, worker) for worker in range(3)]
        assert admin(url, "restart", {}) == (202, {"restart": "begun"})
        assert admin(url, "restart", {})[0] == 409
        try:
            wait_for(lambda: admin(url, "replicas")[1]["restart"] == "done", "rolling restart")
        finally:
            done.set()
        for worker in workers:
            worker.result(120)
    assert len(answered) > 3
    starts = [one["starts"] for one in admin(url, "replicas")[1]["replicas"]]
    assert sorted(starts) == [2, 3]


@pytest.fixture(scope="module")
def ledger(
    tmp_path_factory: pytest.TempPathFactory, start_collector: Any, start_runtime: Any
) -> Iterator[Store]:
    """The store after all of it."""
    folder: Path = tmp_path_factory.mktemp("router")
    with start_collector(folder) as collector:
        flags = ("--replicas", "2", "--route", "prefix-affinity", "--allow-faults")
        environment = {"PERFLEDGER_ADMIN_TOKEN": TOKEN}
        with start_runtime(folder, *flags, otlp_port=collector.grpc_port, **environment) as runtime:
            log = runtime.log.read_text()
            assert "replicas   2, routed by prefix-affinity\n" in log
            affinity(runtime.url)
            death(runtime.url, runtime)
            rolling(runtime.url)
            runtime.process.send_signal(signal.SIGTERM)
            assert runtime.process.wait(60) == 0
            said = runtime.log.read_text()
            assert "the engine process ended: it is started again\n" in said
            assert "telemetry lost" not in said
    yield Store.at(str(collector.store))


@pytest.fixture(scope="module")
def spans(ledger: Store) -> pl.DataFrame:
    return ledger.scan("spans").sort("start_ns").collect()


def attributes(span: dict[str, Any]) -> dict[str, Any]:
    pairs: dict[str, Any] = {}
    for pair in span["attributes"]:
        (pairs[pair["key"]],) = [v for k, v in pair.items() if k != "key" and v is not None]
    return pairs


def of_trace(spans: pl.DataFrame, trace: int, name: str) -> list[dict[str, Any]]:
    mine = pl.col("trace_id") == trace.to_bytes(16)
    return spans.filter(mine & (pl.col("name") == name)).to_dicts()


def test_each_choice_is_a_span_below_its_request_below_the_callers(spans: pl.DataFrame) -> None:
    replicas = {}
    for trace in (FIRST_A, FIRST_B, AGAIN_A, AGAIN_B):
        (root,) = of_trace(spans, trace, "text_completion")
        (route,) = of_trace(spans, trace, "route")
        assert root["parent_span_id"] == bytes.fromhex(PARENT_SPAN)
        assert route["parent_span_id"] == root["span_id"]
        assert root["replica"] == route["replica"]
        said = attributes(route)
        assert said["perfledger.route.policy"] == "prefix-affinity"
        assert said["perfledger.route.retries"] == 0
        again = trace in (AGAIN_A, AGAIN_B)
        assert not again or said["perfledger.route.estimated_queue_ns"] >= 0
        assert (said["perfledger.route.prefix_hit_tokens"] >= 128) == again
        assert route["reason"] == ("prefix_hit" if again else "no_prefix")
        replicas[trace] = root["replica"]
    assert replicas[FIRST_A] == replicas[AGAIN_A]
    assert replicas[FIRST_B] == replicas[AGAIN_B]
    assert {replicas[FIRST_A], replicas[FIRST_B]} == {"0", "1"}


def test_a_retry_is_a_second_choice_of_the_same_request(spans: pl.DataFrame) -> None:
    (cut,) = of_trace(spans, CUT, "text_completion")
    routes = of_trace(spans, HELD, "route")
    roots = {root["span_id"]: root for root in of_trace(spans, HELD, "text_completion")}
    assert (len(roots), len(routes)) == (3, 6)
    for span_id, root in roots.items():
        first, second = [one for one in routes if one["parent_span_id"] == span_id]
        assert (first["replica"], second["replica"]) == (cut["replica"], root["replica"])
        assert cut["replica"] != root["replica"]
        assert attributes(second)["perfledger.route.retries"] == 1
        assert attributes(second)["perfledger.route.retry_of"] == first["replica"]
        assert "perfledger.route.retry_of" not in attributes(first)


def test_every_engine_process_has_its_own_trace_of_steps(spans: pl.DataFrame) -> None:
    steps = spans.filter(pl.col("name").is_in(["prefill_step", "decode_step", "mixed_step"]))
    processes = steps.select("replica", "trace_id").unique().get_column("replica").to_list()
    # The first of each; one more after the death; one more of each after the rolling restart. Of
    # those that served nothing there is no step.
    assert set(processes) == {"0", "1"}
    assert 4 <= len(processes) <= 5


def test_requests_have_the_stage_route(ledger: Store) -> None:
    rows = ledger.scan("requests").collect()
    (again,) = rows.filter(pl.col("trace_id") == AGAIN_A.to_bytes(16)).to_dicts()
    stages = {key: value for key, value in again.items() if key.startswith("route")}
    assert stages and all(value > 0 for value in stages.values()), again


def test_each_rank_of_a_replica_is_recorded(
    tmp_path: Path, start_collector: Any, start_runtime: Any
) -> None:
    with (
        start_collector(tmp_path) as collector,
        start_runtime(tmp_path, "--tp", "2", otlp_port=collector.grpc_port) as runtime,
    ):
        ask(runtime.url, 0x300, "Hello")
        runtime.process.send_signal(signal.SIGTERM)
        assert runtime.process.wait(60) == 0
        assert "telemetry lost" not in runtime.log.read_text()
    # The collector writes the rest when it is told to end.
    found = Store.at(str(collector.store)).scan("spans").sort("start_ns").collect()
    assert of_trace(found, 0x300, "route") == []  # one replica: nothing to choose
    (root,) = of_trace(found, 0x300, "text_completion")
    assert root["replica"] == "0"
    steps = found.filter(pl.col("name").is_in(["prefill_step", "decode_step"])).to_dicts()
    seqs: dict[int, list[int]] = {0: [], 1: []}
    for step in steps:
        seqs[step["rank"]].append(step["step_seq"])
        assert attributes(step)["perfledger.layout"] == "tp=2"
    assert seqs[0] == seqs[1] == [1, 2, 3, 4]
    assert len({step["trace_id"] for step in steps}) == 2
