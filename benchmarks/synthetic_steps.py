"""A store of many engine steps that tell their bytes and FLOPs, with the spans they are made of.

    python benchmarks/synthetic_steps.py FOLDER [STEPS]

Two replicas of two ranks each on one CPU. All times and amounts are made up; tables, columns and
ids have their real form, and each step has its span, three children and four members.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from perfledger.schema.attributes import SCOPE_NAME
from perfledger.schema.ceilings import Ceiling, Ceilings
from perfledger.schema.manifest import Manifest
from perfledger.schema.step_work import (
    CELL_COLUMNS,
    FLOP_COLUMNS,
    FLOPS_TOTAL,
    LAUNCHES,
    READ_TOTAL,
    WRITTEN_TOTAL,
)
from perfledger.schema.store import Store
from perfledger.schema.tables import KEY_VALUES, MEMBERS, POINTS, RUNS, SPANS, STEPS

Ints = NDArray[np.int64]
REPLICAS, RANKS, MEMBERS_A_STEP, REQUESTS = 2, 2, 4, 20_000
STEPS_A_FILE = 50_000
STEP_NS, SCHEDULE_NS, SAMPLE_NS = 9_000_000, 200_000, 500_000
START_NS = 1_790_000_000_000_000_000
BOOT_ID = "8a0b7e0e-5a5e-4f0e-9d4b-000000000000"
CHILDREN = ("schedule", "forward", "sample")
KINDS = np.array(["decode_step", "decode_step", "mixed_step", "prefill_step"], object)


def write_synthetic_steps(store: Store, steps: int, seed: int = 0) -> dict[str, int]:
    """Write steps, spans, points and ceilings; return how many rows each table got."""
    random = np.random.default_rng(seed)
    each, spans = steps // (REPLICAS * RANKS), 0
    for replica in range(REPLICAS):
        for rank in range(RANKS):
            start = START_NS + np.cumsum(random.integers(STEP_NS, STEP_NS * 11 // 10, each))
            for first in range(0, each, STEPS_A_FILE):
                part = start[first : first + STEPS_A_FILE]
                made = _steps(part, first, replica, rank, random)
                store.write("steps", made)
                spans += _write_spans(store, made)
    points = _points(each * STEP_NS * 21 // 20)
    store.write("points", points)
    store.write("runs", RUNS.from_rows([_ceilings()]))
    return {"steps": each * REPLICAS * RANKS, "spans": spans, "points": points.num_rows}


def _steps(
    start: Ints, first: int, replica: int, rank: int, random: np.random.Generator
) -> pa.Table:
    count = len(start)
    kind = KINDS[random.integers(0, 4, count)]
    engine = bytes([replica + 1, rank + 1] * 8)
    ids = random.integers(1, 1 << 63, count, np.uint64)
    given = {
        "run_id": _same("synthetic", count),
        "service_name": _same("perfledger-runtime", count),
        "replica": _same(str(replica), count),
        "rank": pa.array(np.full(count, rank, np.int32)),
        "step_seq": pa.array(first + np.arange(count)),
        "trace_id": pa.array([engine] * count, pa.binary(16)),
        "span_id": pa.FixedSizeBinaryArray.from_buffers(
            pa.binary(8), count, [None, pa.py_buffer(ids)]
        ),
        "kind": pa.array(kind),
        "start_ns": pa.array(start),
        "schedule_end_ns": pa.array(start + SCHEDULE_NS),
        "sample_start_ns": pa.array(start + STEP_NS - SAMPLE_NS),
        "sample_end_ns": pa.array(start + STEP_NS - 1000),
        "end_ns": pa.array(start + STEP_NS),
        "prefill_tokens": pa.array(np.where(kind == "decode_step", 0, 128)),
        "decode_tokens": pa.array(np.where(kind == "prefill_step", 0, MEMBERS_A_STEP)),
        "cpu_ns": pa.array(random.integers(STEP_NS // 2, STEP_NS, count)),
        "members": _members(count, random),
        "received_ns": pa.array(start + 6_000_000_000),
        **_work(count, random),
    }
    return _table(STEPS.arrow(), given, count)


def _work(count: int, random: np.random.Generator) -> dict[str, pa.Array]:
    cells = {cell: random.integers(0, 40_000_000, count) for cell in CELL_COLUMNS}
    flops = {name: random.integers(0, 4_000_000_000, count) for name in FLOP_COLUMNS}
    total = {
        name: np.sum([size for cell, size in cells.items() if cell[2] == way], axis=0)
        for name, way in ((READ_TOTAL, "read"), (WRITTEN_TOTAL, "written"))
    }
    columns = {
        **{CELL_COLUMNS[cell]: size for cell, size in cells.items()},
        **{FLOP_COLUMNS[name]: amount for name, amount in flops.items()},
        **total,
        FLOPS_TOTAL: np.sum(list(flops.values()), axis=0),
        LAUNCHES: random.integers(100, 300, count),
    }
    return {name: pa.array(values) for name, values in columns.items()}


def _members(count: int, random: np.random.Generator) -> pa.Array:
    who = random.integers(1, REQUESTS, count * MEMBERS_A_STEP).astype(np.uint64)
    pairs = np.stack([who, who], axis=1)
    ids = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(16), len(who), [None, pa.py_buffer(np.ascontiguousarray(pairs))]
    )
    spans = pa.FixedSizeBinaryArray.from_buffers(
        pa.binary(8), len(who), [None, pa.py_buffer(np.ascontiguousarray(who))]
    )
    fields = [MEMBERS.value_type.field(at) for at in range(MEMBERS.value_type.num_fields)]
    columns = [
        ids.cast(pa.binary()),
        spans.cast(pa.binary()),
        _same("decode", len(who)),
        pa.array(np.ones(len(who), np.int64)),
    ]
    offset = pa.array(np.arange(0, len(who) + 1, MEMBERS_A_STEP), pa.int32())
    return pa.ListArray.from_arrays(offset, pa.StructArray.from_arrays(columns, fields=fields))


def _write_spans(store: Store, steps: pa.Table) -> int:
    """Write the spans of steps and of their children."""
    count = steps.num_rows
    told = [
        {"key": "perfledger.device", "text": "cpu"},
        {"key": "perfledger.dtype", "text": "float32"},
    ]
    empty = dict.fromkeys(("text", "int", "double", "bool", "bytes", "json"))
    attributes = pa.array([[{**empty, **pair} for pair in told]], KEY_VALUES)
    same = ("run_id", "service_name", "replica", "rank", "step_seq", "trace_id", "start_ns")
    given = {name: steps[name].combine_chunks() for name in (*same, "end_ns", "received_ns")}
    given |= {
        "kind": _same("internal", count),
        "boot_id": _same(BOOT_ID, count),
        "scope_name": _same(SCOPE_NAME, count),
    }
    own = {"name": steps["kind"], "span_id": steps["span_id"]}
    own = {name: column.combine_chunks() for name, column in own.items()}
    own["attributes"] = pa.concat_arrays([attributes.take(pa.array(np.zeros(count, np.int64)))])
    store.write("spans", _table(SPANS.arrow(), given | own, count))
    random = np.random.default_rng(int(steps["start_ns"][0].as_py()) % 1000)
    for name in CHILDREN:
        ids = random.integers(1, 1 << 63, count, np.uint64)
        child = {
            "name": _same(name, count),
            "span_id": pa.FixedSizeBinaryArray.from_buffers(
                pa.binary(8), count, [None, pa.py_buffer(ids)]
            ),
            "parent_span_id": own["span_id"],
        }
        store.write("spans", _table(SPANS.arrow(), given | child, count))
    return count * (1 + len(CHILDREN))


def _points(length_ns: int) -> pa.Table:
    """Return what the host sampler and the runtime say once a second, of a few metrics."""
    series = [
        ("system.network.io", {"network.interface.name": "eth0", "network.io.direction": way}, "")
        for way in ("transmit", "receive")
    ]
    series += [("system.cpu.time", {"cpu.mode": mode}, "") for mode in ("user", "system", "idle")]
    series += [
        (f"perfledger.capacity.{name}", {"perfledger.replica": str(replica)}, "perfledger-runtime")
        for name in ("memory", "weights", "kv")
        for replica in range(REPLICAS)
    ]
    empty = dict.fromkeys(("text", "int", "double", "bool", "bytes", "json"))
    resource = json.dumps({"perfledger.clock.boot_id": BOOT_ID}, separators=(",", ":"))
    rows = [
        {
            "time_ns": START_NS + second * 1_000_000_000,
            "start_ns": START_NS - 1_000_000_000,
            "name": name,
            "kind": "gauge" if service else "sum",
            "value": float(second),
            "run_id": "synthetic" if service else None,
            "service_name": service or "perfledger.host",
            "service_instance_id": "host",
            "attributes": [{**empty, "key": k, "text": v} for k, v in told.items()],
            "resource_attributes": resource,
            "received_ns": START_NS,
        }
        for name, told, service in series
        for second in range(length_ns // 1_000_000_000)
    ]
    return POINTS.from_rows(rows)


def _ceilings() -> dict[str, object]:
    host = Manifest.of({"host.boot_id": BOOT_ID, "device.names": [], "runtime.threads": 2})
    items = (
        Ceiling("device_memory", "read", "256MiB", "bytes/s", 2e10, (2e10,)),
        Ceiling("registers_sram", "matmul", "float32 m=16 k=64 n=64 set=8MiB", "flop/s", 1e11, ()),
    )
    row = Ceilings("ceilings-synthetic", host, START_NS, items).to_row()
    return {**row, "received_ns": START_NS}


def _same(text: str, count: int) -> pa.Array:
    return pa.array(np.full(count, text, object), pa.string())


def _table(schema: pa.Schema, given: dict[str, pa.Array], rows: int) -> pa.Table:
    columns = [given.get(field.name, pa.nulls(rows, field.type)) for field in schema]
    return pa.Table.from_arrays(columns, schema=schema)


if __name__ == "__main__":
    wanted = int(sys.argv[2]) if len(sys.argv) > 2 else 1_000_000
    print(json.dumps(write_synthetic_steps(Store(Path(sys.argv[1])), wanted)))
