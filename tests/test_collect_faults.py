"""`perfledger collect` as a process that is killed, damaged, overfilled and stopped.

A full disk is in test_collect_disk.py, kills under load in test_collect_kill.py; bombs, stalls and
half-open connections in test_otlp_receiver.py and test_http_server.py; a clock set back is in
test_storing.py.
"""

import http.client
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import grpc
import pyarrow.parquet as pq
import pytest
from collect_pipeline import logs, metrics, rows_in_files, same_spans, span_numbers
from otlp_client import (
    call,
    grpc_refusal,
    post,
    printed_counts,
    stored,
    wait_until,
)

from perfledger.collectors.wal.log_segments import HEADER_BYTES, RECORD_BYTES
from perfledger.schema.errors import PartialInputError
from perfledger.schema.store import Store

Start = Callable[..., AbstractContextManager[object]]
QUICK = ("--settle", "1")


def kill(collector: object) -> None:
    collector.process.kill()
    collector.process.wait()


def numbers_in(folder: Path) -> list[int]:
    return span_numbers(Store.at(str(folder)))


def log_files(store: Path) -> list[Path]:
    return sorted((store / "default" / "wal").glob("*.wal"))


@contextmanager
def nothing_can_be_written(store: Path) -> Iterator[None]:
    """Put a file where the folder of the spans' files would be."""
    spans = store / "default" / "spans"
    kept = spans.with_name("spans.aside")
    if spans.exists():
        spans.rename(kept)
    spans.write_text("in the way")
    try:
        yield
    finally:
        spans.unlink()
        if kept.exists():
            kept.rename(spans)


# --- The log ------------------------------------------------------------------------------


def test_after_a_kill_it_serves_at_once_and_stores_what_was_acknowledged(
    tmp_path: Path, start_collector: Start
) -> None:
    with start_collector(tmp_path, *QUICK) as collector, nothing_can_be_written(collector.store):
        for first in range(1, 100, 10):
            request = same_spans(*range(first, first + 10))
            if first % 20 == 1:
                assert post(collector.http_port, request)[0] == 200
            else:
                assert call(collector.grpc_port, request) == b""
        assert post(collector.http_port, metrics(1.0, 2.0), path="/v1/metrics")[0] == 200
        assert post(collector.http_port, logs(9), path="/v1/logs")[0] == 200
        kill(collector)
        assert len(log_files(collector.store)) >= 1
    with start_collector(tmp_path, *QUICK) as collector:
        assert post(collector.http_port, same_spans(500))[0] == 200
        wait_until(lambda: log_files(collector.store) == [])
    assert numbers_in(collector.store) == [*range(1, 101), 500]
    assert rows_in_files(Store.at(str(collector.store))) == 101
    assert sorted(stored(collector.store, "points")["value"]) == [1.0, 2.0]
    assert stored(collector.store, "logs").height == 1
    assert printed_counts(collector.log)["spans"] == [101, 101, 0, 0]


def test_a_damaged_log_costs_what_is_damaged_and_never_the_start(
    tmp_path: Path, start_collector: Start
) -> None:
    with start_collector(tmp_path, *QUICK) as collector, nothing_can_be_written(collector.store):
        for at in range(1, 7):
            assert post(collector.http_port, same_spans(at, 10 + at))[0] == 200
        kill(collector)
    files = log_files(collector.store)
    with open(files[0], "r+b") as first:
        first.seek(HEADER_BYTES + RECORD_BYTES + 10)
        byte = first.read(1)
        first.seek(-1, os.SEEK_CUR)
        first.write(bytes([byte[0] ^ 1]))
    os.truncate(files[-1], files[-1].stat().st_size - 3)
    files[0].with_name("1-00000001.0.wal").write_bytes(b"not a log at all" * 100)
    files[0].with_name("2-00000001.0.wal").write_bytes(b"")
    with start_collector(tmp_path, *QUICK) as collector:
        assert call(collector.grpc_port, same_spans(100)) == b""
        wait_until(lambda: log_files(collector.store) == [])
    assert numbers_in(collector.store) == [2, 3, 4, 5, 12, 13, 14, 15, 100]
    quarantined = [path.suffix for path in (files[0].parent / "quarantine").iterdir()]
    assert sorted(quarantined) == [".damaged", ".damaged", ".torn", ".torn"]
    assert "log quarantined bytes" in collector.log.read_text()


def test_a_second_collector_on_a_log_is_told_who_has_it(
    tmp_path: Path, start_collector: Start
) -> None:
    with start_collector(tmp_path) as collector:
        ports = ["--otlp-grpc", "127.0.0.1:0", "--otlp-http", "127.0.0.1:0", "--metrics", "off"]
        command = [sys.executable, "-P", "-m", "perfledger", "collect", *ports]
        done = subprocess.run(
            [*command, "--store", str(collector.store)], capture_output=True, text=True, timeout=60
        )
        assert done.returncode == 2 and "Traceback" not in done.stderr
        assert f"process {collector.process.pid} already writes this log" in done.stderr
        assert "--store" in done.stderr
        assert post(collector.http_port, same_spans(1))[0] == 200
    assert numbers_in(collector.store) == [1]


def test_a_log_at_its_limit_refuses_until_segments_are_files(
    tmp_path: Path, start_collector: Start
) -> None:
    acknowledged = []
    with start_collector(tmp_path, *QUICK, "--log-mib", "1") as collector:
        with nothing_can_be_written(collector.store):
            for at in range(1, 200):
                request = same_spans(*range(at * 20, at * 20 + 20), name="x" * 1_000)
                status, headers, _ = post(collector.http_port, request)
                if status != 200:
                    break
                acknowledged += list(range(at * 20, at * 20 + 20))
            assert (status, headers["retry-after"]) == (503, "1")
            with pytest.raises(grpc.RpcError) as caught:
                call(collector.grpc_port, request)
            refusal = (grpc.StatusCode.UNAVAILABLE, ["RetryInfo"], 1.0)
            assert grpc_refusal(caught.value) == refusal
        wait_until(lambda: post(collector.http_port, same_spans(9_999))[0] == 200)
    assert 400 < len(acknowledged) < 1_100
    assert numbers_in(collector.store) == [*acknowledged, 9_999]
    said = collector.log.read_text()
    assert said.count("cannot write to the log, requests are refused") == 1


# --- The store ----------------------------------------------------------------------------


@pytest.mark.parametrize("damage", ["flipped", "cut short"])
def test_a_damaged_file_does_not_keep_it_from_starting_and_is_named(
    tmp_path: Path, start_collector: Start, damage: str
) -> None:
    with start_collector(tmp_path, *QUICK) as collector:
        assert post(collector.http_port, same_spans(1, 2))[0] == 200
    store = Store.at(str(collector.store))
    (file,) = store.files("spans")
    content = file.read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 0x10]) + content[middle + 1 :]
    file.write_bytes(flipped if damage == "flipped" else content[:-100])
    with start_collector(tmp_path, *QUICK) as collector:
        assert post(collector.http_port, same_spans(3))[0] == 200
        assert collector.process.poll() is None
    (new,) = [path for path in store.files("spans") if path != file]
    assert pq.read_metadata(new).num_rows == 1
    with pytest.raises(PartialInputError, match=file.name):
        store.collect("spans")
    assert "Traceback" not in collector.log.read_text()


def test_sigterm_while_nothing_can_be_written_says_so_and_the_next_start_stores_it(
    tmp_path: Path, start_collector: Start
) -> None:
    with start_collector(tmp_path, *QUICK) as collector, nothing_can_be_written(collector.store):
        assert post(collector.http_port, same_spans(1, 2))[0] == 200
        wait_until(lambda: "cannot write to the store" in collector.log.read_text())
        assert post(collector.http_port, same_spans(3))[0] == 200
        collector.process.send_signal(signal.SIGTERM)
        assert collector.process.wait(30) == 1
    said = collector.log.read_text()
    assert "3 items could not be written to the store yet; they are in the log" in said
    assert "Traceback" not in said
    assert printed_counts(collector.log)["spans"] == [3, 0, 0, 3]
    with start_collector(tmp_path, *QUICK) as collector:
        pass
    assert collector.process.returncode == 0
    assert numbers_in(collector.store) == [1, 2, 3]


# --- What is sent again -------------------------------------------------------------------


def test_requests_sent_again_over_any_way_and_any_restart_count_once(
    tmp_path: Path, start_collector: Start
) -> None:
    request = same_spans(*range(1, 51))
    for ends in (kill, None, kill, None):
        with start_collector(tmp_path, *QUICK) as collector:
            for _ in range(2):
                assert post(collector.http_port, request)[0] == 200
                assert call(collector.grpc_port, request) == b""
            assert post(collector.http_port, metrics(1.0, 2.0), path="/v1/metrics")[0] == 200
            assert post(collector.http_port, logs(9), path="/v1/logs")[0] == 200
            if ends is not None:
                ends(collector)
    store = Store.at(str(collector.store))
    assert numbers_in(collector.store) == list(range(1, 51))
    assert rows_in_files(store) == 50
    # Of points and log records the reader drops what came again.
    assert (stored(collector.store, "points").height, rows_in_files(store, "points")) == (2, 8)
    assert stored(collector.store, "logs").height == 1


def test_a_connection_cut_before_the_answer_is_no_harm(
    tmp_path: Path, start_collector: Start
) -> None:
    with start_collector(tmp_path, *QUICK) as collector:
        for at in range(1, 40):
            connection = http.client.HTTPConnection("127.0.0.1", collector.http_port)
            headers = {"Content-Type": "application/x-protobuf"}
            connection.request("POST", "/v1/traces", same_spans(at), headers)
            connection.close()
        with grpc.insecure_channel(f"127.0.0.1:{collector.grpc_port}") as channel:
            export = channel.unary_unary(
                "/opentelemetry.proto.collector.trace.v1.TraceService/Export"
            )
            for at in range(100, 140):
                export.future(same_spans(at)).cancel()
            assert export(same_spans(200), timeout=30) == b""
        for at in range(300, 320):
            assert post(collector.http_port, same_spans(at))[0] == 200
    found = set(numbers_in(collector.store))
    assert {200, *range(300, 320)} <= found
    received, written, rejected, waiting = printed_counts(collector.log)["spans"]
    assert (received, written, rejected, waiting) == (len(found), len(found), 0, 0)
    assert "failed" not in collector.log.read_text()
