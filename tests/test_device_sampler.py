"""The device sampler: energy of packages, perf events, events of devices, and all of it wired."""

import asyncio
import json
import os
import shutil
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import polars as pl
import pytest
from metrics_sink import MemorySink, attributes
from nvml_sessions import FIRST, SECOND, everything_said, replaying, run_counters, session
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from otlp_client import stored, wait_until
from test_collect_companions import configured
from test_collect_flags import options

from perfledger.collectors.device.device_metrics import DEVICE_METRICS
from perfledger.collectors.device.device_sampler import DeviceSampler
from perfledger.collectors.device.device_settings import DeviceSettings
from perfledger.collectors.device.perf_events import SoftwareEvents, online_cpus
from perfledger.collectors.device.rapl import Rapl
from perfledger.collectors.host.sampling_loop import run_sampler
from perfledger.collectors.otlp_rows import LOGS, Outcome, Signal
from perfledger.schema.errors import UsageError
from perfledger.schema.store import Store

Start = Callable[..., AbstractContextManager[object]]
RANGE = 262_143_328_850  # microjoules, as packages of today have


# --- Energy of packages ---------------------------------------------------------------------


def zone(powercap: Path, folder: str, name: str, microjoules: int) -> Path:
    place = powercap / folder
    place.mkdir(parents=True)
    (place / "name").write_text(f"{name}\n")
    (place / "max_energy_range_uj").write_text(f"{RANGE}\n")
    (place / "energy_uj").write_text(f"{microjoules}\n")
    return place / "energy_uj"


def joules(rapl: Rapl, at_s: float) -> dict[str, float]:
    readings = list(rapl.read(round(at_s * 1e9)))
    assert {reading.metric.name for reading in readings} <= {"hw.energy"}
    return {" ".join(str(v) for _, v in r.attributes): r.value for r in readings}


def test_packages_and_their_memory_count_and_nothing_counts_twice(tmp_path: Path) -> None:
    counters = {
        name: zone(tmp_path, folder, name, 1_000_000)
        for folder, name in (
            ("intel-rapl:0", "package-0"),
            ("intel-rapl:0:0", "core"),
            ("intel-rapl:0:1", "dram"),
            ("intel-rapl:1", "package-1"),
            ("intel-rapl:2", "psys"),
        )
    }
    rapl = Rapl(tmp_path)
    assert rapl.why_not == ""
    first = joules(rapl, 0)
    assert first == {
        "intel-rapl:0 cpu package-0": 1.0,
        "intel-rapl:0:1 memory dram": 1.0,
        "intel-rapl:1 cpu package-1": 1.0,
    }
    counters["package-1"].write_text("3500000\n")
    assert joules(rapl, 0.1) == first | {"intel-rapl:1 cpu package-1": 3.5}
    rapl.close()
    assert joules(rapl, 0.2) == {}


def test_a_package_that_wraps_goes_on_and_one_that_was_reset_starts_anew(tmp_path: Path) -> None:
    energy = zone(tmp_path, "intel-rapl:0", "package-0", RANGE - 1_000_000)
    rapl, series = Rapl(tmp_path), "intel-rapl:0 cpu package-0"
    start = joules(rapl, 0)[series]
    energy.write_text("4000000\n")  # 5 J in 0.1 s: 50 W
    assert joules(rapl, 0.1)[series] - start == pytest.approx(5.0)
    energy.write_text("3000000\n")  # a wrap would be 262 kJ in 0.1 s
    assert joules(rapl, 0.2) == {}
    energy.write_text("3500000\n")
    assert joules(rapl, 0.3)[series] == pytest.approx(3.5)
    # In a minute it could have gone round: what was used since is not known.
    energy.write_text("4000000\n")
    assert joules(rapl, 60.3) == {}


def test_without_rapl_and_with_one_that_cannot_be_read_the_reason_is_told(tmp_path: Path) -> None:
    assert Rapl(tmp_path / "none").why_not == "the kernel shows no RAPL zone"
    energy = zone(tmp_path, "intel-rapl:0", "package-0", 1)
    zone(tmp_path, "intel-rapl:1", "package-1", 1)
    (tmp_path / "intel-rapl:1/max_energy_range_uj").write_text("much\n")
    rapl = Rapl(tmp_path)
    assert rapl.absent == {"intel-rapl:1": "not understood"}
    energy.write_text("gone\n")
    assert joules(rapl, 0) == {}
    assert rapl.absent["intel-rapl:0"] == "not understood"
    energy.unlink()
    shutil.rmtree(tmp_path / "intel-rapl:1")
    assert Rapl(tmp_path).why_not == "No such file or directory"


# --- perf -----------------------------------------------------------------------------------


def test_software_events_are_counted_or_the_reason_is_told() -> None:
    events = SoftwareEvents()
    before = {r.attributes: r.value for r in events.read()}
    if events.why_not:
        assert before == {}
        return
    for _ in range(20):
        time.sleep(0.001)
    bytearray(64 * 2**20)  # pages that were never touched
    after = {r.attributes: r.value for r in events.read()}
    gained = {series[0][1]: after[series] - before[series] for series in after}
    assert gained["context_switches"] >= 20
    assert gained["minor_faults"] > 0
    assert set(gained) == {"context_switches", "cpu_migrations", "minor_faults", "major_faults"}
    assert min(gained.values()) >= 0
    events.close()
    assert list(events.read()) == []


def test_the_kernels_lists_of_cpus() -> None:
    assert online_cpus("0\n") == [0]
    assert online_cpus("0-2,5,8-9\n") == [0, 1, 2, 5, 8, 9]
    assert len(online_cpus(Path("/sys/devices/system/cpu/online").read_text())) >= 1


# --- The sampler ----------------------------------------------------------------------------


class AllSignalsSink(MemorySink):
    """Takes logs too."""

    def __init__(self) -> None:
        super().__init__()
        self.logs: list[bytes] = []

    async def export(self, signal: Signal, body: bytes, hops: tuple[str, ...] = ()) -> Outcome:
        if signal is LOGS:
            self.logs.append(body)
            return Outcome(signal)
        return await super().export(signal, body, hops)


def events_in(bodies: list[bytes]) -> list[tuple[str, float, int, dict[str, object]]]:
    return [
        (
            record.event_name,
            (record.time_unix_nano - 1_790_000_000_000_000_000) / 1e9,
            record.severity_number,
            dict(attributes(record.attributes)),
        )
        for body in bodies
        for group in ExportLogsServiceRequest.FromString(body).resource_logs
        for record in group.scope_logs[0].log_records
    ]


EVENTS = [
    (
        "perfledger.device.lost",
        3.0,
        17,
        {"hw.id": SECOND, "hw.type": "gpu", "error.type": "GPU_IS_LOST"},
    ),
    ("perfledger.device.found", 20.0, 9, {"hw.id": SECOND, "hw.type": "gpu"}),
]


def test_what_happens_to_a_device_is_told_once_at_its_time() -> None:
    _, bodies = everything_said(replaying("lost_and_found"))
    assert events_in(bodies) == EVENTS
    _, bodies = everything_said(replaying("h100_pair"))
    error = {"hw.id": SECOND, "hw.type": "gpu", "error.type": "XID_13"}
    assert events_in(bodies) == [("perfledger.device.error", 1.0, 17, error)]


def test_the_loop_sends_points_and_events_and_ends_with_the_recording() -> None:
    sink, sampler = AllSignalsSink(), replaying("lost_and_found", period_s=0.01)
    asyncio.run(asyncio.wait_for(run_sampler(sampler, sink, asyncio.Event()), 60))
    assert events_in(sink.logs) == EVENTS
    times = {
        point.time_unix_nano
        for body in sink.bodies
        for group in ExportMetricsServiceRequest.FromString(body).resource_metrics
        for metric in group.scope_metrics[0].metrics
        if metric.name == "hw.energy"
        for point in metric.sum.data_points
    }
    assert len(times) == 22
    assert sampler.counts["events"] == 2 and sampler.counts["devices"] == 2
    assert sampler.counts["defects"] == 0 and sampler.counts["counters_restarted"] == 1


def test_samples_are_sent_on_together() -> None:
    often = replaying("h100_pair", report_interval_s=0.1)
    seldom = replaying("h100_pair", report_interval_s=3600.0)
    bodies = []
    while not seldom.ended():
        bodies.append(seldom.sample())
    assert [body is not None for body in bodies] == [False] * 13 + [True]
    assert everything_said(often)[0].keys() == everything_said(replaying("h100_pair"))[0].keys()


def test_a_resource_says_which_device_and_how_its_times_are_meant() -> None:
    sampler = replaying("h100_pair")
    request = ExportMetricsServiceRequest()
    while not sampler.ended():
        request.MergeFromString(sampler.sample() or b"")
    resources = [attributes(group.resource.attributes) for group in request.resource_metrics]
    of_devices = [one for one in resources if "hw.model" in one]
    for one in of_devices:
        assert (one["hw.model"], one["hw.driver_version"]) == ("NVIDIA H100 80GB HBM3", "580.00.00")
    for one in resources:
        assert one["service.name"] == "perfledger.device"
        assert one["perfledger.device.replay"] == "synthetic"
        assert one["perfledger.clock.wall_ns"] > 10**18
        assert one["perfledger.clock.monotonic_ns"] > 0
    assert 0 < len(of_devices) < len(resources)


def test_on_this_machine_nothing_is_zero_for_want_of_a_source() -> None:
    sampler = DeviceSampler(DeviceSettings(period_s=0.05, report_interval_s=3600))
    sampler.sample()
    body = sampler.close()
    assert body is not None
    request = ExportMetricsServiceRequest.FromString(body)
    said = {m.name for g in request.resource_metrics for m in g.scope_metrics[0].metrics}
    declared = {metric.name for metric in DEVICE_METRICS}
    assert "perfledger.device.source.present" in said <= declared
    absent = {one.source: one.why_not for one in sampler.absences() if one.why_not}
    if "nvml" in absent:
        assert not any(name.startswith(("hw.gpu", "perfledger.gpu")) for name in said)
    if "rapl" in absent:
        assert "hw.energy" not in said or "nvml" not in absent
    assert ("perf" in absent) == ("perfledger.perf.events" not in said)


# --- Settings, and the whole collector ----------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"period": 1}, "unknown setting: period"),
        ({"period_s": 0}, "bad value of period_s"),
        ({"slow_interval_s": "1"}, "bad value of slow_interval_s"),
        ({"gpus": 1}, "bad value of gpus"),
        ({"replay": 3}, "bad value of replay"),
    ],
)
def test_bad_settings_are_named(table: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        DeviceSettings.from_toml(table)


def test_the_flag_turns_devices_on_and_the_table_wins(tmp_path: Path) -> None:
    assert options().tables["device"] == {}
    assert options("--gpu").tables["device"] == {"period_s": 0.1}
    assert options("--gpu", "--gpu-period", "0.5").tables["device"] == {"period_s": 0.5}
    assert options("--gpu-period", "0.5").tables["device"] == {}
    config = configured(tmp_path, "gpu = true\n[device]\nperiod_s = 2\nperf = false\n")
    assert options(*config).tables["device"] == {"period_s": 2, "perf": False}
    assert DeviceSettings.from_toml({"replay": "a"}, tmp_path).replay == tmp_path / "a"


def test_a_recording_goes_through_the_collector_into_the_store(
    tmp_path: Path, start_collector: Start
) -> None:
    shutil.copy(session("lost_and_found"), tmp_path / "session.jsonl")
    table = '[device]\nreplay = "session.jsonl"\nperiod_s = 0.02\nreport_interval_s = 0.1\n'
    config = configured(tmp_path, table)
    with start_collector(tmp_path, *config) as collector:
        store = Store.at(str(collector.store))
        wait_until(lambda: store.collect("logs", lambda q: q).height == 2, 40)
    points = stored(collector.store, "points")
    energy = points.filter(pl.col("name") == "hw.energy").sort("time_ns")
    of_first = energy.filter(hardware_id(FIRST))
    assert of_first["value"].to_list() == [1000.0 + 700.0 * k for k in range(22)]
    assert of_first["time_ns"].diff().drop_nulls().unique().to_list() == [10**9]
    assert energy.filter(hardware_id(SECOND))["start_ns"].n_unique() == 2
    logs = stored(collector.store, "logs").sort("time_ns")
    assert logs["severity"].to_list() == [17, 9]
    names = [next(a["text"] for a in row if a["key"] == "event.name") for row in logs["attributes"]]
    assert names == ["perfledger.device.lost", "perfledger.device.found"]
    resource = json.loads(of_first["resource_attributes"][0])
    assert resource["perfledger.device.replay"] == "synthetic"


def hardware_id(wanted: str) -> pl.Expr:
    found = pl.col("attributes").list.eval(
        pl.element().filter(pl.element().struct.field("key") == "hw.id").struct.field("text")
    )
    return found.list.first() == wanted


def test_the_flag_on_this_machine_says_what_is_not_here(
    tmp_path: Path, start_collector: Start
) -> None:
    with start_collector(tmp_path, "--gpu", "--gpu-period", "0.1") as collector:
        store = Store.at(str(collector.store))

        def is_told() -> bool:
            names = set(store.collect("points", lambda q: q.select("name"))["name"])
            return "perfledger.device.source.present" in names

        wait_until(is_told, 40)
    points = stored(collector.store, "points")
    assert points["service_name"].unique().to_list() == ["perfledger.device"]
    period = points.filter(pl.col("name") == "perfledger.device.sampler.period")
    assert period["value"].unique().to_list() == [0.1]
    present = points.filter(pl.col("name") == "perfledger.device.source.present")
    told = {a["text"] for row in present["attributes"] for a in row if a["key"].endswith("source")}
    assert {"nvml", "rapl", "perf"} <= told


def test_what_cannot_be_watched_is_refused() -> None:
    for flags in (("--seconds", "0"), ("--period", "0"), ("--replay", os.devnull)):
        assert run_counters(*flags).returncode == 2, flags
    both = run_counters("--replay", "a", "--record", "b")
    assert both.returncode == 2 and "not allowed with" in both.stderr
