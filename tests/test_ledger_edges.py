"""Edges beyond the memory: copies, collectives, counters of devices and of the host, nodes."""

from pathlib import Path

import pytest
from ledger_rows import (
    BASE,
    BOOT,
    DECODE,
    KNOWN_STEPS,
    MS,
    Row,
    ceiling,
    ceilings,
    collective,
    copy_span,
    edge_of,
    fill,
    ledger_of,
    pairs,
    point,
    step,
)

from perfledger.analyzers import Selection
from perfledger.analyzers.contention import Contender
from perfledger.analyzers.edge_ledger import edge_ledger
from perfledger.analyzers.edges import (
    CeilingShare,
    Held,
    Nearest,
    NodeLine,
    Part,
)
from perfledger.schema.store import Store
from perfledger.schema.tables import SPANS


def test_copies_over_the_host_device_edge_and_the_devices_own_counters(tmp_path: Path) -> None:
    copies = (
        copy_span(1, "host_to_device", 1000, 0, 1),
        copy_span(2, "offload_out", 3000, 0.5, 2),
        copy_span(3, "dtype", 77, 0, 1),
    )
    way = {"hw__id": "GPU-1", "perfledger__edge": "host_device"}
    told = [
        point("hw.gpu.io", at, size, network__io__direction=direction, **way, **source)
        for source in (
            {"perfledger__device__source": "counter"},
            {"perfledger__device__source": "gpm"},
        )
        for direction, size, at in (
            ("receive", 500, -1),
            ("receive", 2500, 6),
            ("transmit", 0, -1),
            ("transmit", 3000, 6),
        )
    ]
    line = edge_of(
        ledger_of(tmp_path, KNOWN_STEPS, "cuda:0", spans=copies, points=tuple(told)), "host_device"
    )
    spans, counters = line.flows
    assert (spans.forward_bytes, spans.backward_bytes, spans.active_ns) == (1000, 3000, 2 * MS)
    assert (spans.transfers, spans.latency_ns) == (2, 1.25 * MS)
    assert spans.parts == (
        Part("KV swapped out", 0, 3000, 1),
        Part("to device", 1000, 0, 1),
    )
    assert (counters.forward_bytes, counters.backward_bytes) == (2000, 3000)
    assert counters.active_ns == 7 * MS
    assert line.contenders == (
        Contender(
            "other traffic",
            "traffic",
            None,
            None,
            1000,
            "1,000 bytes more on the counters than in the spans",
        ),
    )


def test_collectives_go_over_the_scale_up_edge_and_groups_contend(tmp_path: Path) -> None:
    calls = (
        collective("tp", 0, 0, 0, 2, 1000),
        collective("tp", 0, 1, 1, 2, 1000),  # rank 0 waited for 1 ms
        collective("dp", 0, 0, 1.5, 3, 400),
        collective("dp", 0, 1, 1.5, 3, 400),
    )
    row = ceilings(
        ceiling("scale_up", "all_reduce busbw", "ranks=2 size=1KiB", "bytes/s", 2e6),
        ceiling("scale_up", "all_reduce busbw", "ranks=2 size=1MiB", "bytes/s", 5e9),
    )
    found = ledger_of(tmp_path, collectives=calls, runs=(row,))
    line = edge_of(found, "scale_up")
    (flow,) = line.flows
    assert (flow.forward_bytes, flow.backward_bytes, flow.transfers) == (2800, None, 4)
    assert flow.active_ns == 2 * MS  # from 1 to 3: waiting is left out
    assert flow.parts == (
        Part("dp all_reduce", 800, None, 2),
        Part("tp all_reduce", 2000, None, 2),
    )
    assert line.contenders == (
        Contender("llm replica 0 group dp", "collective", MS // 2, 0.25, 800, ""),
        Contender("llm replica 0 group tp", "collective", MS // 2, 0.25, 2000, ""),
    )
    # 1000 B in 1 ms and 400 B in 1.5 ms, over the time that they took.
    assert line.ceiling is not None
    assert line.ceiling.variant == "ranks=2 size=1KiB"
    assert line.ceiling.share == pytest.approx((2 * 1000 + 2 * 400) / 5e-3 / 2e6)
    assert "llm replica 0 group tp, 2 ranks" in line.topology
    # Rank 0 was in calls from 0 to 3: in both decode steps' ms 2 to 3, not in 4 to 5.
    points = {(point.step_kind, point.operator): point for point in found.roofline.points}
    assert points["prefill", "all"].collective_share == 1.0
    assert points["decode", "all"].collective_share == 0.5


def test_a_job_without_engine_steps_has_the_edges_that_it_used(tmp_path: Path) -> None:
    calls = tuple(collective("dp", 0, rank, 0, 2, 1000) for rank in (0, 1))
    found = edge_ledger(Selection(fill(Store(tmp_path), collectives=calls)))
    assert (found.steps, found.tokens, found.from_ns, found.to_ns) == (0, 0, BASE, BASE + 2 * MS)
    (flow,) = edge_of(found, "scale_up").flows
    assert (flow.forward_bytes, flow.bytes_per_s, flow.bytes_per_token) == (2000, 1e6, None)
    assert edge_of(found, "device_memory").why == "no engine step in this selection"
    assert found.roofline.points == ()


def test_collectives_between_hosts_and_checkpoints(tmp_path: Path) -> None:
    calls = tuple(collective("pp", 0, rank, 0, 1, 1000) for rank in (0, 1))
    hosts = tuple(
        {**call, "name": "collective", "kind": "internal", "start_ns": BASE, "boot_id": boot}
        for call, boot in zip(calls, (BOOT, "another boot"), strict=True)
    )
    names = SPANS.names()
    spans = tuple({key: row[key] for key in row if key in names} for row in hosts)
    saved = copy_span(9, "", 0, 1, 2, name="checkpoint_save", service_name="llm") | {
        "attributes": pairs({"perfledger.checkpoint.bytes": 5000})
    }
    row = ceilings(ceiling("storage_local", "write", "64MiB", "bytes/s", 1e7))
    found = ledger_of(tmp_path, collectives=calls, spans=(*spans, saved), runs=(row,))
    (network,) = edge_of(found, "network").flows
    assert (network.provenance, network.forward_bytes) == ("derived", 2000)
    assert edge_of(found, "scale_up").flows == ()
    disk = edge_of(found, "storage_local")
    assert disk.flows[0].parts == (Part("checkpoint saved", 0, 5000, 1),)
    assert disk.ceiling == CeilingShare("write", "64MiB", 1e7, "measured", 0.5, "")
    assert found.nearest == Nearest(
        "storage_local", 0.5, "certain", "measured bytes, measured ceiling"
    )


def test_a_device_without_ceilings_has_its_datasheet_and_an_unknown_one_nothing(
    tmp_path: Path,
) -> None:
    def named(name: str) -> tuple[Row, ...]:
        return (point("hw.energy", 1, 5, hw__id="GPU-1", hw__type="gpu", hw__name=name),)

    found = ledger_of(tmp_path / "known", KNOWN_STEPS, "cuda:0", points=named("NVIDIA H200"))
    line = edge_of(found, "device_memory")
    assert line.ceiling is not None
    assert (line.ceiling.bytes_per_s, line.ceiling.provenance) == (4.8e12, "datasheet")
    assert found.nearest is not None
    assert found.nearest.certainty == "weak"
    assert {roof.provenance for roof in found.roofline.roofs} == {"datasheet"}
    assert found.ceilings.host == "NVIDIA H200"
    found = ledger_of(tmp_path / "new", KNOWN_STEPS, "cuda:0", points=named("NVIDIA Z900"))
    assert edge_of(found, "device_memory").ceiling is None
    assert found.nearest is None


def test_counters_of_the_host_over_the_window(tmp_path: Path) -> None:
    def both(name: str, start: float, end: float, **told: str) -> list[Row]:
        return [point(name, at, value, **told) for at, value in ((-1, start), (9, end))]

    nic = {"network__interface__name": "eth0"}
    disk = {"system__device": "vda"}
    told = [
        *both("system.network.io", 100, 1100, **nic, network__io__direction="transmit"),
        *both("system.network.io", 0, 50, **nic, network__io__direction="receive"),
        *both(
            "system.network.io",
            0,
            9e9,
            network__interface__name="lo",
            network__io__direction="receive",
        ),
        *both("system.disk.io", 0, 8192, **disk, disk__io__direction="read"),
        *both("system.disk.io", 5, 5, **disk, disk__io__direction="write"),
        *both("system.disk.operations", 0, 2, **disk, disk__io__direction="read"),
        *both("system.disk.operation_time", 0, 0.004, **disk, disk__io__direction="read"),
        *both("system.disk.io_time", 0, 0.005, **disk),
        *both("system.cpu.time", 0, 0.013, cpu__mode="user"),
        *both("system.cpu.time", 0, 1, cpu__mode="idle"),
    ]
    found = ledger_of(tmp_path, points=tuple(told))
    (network,) = edge_of(found, "network").flows
    assert (network.forward_bytes, network.backward_bytes) == (1000, 50)
    assert (network.active_ns, network.parts) == (10 * MS, (Part("eth0", 1000, 50, None),))
    (disks,) = edge_of(found, "storage_local").flows
    assert (disks.forward_bytes, disks.backward_bytes, disks.transfers) == (8192, 0, 2)
    assert (disks.active_ns, disks.latency_ns) == (5 * MS, pytest.approx(2 * MS))
    (others,) = edge_of(found, "device_memory").contenders
    # 13 ms of CPU, of which the engine used 3, in 10 ms.
    assert others.note == "used 1.00 CPUs on average, what they moved is not known"


def test_an_interface_is_held_against_the_speed_that_its_card_says(tmp_path: Path) -> None:
    nic = {"network__interface__name": "eth0", "network__io__direction": "transmit"}
    told = tuple(point("system.network.io", at, size, **nic) for at, size in ((-1, 0), (9, 1e6)))
    cards = ["eth0: 10 Gb/s, NUMA node 0, mlx5_core", "eth1: speed unknown, NUMA node 1, veth"]
    runs = (ceilings(topology__nics=cards, topology__numa=["node 0: cpus 0-1, 4 GiB"]),)
    found = ledger_of(tmp_path, points=told, runs=runs)
    line = edge_of(found, "network")
    assert line.topology == f"interfaces eth0; {'; '.join(cards)}"
    # 1 MB in 10 ms is 100 MB/s, of 1.25 GB/s.
    assert line.ceiling == CeilingShare(
        "link speed of",
        "eth0",
        1.25e9,
        "datasheet",
        pytest.approx(0.08),
        "one direction, mean over the window; the speed is what the card says, not measured",
    )
    assert found.nearest is not None
    assert (found.nearest.edge, found.nearest.certainty) == ("network", "weak")
    assert edge_of(found, "device_memory").topology == (
        "1 rank on DRAM of the host; node 0: cpus 0-1, 4 GiB"
    )


def test_nodes_hold_what_the_gauges_say(tmp_path: Path) -> None:
    told = [
        point(f"perfledger.capacity.{name}", 1, size, "gauge", service="llm", perfledger__replica=r)
        for r in ("0", "1")
        for name, size in (("memory", 1000), ("weights", 300), ("kv", 200), ("swap", 5))
    ]
    told += [
        point("system.memory.limit", 1, 4000, "gauge"),
        point("system.memory.usage", 1, 700, "gauge", system__memory__state="used"),
        point("perfledger.capacity.kv", 1, 9, "gauge", service="another"),
    ]
    nodes = {node.node: node for node in ledger_of(tmp_path, points=tuple(told)).nodes}
    assert nodes["device_memory"].limit_bytes == 1000  # one DRAM, told by both replicas
    assert nodes["device_memory"].held == (Held("weights", 600), Held("kv", 400))
    assert nodes["host_memory"] == NodeLine(
        "host_memory",
        "DRAM of the host, apart from the device's",
        4000,
        (Held("swap", 10), Held("used by all processes", 700)),
        "measured",
        "",
    )
    assert nodes["compute"].provenance == "not observable"


def test_the_devices_own_bandwidth_counter_is_measured_and_joined_by_interval(
    tmp_path: Path,
) -> None:
    long = (step(1, "decode", 0, 40, DECODE), step(2, "decode", 60, 61, DECODE))
    told = [point("perfledger.gpu.memory.bandwidth.limit", 0, 1e9, "gauge", hw__id="GPU-1")]
    told += [
        point("perfledger.gpu.memory.bandwidth.share", at, share, "gauge", hw__id="GPU-1")
        for at, share in ((0, 0), (10, 0.5), (20, 0.5), (30, 0.8), (40, 0.8), (60, 0))
    ]
    found = ledger_of(tmp_path, long, "cuda:0", points=tuple(told))
    measured, derived = edge_of(found, "device_memory").flows
    assert measured.provenance == "measured"
    assert measured.forward_bytes == round(0.010 * 1e9 * (0.5 + 0.5 + 0.8 + 0.8))
    assert measured.bytes_per_s == pytest.approx(0.65e9)  # only while steps ran
    assert measured.note.endswith("rate 4 of 5 samples while steps ran")
    assert derived.forward_bytes == 2 * 4_900_000
