"""`perfledger collect --config`: scraper, samplers, tail sampling, forwarding and tokens, wired.

What each does alone is in the tests of its own; here they run as an operator starts them.
"""

import hashlib
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import grpc
import polars as pl
import pytest
from conftest import free_port, perfledger
from otlp_client import (
    PROTOBUF,
    TRACE_SERVICE,
    call,
    post,
    printed_counts,
    span,
    stored,
    traces,
    wait_until,
)
from prometheus_client import CollectorRegistry, Counter, Histogram, start_http_server
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from perfledger.collectors.sampling.sampling_policy import SamplingPolicy
from perfledger.schema.store import Store

Start = Callable[..., AbstractContextManager[object]]
OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}
PREFIX = "perfledger_collector_items_"


def configured(folder: Path, content: str) -> tuple[str, str]:
    """Write a configuration and return the flags that name it."""
    folder.mkdir(exist_ok=True)
    path = folder / "collect.toml"
    path.write_text("[collect]\nsettle = 1\n" + content)
    return "--config", str(path)


def items(port: int) -> dict[tuple[str, str, str], float]:
    """Return the collector's own counts of items, by fate, signal and namespace."""
    status, _, page = post(port, b"", OPENMETRICS, "/metrics", "GET")
    assert status == 200
    found: dict[tuple[str, str, str], float] = {}
    for family in text_string_to_metric_families(page.decode()):
        for sample in family.samples:
            if sample.name.startswith(PREFIX):
                fate = sample.name.removeprefix(PREFIX).removesuffix("_total")
                key = (fate, sample.labels["signal"], sample.labels["namespace"])
                found[key] = found.get(key, 0) + sample.value
    return found


def assert_adds_up(found: dict[tuple[str, str, str], float]) -> None:
    for signal, namespace in {key[1:] for key in found}:
        counts = {key[0]: n for key, n in found.items() if key[1:] == (signal, namespace)}
        assert counts["received"] == counts["accepted"] + counts.get("rejected", 0), counts
        fates = ("written", "waiting", "deduplicated", "sampled_away")
        assert counts["accepted"] == sum(counts.get(fate, 0) for fate in fates), counts


@contextmanager
def exposing() -> Iterator[int]:
    """Serve a page of prometheus_client; yield its port."""
    registry, port = CollectorRegistry(), free_port()
    asked = Counter("asked", "Requests", ["code"], registry=registry)
    asked.labels("200").inc(3)
    asked.labels("500").inc(1)
    took = Histogram("took_seconds", "Seconds", buckets=(0.1, 1.0), registry=registry)
    for seconds in (0.05, 0.5, 5.0):
        took.observe(seconds)
    server, thread = start_http_server(port, "127.0.0.1", registry)
    try:
        yield port
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_a_page_a_host_and_a_process_are_sampled_into_the_store(
    tmp_path: Path, start_collector: Start
) -> None:
    own = free_port()
    waiting, stop = threading.Event(), threading.Event()

    def wait() -> None:
        waiting.set()
        stop.wait(120)

    thread = threading.Thread(target=wait, name="idler")
    thread.start()
    try:
        with exposing() as port:
            config = configured(
                tmp_path,
                f'[[scrape]]\njob = "svc"\ntargets = ["127.0.0.1:{port}"]\ninterval_s = 0.5\n'
                f"timeout_s = 0.5\n[host]\ninterval_s = 0.5\n"
                f"[wait_states]\npid = {os.getpid()}\nreport_interval_s = 0.5\n",
            )
            metrics = ("--metrics", f"127.0.0.1:{own}")
            with start_collector(tmp_path, *config, *metrics) as collector:
                store = Store.at(str(collector.store))

                def has_all() -> bool:
                    names = set(store.collect("points", lambda q: q.select("name"))["name"])
                    wanted = ("asked", "took", "system.cpu", "perfledger.wait")
                    return all(any(n.startswith(w) for n in names) for w in wanted)

                for _ in range(5):
                    assert_adds_up(items(own))
                    time.sleep(0.1)
                wait_until(has_all, 40)
                found = items(own)
                assert_adds_up(found)
                assert found["written", "metrics", "default"] > 0
    finally:
        stop.set()
        thread.join()
    assert collector.process.returncode == 0
    points = stored(collector.store, "points").with_columns(
        labels=pl.col("attributes").list.eval(pl.element().struct.field("text")).list.join(",")
    )
    asked = points.filter(pl.col("name").str.starts_with("asked"))
    assert set(asked.select("labels", "value").unique().rows()) >= {("200", 3.0), ("500", 1.0)}
    took = points.filter(pl.col("name").str.starts_with("took"), pl.col("kind") == "histogram")
    assert took["bounds"].to_list()[0] == [0.1, 1.0]
    assert took["bucket_counts"].to_list()[0] == [1, 1, 1]
    waits = points.filter(pl.col("name") == "perfledger.wait.time_ns")
    assert waits.filter(pl.col("labels").str.contains("idler")).height > 0
    received, written, rejected, left = printed_counts(collector.log)["points"]
    assert (received, rejected, left) == (written, 0, 0)
    assert points.height == written


def request_of(trace_id: int, *, failed: bool = False) -> bytes:
    now_ns = time.time_ns()
    times = {"start_time_unix_nano": now_ns, "end_time_unix_nano": now_ns + 1_000}
    status = {"code": 2} if failed else {}
    root = span(1, trace_id, name="chat", kind=2, status=status, **times)
    child = span(2, trace_id, name="queue", parent_span_id=(1).to_bytes(8, "big"), **times)
    return traces(root, child)


def test_a_share_is_kept_with_all_errors_and_every_request_is_derived(
    tmp_path: Path, start_collector: Start
) -> None:
    own, share, requests, errors = free_port(), 0.25, 400, 20
    config = configured(tmp_path, f"[sampling]\nshare = {share}\nwait_s = 1\n")
    # Spread over all randomness, so that just a share of them is above the threshold.
    ids = [(n << 64) | ((n * 2**56) // requests) for n in range(1, requests)] + [requests << 64]
    failed = set(ids[:: requests // errors])
    with start_collector(tmp_path, *config, "--metrics", f"127.0.0.1:{own}") as collector:
        for trace_id in ids:
            body = request_of(trace_id, failed=trace_id in failed)
            assert post(collector.http_port, body)[0] == 200
        assert_adds_up(items(own))
        wait_until(lambda: items(own)["waiting", "traces", "default"] == 0, 30)
        found = items(own)
        assert_adds_up(found)
    by_chance = {one for one in ids if one % 2**56 >= SamplingPolicy(share=share).threshold}
    spans = stored(collector.store, "spans")
    kept = {int.from_bytes(one, "big") for one in spans["trace_id"]}
    assert kept == by_chance | failed
    assert abs(len(by_chance) - share * requests) <= 1
    assert found["written", "traces", "default"] == spans.height == 2 * len(kept)
    assert found["sampled_away", "traces", "default"] == 2 * requests - spans.height
    shares = dict(spans.select("trace_id", "kept_share").iter_rows())
    assert {shares[one.to_bytes(16, "big")] for one in failed} == {None}
    assert {shares[one.to_bytes(16, "big")] for one in by_chance - failed} == {share}
    estimate = sum(1 / (one or 1.0) for one in spans["kept_share"])
    assert abs(estimate - 2 * requests) / (2 * requests) < 0.03
    derived = stored(collector.store, "requests")
    assert derived.height == requests
    assert derived.filter(pl.col("status") == "error").height == len(failed)


@contextmanager
def collecting(folder: Path, ports: tuple[int, int], *flags: str) -> Iterator[Path]:
    """Run a collector on ports that its peer knows before it starts; yield its store."""
    addresses = ["--otlp-grpc", f"127.0.0.1:{ports[0]}", "--otlp-http", f"127.0.0.1:{ports[1]}"]
    arguments = ["--store", str(folder / "store"), "--metrics", "off", *addresses, *flags]
    with perfledger("collect", *arguments, log=folder / "collect.log"):
        wait_until(lambda: all(is_open(port) for port in ports), 60)
        yield folder / "store"


def is_open(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.parametrize("protocol", ["grpc", "http/protobuf"])
def test_two_collectors_that_forward_to_each_other_hold_the_same_spans_once(
    tmp_path: Path, protocol: str
) -> None:
    """A circle: what one forwards the other stores, sends back, and is refused."""
    ports = {name: (free_port(), free_port()) for name in "ab"}
    flags = {}
    for name, peer in ("ab", "ba"):
        port = ports[peer][protocol != "grpc"]
        forward = f'[forward]\nendpoint = "http://127.0.0.1:{port}"\nprotocol = "{protocol}"\n'
        flags[name] = configured(tmp_path / name, forward)
    with (
        collecting(tmp_path / "a", ports["a"], *flags["a"]) as first,
        collecting(tmp_path / "b", ports["b"], *flags["b"]) as second,
    ):
        for trace_id in range(1, 21):
            assert post(ports["a"][1], request_of(trace_id))[0] == 200
        for trace_id in range(21, 31):
            assert call(ports["b"][0], request_of(trace_id)) == b""
        for store in (first, second):
            wait_until(lambda store=store: stored(store, "spans").height == 60, 30)
    rows = [
        stored(store, "spans").drop("received_ns").sort("trace_id", "span_id").to_dicts()
        for store in (first, second)
    ]
    assert rows[0] == rows[1] and len(rows[0]) == 60
    for name in ports:
        log = tmp_path / name / "collect.log"
        assert printed_counts(log)["spans"] == [60, 60, 0, 0]
        # What waits goes together, so these are fewer than there were requests.
        said = re.findall(
            r"^(forward dropped \w+|requests refused \d+): \d+$", log.read_text(), re.M
        )
        assert said == ["forward dropped refused", "requests refused 508"]


def test_tokens_lead_to_two_namespaces_each_with_its_log(tmp_path: Path) -> None:
    secrets, namespaces = ("a-long-secret-of-blue", "a-long-secret-of-red!"), ("blue", "red")
    digests = [hashlib.sha256(secret.encode()).hexdigest() for secret in secrets]
    entries = [
        f'[[token]]\nnamespace = "{name}"\nsha256 = "{digest}"\n'
        for name, digest in zip(namespaces, digests, strict=True)
    ]
    tokens = tmp_path / "tokens.toml"
    tokens.write_text("".join(entries))
    tokens.chmod(0o600)
    config = configured(
        tmp_path,
        f'tokens_file = "{tokens}"\nlog_folder = "{tmp_path / "logs"}"\n[host]\ninterval_s = 0.5\n',
    )
    ports, own = (free_port(), free_port()), free_port()
    metrics = ("--metrics", f"127.0.0.1:{own}")  # the last one wins
    with collecting(tmp_path, ports, *config, *metrics) as folder:
        for number, secret in enumerate(secrets, 1):
            bearer = {"Authorization": f"Bearer {secret}"}
            assert post(ports[1], request_of(number), {**PROTOBUF, **bearer})[0] == 200
            with grpc.insecure_channel(f"127.0.0.1:{ports[0]}") as channel:
                export = channel.unary_unary(f"/{TRACE_SERVICE}/Export")
                metadata = [("authorization", f"Bearer {secret}")]
                assert export(request_of(10 + number), timeout=30, metadata=metadata) == b""
        assert post(ports[1], request_of(99))[0] == 401
        assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["blue", "red"]
        for name in namespaces:
            assert list((tmp_path / "logs" / name).glob("lock"))
        store = Store.at(str(folder), "blue")
        wait_until(lambda: store.collect("points").height > 0, 30)
        found = items(own)
        assert_adds_up(found)
        assert {key[2] for key in found} == {"blue", "red"}
    for number, name in enumerate(namespaces, 1):
        spans = Store.at(str(folder), name).collect("spans")
        assert {int.from_bytes(one, "big") for one in spans["trace_id"]} == {number, 10 + number}
        assert list((tmp_path / "logs" / name).glob("*.wal")) == []
    assert Store.at(str(folder), "red").files("points") == []  # companions go to the first
