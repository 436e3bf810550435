"""The host sampler over recorded and written trees, and on this machine."""

import asyncio
import os
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from metrics_sink import MemorySink, attributes, values
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from perfledger.collectors.host.cgroup import group_folders, group_memory_readings, quota_readings
from perfledger.collectors.host.disk import disk_readings
from perfledger.collectors.host.ethtool import DriverCounters
from perfledger.collectors.host.fabric import driver_readings, rdma_readings
from perfledger.collectors.host.host_metrics import (
    CONTEXT_SWITCHES,
    DEVICE_COUNTER,
    HOST_METRICS,
    PFC,
    PRESSURE_SHARE,
    PRESSURE_TIME,
    RUNNABLE,
)
from perfledger.collectors.host.host_sampler import HostSampler, one_sample, run
from perfledger.collectors.host.host_settings import HostSettings
from perfledger.collectors.host.memory import fault_readings, memory_readings, node_readings
from perfledger.collectors.host.network import (
    backlog_readings,
    interface_readings,
    protocol_readings,
)
from perfledger.collectors.host.processor import (
    boot_time_ns,
    cpu_readings,
    pressure_readings,
    run_queue_readings,
)
from perfledger.collectors.host.readings import PointStream, Reading
from perfledger.collectors.host.sampling_loop import Pace, run_sampler
from perfledger.schema.errors import UsageError

TREES = Path(__file__).parent / "data" / "host"
NOTHING = re.compile("(?!)")
BOOT_NS = 1_700_000_000 * 10**9


@pytest.mark.parametrize("tree", ["hybrid_vm", "synthetic_gpu_node"])
def test_a_recorded_tree_says_exactly_this(tree: str) -> None:
    expected = (TREES / f"{tree}.expected").read_text()
    assert one_sample(HostSettings(root=TREES / tree)) + "\n" == expected


def test_every_metric_that_is_said_is_declared_with_its_attributes() -> None:
    declared = {metric.name: set(metric.attribute.split(", ")) for metric in HOST_METRICS}
    assert len(declared) == len(HOST_METRICS)
    sampler = HostSampler(HostSettings(root=TREES / "synthetic_gpu_node", per_core=True))
    for (name, series), _ in values(sampler.sample()).items():
        assert {key for key, _ in series} <= declared[name], name


def test_a_sample_is_otlp_of_this_host_since_its_boot() -> None:
    sampler = HostSampler(HostSettings(root=TREES / "synthetic_gpu_node"))
    request = ExportMetricsServiceRequest.FromString(sampler.sample())
    for group in request.resource_metrics:
        assert attributes(group.resource.attributes) == {
            "service.name": "perfledger.host",
            "service.instance.id": "gpu-node",
            "host.name": "gpu-node",
            "perfledger.clock.boot_id": "00000000-0000-4000-8000-000000000002",
        }
        for metric in group.scope_metrics[0].metrics:
            kind = metric.WhichOneof("data")
            points = getattr(metric, kind).data_points
            if kind == "sum":
                assert metric.sum.is_monotonic and metric.sum.aggregation_temporality == 2
                assert {point.start_time_unix_nano for point in points} == {BOOT_NS}
            assert all(point.time_unix_nano > BOOT_NS for point in points)


def test_cores_are_told_apart_on_request() -> None:
    stat = "cpu  3 0 0 0\ncpu0 1 0 0 0\ncpu1 2 0 0 0\n"
    users = [
        (reading.value, dict(reading.attributes).get("cpu.logical_number"))
        for reading in cpu_readings(stat, per_core=True)
        if dict(reading.attributes).get("cpu.mode") == "user"
    ]
    assert users == [(0.03, None), (0.01, 0), (0.02, 1)]


def test_an_absent_source_is_said_and_never_zero(tmp_path: Path) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/stat").write_text("cpu  1 2 3 4 5 6 7 8\nbtime 1700000000\n")
    (tmp_path / "proc/meminfo").write_text("MemTotal: many kB\nMemFree: -1 kB\n")
    (tmp_path / "proc/diskstats").write_text("8 0 sda one two\n")
    sampler = HostSampler(HostSettings(root=tmp_path))
    told = values(sampler.sample())
    assert {name for name, _ in told if not name.startswith("perfledger.host.s")} == {
        "system.cpu.time"
    }
    present = {
        dict(series)["perfledger.host.source"]: value
        for (name, series), value in told.items()
        if name == "perfledger.host.source.present"
    }
    assert {name for name, value in present.items() if value == 1} == {"cpu"}
    assert len(present) == 17
    assert sampler.absent["disk"].startswith("not understood")
    assert sampler.absent["memory"] == "nothing to tell"
    assert sampler.counts["sources_absent"] == 16


def test_below_another_root_the_hosts_network_is_that_of_its_first_process(tmp_path: Path) -> None:
    tree = tmp_path / "host"
    shutil.copytree(TREES / "synthetic_gpu_node", tree)
    of_host = (tree / "proc/net/dev").read_text().replace("enp1s0", "bond0")
    (tree / "proc/1/net").mkdir(parents=True)
    (tree / "proc/1/net/dev").write_text(of_host)
    assert "name=bond0" in one_sample(HostSettings(root=tree))


def test_a_source_that_comes_and_goes(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    shutil.copytree(TREES / "synthetic_gpu_node", tree)
    rdma = tree / "sys/class/infiniband"
    rdma.rename(tmp_path / "away")
    sampler = HostSampler(HostSettings(root=tree, slow_interval_s=0))
    assert not any(name.startswith("perfledger.host.rdma") for name, _ in values(sampler.sample()))
    (tmp_path / "away").rename(rdma)
    assert any(name.startswith("perfledger.host.rdma") for name, _ in values(sampler.sample()))
    shutil.rmtree(rdma)
    assert not any(name.startswith("perfledger.host.rdma") for name, _ in values(sampler.sample()))
    assert "rdma" in sampler.absent


def test_counters_start_again_where_they_went_down_or_came_late() -> None:
    stream = PointStream("scope", {"a": 1}, start_ns=10)

    def starts(time_ns: int, *readings: Reading) -> list[tuple[int, int]]:
        request = ExportMetricsServiceRequest.FromString(stream.encode(readings, time_ns))
        metric = request.resource_metrics[0].scope_metrics[0].metrics[0]
        return [(p.start_time_unix_nano, p.as_int) for p in metric.sum.data_points]

    one, two = (("cpu", 1),), (("cpu", 2),)
    assert starts(100, Reading(CONTEXT_SWITCHES, 5, one)) == [(10, 5)]
    assert starts(200, Reading(CONTEXT_SWITCHES, 7, one)) == [(10, 7)]
    both = Reading(CONTEXT_SWITCHES, 3, one), Reading(CONTEXT_SWITCHES, 9, two)
    assert starts(300, *both) == [(200, 3), (200, 9)]
    assert starts(400, Reading(CONTEXT_SWITCHES, 9, two)) == [(200, 9)]
    assert starts(5, Reading(CONTEXT_SWITCHES, 9, two)) == [(5, 9)]  # the clock was set back


def test_a_gauge_has_no_start_and_floats_stay_floats() -> None:
    stream = PointStream("scope", {}, start_ns=10)
    readings = [Reading(RUNNABLE, 2), Reading(RUNNABLE, 0.5, (("k", "v"),))]
    body = stream.encode([*readings, Reading(RUNNABLE, 2**64, (("k", 7),))], 100)
    points = (
        ExportMetricsServiceRequest.FromString(body)
        .resource_metrics[0]
        .scope_metrics[0]
        .metrics[0]
        .gauge.data_points
    )
    assert [p.start_time_unix_nano for p in points] == [0, 0, 0]
    assert [getattr(p, p.WhichOneof("value")) for p in points] == [2, 0.5, float(2**64)]


def test_pauses_are_found_in_three_drivers_names() -> None:
    counters = {
        "rx_packets": 1,
        "rx_prio3_pause": 2,
        "tx_prio3_pause_duration": 3,
        "rx_priority_4_xoff.nic": 5,
        "tx_pfc_ena_frames_pri5": 6,
        "rx0_drops": 7,
        "rx_discards_phy": 8,
    }
    found = [(r.metric.name, dict(r.attributes), r.value) for r in driver_readings("e0", counters)]
    counter, pause = DEVICE_COUNTER.name, PFC.name
    where = {"network.interface.name": "e0"}

    def raw(name: str, value: int) -> tuple[str, dict[str, str | int], int]:
        return counter, where | {"perfledger.host.counter": name}, value

    def frames(way: str, priority: int, value: int) -> tuple[str, dict[str, str | int], int]:
        more = {"network.io.direction": way, "perfledger.host.priority": priority}
        return pause, where | more, value

    assert found == [
        raw("rx_prio3_pause", 2),
        frames("receive", 3, 2),
        raw("tx_prio3_pause_duration", 3),
        raw("rx_priority_4_xoff.nic", 5),
        frames("receive", 4, 5),
        raw("tx_pfc_ena_frames_pri5", 6),
        frames("transmit", 5, 6),
        raw("rx_discards_phy", 8),
    ]


def test_this_machines_drivers_are_asked() -> None:
    drivers = DriverCounters()
    for interface in os.listdir("/sys/class/net"):
        try:
            first, second = drivers.read(interface), drivers.read(interface)
        except OSError:
            continue  # a driver without counters says so
        assert first.keys() == second.keys()
        assert all(name and value >= 0 for name, value in first.items())
    with pytest.raises(OSError, match="No such device"):
        drivers.read("no-such-device")
    drivers.close()


ANY_NAME = st.sampled_from(
    ["cpu", "cpu0", "some", "full", "eth0:", "Tcp:", "MemFree:", "nr_throttled"]
)
ANY_LINE = st.lists(st.one_of(ANY_NAME, st.integers(-5, 2**70).map(str), st.text(max_size=4)))
ANY_TEXT = st.lists(ANY_LINE.map(" ".join)).map("\n".join)


@given(ANY_TEXT)
def test_text_of_any_kernel_is_read_or_refused_as_not_understood(text: str) -> None:
    for read in (
        cpu_readings,
        run_queue_readings,
        memory_readings,
        fault_readings,
        protocol_readings,
        backlog_readings,
        quota_readings,
        lambda text: pressure_readings(text, "cpu", PRESSURE_TIME, PRESSURE_SHARE, whole_host=True),
        lambda text: interface_readings(text, NOTHING),
        lambda text: disk_readings(text, None, NOTHING),
        lambda text: node_readings({"node0": text, "node1": text}, {"node0": text}),
        lambda text: rdma_readings("mlx5_0", 1, {"counter": text}),
        lambda text: group_memory_readings(text, text, text),
        lambda text: [Reading(RUNNABLE, len(group_folders(text)))],
        lambda text: [Reading(RUNNABLE, boot_time_ns(text) or 0)],
    ):
        try:
            found = list(read(text))
        except (ValueError, IndexError):
            continue
        assert all(isinstance(reading.value, int | float) for reading in found)


def test_pace_counts_late_and_missed_samples_and_holds_back_dear_ones() -> None:
    counts: Counter[str] = Counter()
    pace = Pace(100, 0.0, counts)
    assert pace.wait_s(1000) == pytest.approx(100e-9)  # due at 1100
    assert pace.wait_s(1110) == pytest.approx(90e-9)
    assert pace.wait_s(1260) == pytest.approx(40e-9)
    assert counts == {"late": 1, "missed": 0, "skipped": 0}
    assert pace.wait_s(1555) == pytest.approx(45e-9)
    assert counts == {"late": 2, "missed": 2, "skipped": 0}
    assert pace.wait_s(1600, cost_ns=10) == pytest.approx(300e-9)  # 10 of 200 is 5 %
    assert counts["skipped"] == 2


def test_the_loop_delivers_samples_until_it_is_stopped() -> None:
    sink = MemorySink()

    async def scenario() -> None:
        stop = asyncio.Event()
        task = asyncio.create_task(run(sink, HostSettings(interval_s=0.1), stop))
        while len(sink.bodies) < 3:
            assert not task.done()
            await asyncio.sleep(0.02)
        stop.set()
        await task

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert sink.held_bytes == 0
    first, last = values(sink.bodies[0]), values(sink.bodies[-1])
    cpu = ("system.cpu.time", frozenset({("cpu.mode", "user")}))
    assert last[cpu] >= first[cpu] > 0
    assert first[("system.memory.limit", frozenset())] > 2**20


def test_a_full_collector_is_counted_and_ends_nothing() -> None:
    sampler = HostSampler(HostSettings(interval_s=0.1))

    async def scenario() -> None:
        stop = asyncio.Event()
        task = asyncio.create_task(run_sampler(sampler, MemorySink(full=True), stop))
        while sampler.counts["requests_refused"] < 2:
            assert not task.done()
            await asyncio.sleep(0.02)
        stop.set()
        await task

    asyncio.run(asyncio.wait_for(scenario(), 30))
    assert sampler.counts["requests"] == 0
    assert sampler.counts["samples"] >= 2


def test_settings_are_read_from_the_file() -> None:
    settings = HostSettings.from_toml(
        {"interval_s": 2, "per_core": True, "excluded_devices": "sd.*", "root": "/"}
    )
    assert settings.interval_s == 2.0 and settings.per_core
    assert settings.excluded_devices.fullmatch("sda")


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"interval": 1}, "unknown setting: interval"),
        ({"interval_s": 0}, "bad value of interval_s"),
        ({"interval_s": "1"}, "bad value of interval_s"),
        ({"per_core": 1}, "bad value of per_core"),
        ({"excluded_devices": "("}, "bad value of excluded_devices"),
        ({"root": "/no/such/folder"}, "bad value of root"),
    ],
)
def test_settings_that_cannot_be_are_refused(table: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)):
        HostSettings.from_toml(table)
