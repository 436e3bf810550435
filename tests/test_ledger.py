"""From a store to what moved over each edge: `edge_ledger` on rows whose sums are known."""

from pathlib import Path

import pytest
from ledger_rows import (
    BASE,
    BOOT,
    DECODE,
    KNOWN_STEPS,
    MS,
    ceiling,
    ceilings,
    edge_of,
    fill,
    ledger_of,
    step,
    step_span,
    store_of,
)

from perfledger.analyzers import Selection
from perfledger.analyzers.contention import Contender
from perfledger.analyzers.edge_ledger import edge_ledger
from perfledger.analyzers.edges import (
    CeilingShare,
    Flow,
    Nearest,
    Part,
)
from perfledger.schema.edges import EDGES, NODES
from perfledger.schema.errors import NoDataError, NotComparableError, UsageError
from perfledger.schema.manifest import Manifest
from perfledger.schema.store import Store

GB = 10**9


def test_every_edge_and_node_is_told_and_in_order(tmp_path: Path) -> None:
    found = ledger_of(tmp_path)
    assert [line.edge for line in found.edges] == [edge.name for edge in EDGES]
    assert [node.node for node in found.nodes] == [node.name for node in NODES]
    assert {line.edge: (line.provenance, line.why) for line in found.edges} == {
        "registers_sram": (
            "not observable",
            "only a profiler sees registers, SRAM and caches, and no profile is imported here",
        ),
        "device_memory": ("derived", ""),
        "host_device": (
            "not observable",
            "the engine computes on the CPU: nothing has to cross it",
        ),
        "scale_up": (
            "not observable",
            "no collective and no NVLink counter: engines of one rank send nothing over it",
        ),
        "network": ("not observable", "no host sampler, and no collective between hosts"),
        "storage_local": ("not observable", "no host sampler, and no checkpoint span"),
        "storage_object": ("not observable", "no span or counter tells of an object store"),
    }
    assert (found.steps, found.steps_without_work, found.tokens) == (3, 0, 10)
    assert (found.from_ns, found.to_ns) == (BASE, BASE + 5 * MS)
    assert found.active_share == 0.8
    assert found.losses == ()


def test_bytes_of_the_memory_by_operator_while_steps_ran(tmp_path: Path) -> None:
    line = edge_of(ledger_of(tmp_path), "device_memory")
    moved = 3 * 4_000_000 + 2 * 1_000_000 + 500
    assert line.flows == (
        Flow(
            told_by="shapes of the model and the batch, at each step",
            provenance="derived",
            forward_bytes=3 * 4_000_000 + 2 * 900_000,
            backward_bytes=2 * 100_000 + 500,
            transfers=3,
            active_ns=4 * MS,
            bytes_per_s=moved * GB / (4 * MS),
            transfers_per_s=750.0,
            latency_ns=4 * MS / 3,
            bytes_per_token=moved / 10,
            devices=1,
            parts=(
                Part("linear", 12_000_000, 500, None),
                Part("attention", 1_800_000, 200_000, None),
            ),
            note="what operators ask for; caches may have answered some of it. A transfer is a"
            " step",
        ),
    )
    assert line.topology == "1 rank on DRAM of the host"
    assert line.ceiling is None
    assert "run `perfledger ceilings`" in line.no_ceiling


def test_the_nearest_edge_its_share_and_what_that_rests_on(tmp_path: Path) -> None:
    # A step reads 4.6 MB on average: between 4 MiB and 16 MiB, in logarithms.
    row = ceilings(
        ceiling("device_memory", "read", "4MiB", "bytes/s", 5e9),
        ceiling("device_memory", "read", "16MiB", "bytes/s", 5e9),
        ceiling("device_memory", "latency", "256MiB", "ns", 90.0),
        ceiling("registers_sram", "matmul", "float32 m=1 k=64 n=64 set=8MiB", "flop/s", 4e9),
        ceiling("registers_sram", "matmul", "float32 m=512 k=64 n=64 set=8MiB", "flop/s", 9e9),
        ceiling("host", "launch", "operator", "ns", 1000.0),
    )
    found = ledger_of(tmp_path, runs=(row,))
    line = edge_of(found, "device_memory")
    rate = 14_000_500 * GB / (4 * MS)
    limit = pytest.approx(5e9)
    assert line.ceiling == CeilingShare(
        "read", "4.39MiB", limit, "measured", pytest.approx(rate / 5e9), ""
    )
    assert line.latency_floor_ns == 90.0
    assert found.nearest == Nearest(
        "device_memory", line.ceiling.share or 0, "likely", "derived bytes, measured ceiling"
    )
    assert found.ceilings.host == "a CPU, 2 threads"
    points = {(point.step_kind, point.operator): point for point in found.roofline.points}
    decode = points["decode", "all"]
    # 2 x 5 MB at 5 GB/s take 2 of the 2 ms; 5 MFLOP at 4 GFLOP/s take 1.25; launches 0.2.
    shares = (decode.memory_share, decode.compute_share, decode.launch_share)
    assert shares == pytest.approx((1.0, 0.625, 0.1))
    assert decode.bound == "memory"
    assert decode.compute_roof == "matmul float32 m=1"
    assert points["prefill", "all"].bound == "undecided"
    assert {line.split(":")[0] for line in found.unranked} == {
        edge.name for edge in EDGES if edge.name != "device_memory"
    }


def test_ceilings_of_another_host_are_refused_and_datasheets_are_not_invented(
    tmp_path: Path,
) -> None:
    ours = {"runtime.threads": 2, "host.cpu_model": "this CPU", "host.boot_id": BOOT}
    run = {
        "run_id": "run-1",
        "kind": "record",
        "created_ns": BASE,
        "manifest": Manifest.of(ours).to_json(),
        "received_ns": BASE,
    }
    elsewhere = ceilings(
        ceiling("device_memory", "read", "4MiB", "bytes/s", 5e9), boot_id="elsewhere", cpu="other"
    )
    selection = Selection(store_of(tmp_path, runs=(run, elsewhere)))
    with pytest.raises(NotComparableError, match="measured on another host"):
        edge_ledger(selection)
    found = edge_ledger(selection, "datasheet")
    assert found.nearest is None
    assert found.ceilings.note == "no datasheet for this device: no peak is invented"
    with pytest.raises(UsageError, match="no ceilings 'nothing' here"):
        edge_ledger(selection, "nothing")


def test_ceilings_that_cannot_be_read_are_said_and_stop_nothing(tmp_path: Path) -> None:
    row = ceilings(ceiling("device_memory", "read", "4MiB", "bytes/s", 5e9))
    broken = row | {"run_id": "ceilings-2", "samples": '{"version": 99}'}
    found = ledger_of(tmp_path, runs=(row, broken))
    assert found.ceilings.provenance == "measured"
    assert found.ceilings.note == "1 rows of ceilings cannot be read, or are of another version"


def test_an_engine_that_does_not_tell_its_work_has_no_bytes_instead_of_zero(
    tmp_path: Path,
) -> None:
    silent = tuple(step(seq, "decode", seq, seq + 1, None, run_id=None) for seq in range(3))
    found = ledger_of(tmp_path, silent)
    line = edge_of(found, "device_memory")
    assert (line.flows, line.provenance) == ((), "not observable")
    assert line.why.startswith("the steps do not say what they moved")
    assert (found.steps, found.steps_without_work) == (3, 3)
    assert found.roofline.points == ()
    assert found.losses == ()


def test_steps_that_lost_their_work_are_a_loss(tmp_path: Path) -> None:
    found = ledger_of(tmp_path, (*KNOWN_STEPS, step(4, "decode", 5, 6, None)))
    assert found.losses == ("steps whose bytes are lost, of engines that tell them: 1",)


def test_nothing_is_an_error_that_says_where(tmp_path: Path) -> None:
    with pytest.raises(NoDataError, match="no spans in this store"):
        edge_ledger(Selection(Store(tmp_path)))
    selection = Selection(store_of(tmp_path)).where(service="another")
    with pytest.raises(NoDataError, match="no engine step, collective or copy matches"):
        edge_ledger(selection)


def test_a_row_that_was_sent_twice_counts_once(tmp_path: Path) -> None:
    store = store_of(tmp_path)
    fill(store, steps=KNOWN_STEPS[1:2])
    found = edge_ledger(Selection(store))
    assert found.steps == 3
    assert edge_of(found, "device_memory").flows[0].forward_bytes == 13_800_000


def test_ranks_that_share_a_memory_contend_and_those_with_their_own_do_not(tmp_path: Path) -> None:
    both = (
        step(1, "decode", 0, 4, DECODE),
        step(1, "decode", 3, 6, DECODE, rank=1),
    )
    line = edge_of(ledger_of(tmp_path / "cpu", both), "device_memory")
    assert line.contenders == (
        Contender("llm replica 0 rank 0", "rank", 1 * MS, 1 / 6, None, ""),
        Contender("llm replica 0 rank 1", "rank", 1 * MS, 1 / 6, None, ""),
    )
    assert (line.flows[0].active_ns, line.flows[0].devices) == (6 * MS, 1)
    assert line.flows[0].bytes_per_token == 10_000_000 / 1  # both ranks computed one token
    line = edge_of(ledger_of(tmp_path / "gpu", both, "cuda:0"), "device_memory")
    assert line.contenders == ()
    assert line.contention == "no counter tells which processes use the device"
    assert (line.flows[0].active_ns, line.flows[0].devices) == (7 * MS, 2)


def test_another_service_on_the_same_host_contends(tmp_path: Path) -> None:
    other = step(9, "decode", 2.5, 8, DECODE) | {"service_name": "other", "span_id": b"other---"}
    elsewhere = step(9, "decode", 2, 8, DECODE) | {"service_name": "far", "span_id": b"far-----"}
    spans = (step_span(other), step_span(elsewhere, boot_id="another boot"))
    store = store_of(tmp_path, spans=spans)
    fill(store, steps=(other, elsewhere))
    found = edge_ledger(Selection(store).where(service="llm"))
    assert edge_of(found, "device_memory").contenders == (
        Contender("llm replica 0 rank 0", "rank", int(1.5 * MS), 1.5 / 8, None, ""),
        Contender("other replica 0 rank 0", "service", int(1.5 * MS), 1.5 / 8, None, ""),
    )
    assert found.steps == 3


def test_one_replica_and_one_stretch_of_time(tmp_path: Path) -> None:
    second = tuple(
        {**row, "replica": "1", "span_id": b"second%02d" % at} for at, row in enumerate(KNOWN_STEPS)
    )
    store = store_of(tmp_path, (*KNOWN_STEPS, *second))
    one = edge_ledger(Selection(store).where(replica="1"))
    assert one.steps == 3
    # The other replica is not selected, and uses the same memory at the same time.
    assert edge_of(one, "device_memory").contenders == (
        Contender("llm replica 0 rank 0", "rank", 4 * MS, 1.0, None, ""),
        Contender("llm replica 1 rank 0", "rank", 4 * MS, 1.0, None, ""),
    )
    late = edge_ledger(Selection(store).where(from_ns=BASE + 3 * MS))
    assert (late.steps, late.tokens) == (2, 2)
    assert edge_of(late, "device_memory").flows[0].active_ns == MS
