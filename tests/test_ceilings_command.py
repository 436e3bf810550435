"""`perfledger ceilings` on this machine: real measurements, kept in a real store."""

import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import active_children
from pathlib import Path

import pytest
from conftest import QUIET_TORCH, wait_until
from s3_servers import BUCKET, s3_server

from perfledger.analyzers.prediction import predict_decode
from perfledger.ceilings_summary import print_summary
from perfledger.instrumented_runtime.ceilings.collective_bandwidth import (
    measure_collectives,
    plan,
)
from perfledger.instrumented_runtime.ceilings.launching import ONE_ROW, tiny_shape
from perfledger.instrumented_runtime.ceilings.storage import measure_storage, storage_steps
from perfledger.schema.ceilings import Absent, Ceiling, Ceilings, choose, text_size
from perfledger.schema.communication import bus_factor
from perfledger.schema.host_facts import device_facts, host_facts
from perfledger.schema.store import Store
from perfledger.schema.store_places import place_at

COMMAND = [sys.executable, "-P", "-m", "perfledger", "ceilings"]
# What is measured on a machine without an accelerator, also quickly.
MEASURED = {
    ("device_memory", "read"),
    ("device_memory", "copy"),
    ("device_memory", "elementwise"),
    ("device_memory", "argmax"),
    ("device_memory", "latency"),
    ("device_memory", "attention"),
    ("registers_sram", "matmul"),
    ("host", "launch"),
    ("host", "step"),
    ("scale_up", "all_reduce algbw"),
    ("scale_up", "all_reduce busbw"),
    ("storage_local", "read"),
    ("storage_local", "write"),
    ("storage_local", "fsync"),
}


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=280,
        env={**os.environ, **QUIET_TORCH, **environment},
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with the ceilings of this host in it."""
    folder = tmp_path_factory.mktemp("ceilings")
    shown = run("--quick", "--threads", "1", "--json", "--store", str(folder))
    assert shown.returncode == 0, shown.stderr
    (folder / "shown.json").write_text(shown.stdout)
    return folder


def kept_in(folder: Path) -> Ceilings:
    (row,) = Store.at(str(folder)).scan("runs").collect().to_dicts()
    return Ceilings.from_row(row)


def test_everything_is_measured_or_said_to_be_absent(store: Path) -> None:
    kept = kept_in(store)
    assert {(item.edge, item.operation) for item in kept.items} == MEASURED
    assert (kept.threads, kept.device) == (1, "cpu")
    absent = {(one.edge, one.operation): one.reason for one in kept.absent}
    assert absent == {
        ("host_device", "h2d"): "the engine computes on the CPU here: host and device memory"
        " are one",
        ("host_device", "d2h"): "the engine computes on the CPU here: host and device memory"
        " are one",
        ("registers_sram", "matmul fp8"): "cpu does not multiply fp8 (NVIDIA from compute"
        " capability 8.9 on does)",
        ("network", "read"): "a second host would have to answer",
        ("storage_object", "put"): "the store is a folder",
        ("storage_object", "get"): "the store is a folder",
    }


def test_they_are_of_this_host(store: Path) -> None:
    kept = kept_in(store)
    chosen = choose([kept.to_row()], {**host_facts(), **device_facts()})
    assert chosen == kept


def test_a_step_can_be_predicted_from_them(store: Path) -> None:
    found = predict_decode(tiny_shape(), ONE_ROW, kept_in(store))
    assert found.ns == pytest.approx(sum(part.ns for part in found.parts))
    assert all(part.ns > 0 and part.amount > 0 for part in found.parts if part.name != "moe")


def test_what_is_shown_fits_a_terminal_and_names_every_table(
    store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_summary(kept_in(store), "./perfledger-data")
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    titles = [
        "device memory, GB/s",
        "latency of one load, ns",
        "matrix products, GFLOP/s",
        "decode attention, GB/s gathered and read",
        "host, µs",
        "collectives, bus bandwidth, GB/s, ranks=2",
        "storage",
    ]
    assert [line for line in lines if line in titles] == titles
    assert sum(line.startswith("not measured: ") for line in lines) == 6


def test_json_is_one_object_with_all_samples(store: Path) -> None:
    told, kept = json.loads((store / "shown.json").read_text()), kept_in(store)
    assert told["run_id"] == kept.run_id
    assert told["host_fingerprint"] == kept.host.host_fingerprint()
    assert [item["value"] for item in told["ceilings"]] == [item.value for item in kept.items]
    assert all(item["samples"] for item in told["ceilings"])
    assert (told["datasheet"], told["threads"], told["device"]) == ([], 1, "cpu")


def test_ctrl_c_ends_it_and_keeps_nothing(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--store", str(tmp_path / "store")],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, **QUIET_TORCH},
    )
    try:
        wait_until((tmp_path / "store").exists, 60, "the store's folder")
        time.sleep(3)  # into the measuring, most likely; wherever it is, it ends alike
        os.killpg(process.pid, signal.SIGINT)
        out, errors = process.communicate(timeout=60)
    finally:
        process.kill()
    assert (process.returncode, out) == (130, "")
    assert errors.endswith("perfledger: interrupted\n")
    assert not Store.at(str(tmp_path / "store")).visible("runs")


@pytest.mark.parametrize(
    ("flags", "what"),
    [
        (("--device", "cuda:7"), "cuda:7 is not there"),
        (("--device", "tpu"), "'tpu' is not"),
        (("--threads", "-1"), "-1 is not between"),
        (("--store", "ftp://x"), "cannot open the store"),
    ],
)
def test_what_cannot_be_is_refused(tmp_path: Path, flags: tuple[str, ...], what: str) -> None:
    refused = run("--store", str(tmp_path), *flags)
    assert (refused.returncode, refused.stdout) == (2, "")
    assert what in refused.stderr


def test_collectives_say_both_bandwidths_and_advance_once_each() -> None:
    steps: list[None] = []
    found = list(measure_collectives(2, "cpu", lambda: steps.append(None), quick=True))
    assert len(steps) == len(plan(quick=True))
    assert all(isinstance(one, Ceiling) for one in found)
    for algorithm, bus in zip(found[::2], found[1::2], strict=True):
        assert isinstance(algorithm, Ceiling) and isinstance(bus, Ceiling)
        assert algorithm.variant == bus.variant
        assert bus.value == pytest.approx(algorithm.value * bus_factor("all_reduce", 2))
    assert not active_children()


def test_ranks_that_cannot_meet_are_a_reason_and_end() -> None:
    steps: list[None] = []
    found = list(measure_collectives(2, "cuda", lambda: steps.append(None), quick=True))
    (absent,) = found
    assert isinstance(absent, Absent) and absent.edge == "scale_up" and absent.reason
    assert len(steps) == len(plan(quick=True))
    assert not active_children()


def test_whoever_stops_listening_leaves_no_ranks_behind() -> None:
    listening = measure_collectives(2, "cpu", lambda: None, quick=False)
    assert isinstance(next(listening), Ceiling)
    listening.close()
    assert not active_children()


def test_storage_is_measured_where_the_store_is_and_leaves_nothing(tmp_path: Path) -> None:
    steps: list[None] = []
    place = place_at(str(tmp_path / "not" / "yet"))
    found = list(measure_storage(place, lambda: steps.append(None), quick=True))
    operations = [one.operation for one in found]
    assert operations == ["write", "read", "fsync", "put", "get"]
    assert len(steps) == storage_steps()
    assert list(tmp_path.iterdir()) == []
    write, read = found[0], found[1]
    assert isinstance(write, Ceiling) and isinstance(read, Ceiling)
    assert text_size(write.variant) == text_size(read.variant)
    assert "page cache" in read.note


def test_a_bucket_is_measured_and_left_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server("moto", tmp_path) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        place = place_at(f"s3://{BUCKET}/speed")
        found = list(measure_storage(place, lambda: None, quick=True))
        left = place.folders()
    assert [(one.edge, one.operation) for one in found] == [
        ("storage_local", "write"),
        ("storage_local", "read"),
        ("storage_local", "fsync"),
        ("storage_object", "put"),
        ("storage_object", "get"),
    ]
    assert all(isinstance(one, Ceiling) for one in found)
    assert left == []


def test_a_bucket_that_is_not_there_is_a_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with s3_server("moto", tmp_path) as variables:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        found = list(measure_storage(place_at("s3://nowhere/x"), lambda: None, quick=True))
    assert isinstance(found[-1], Absent)
    assert (found[-1].edge, found[-1].operation) == ("storage_object", "put")
