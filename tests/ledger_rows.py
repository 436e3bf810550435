"""Rows of a store whose ledger is known: steps with work, points, spans, ceilings."""

import json
from pathlib import Path
from typing import Any

from perfledger.analyzers import Selection
from perfledger.analyzers.edge_ledger import edge_ledger
from perfledger.analyzers.edges import EdgeLedger, EdgeLine
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
from perfledger.schema.tables import COLLECTIVES, POINTS, RUNS, SPANS, STEPS

MS = 1_000_000
BASE = 1_790_000_000_000 * MS
BOOT = "boot-of-the-tests"
Row = dict[str, Any]


def pairs(attributes: Row) -> list[Row]:
    """Return attributes as the store has them."""
    kinds = {str: "text", bool: "bool", int: "int", float: "double"}
    empty: Row = dict.fromkeys(("text", "int", "double", "bool", "bytes", "json"))
    return [{**empty, "key": k, kinds[type(v)]: v} for k, v in attributes.items()]


def work(cells: Row, flops: Row, launches: int = 0) -> Row:
    """Return the columns of cells like {"linear_weights_read": 8}, with their totals; others 0."""
    columns = dict.fromkeys([*CELL_COLUMNS.values(), *FLOP_COLUMNS.values()], 0)
    columns |= {f"{name}_bytes": size for name, size in cells.items()}
    columns |= {FLOP_COLUMNS[name]: count for name, count in flops.items()}
    sums = {
        total: sum(columns[column] for cell, column in CELL_COLUMNS.items() if cell[2] == way)
        for total, way in ((READ_TOTAL, "read"), (WRITTEN_TOTAL, "written"))
    }
    return {**columns, **sums, FLOPS_TOTAL: sum(flops.values()), LAUNCHES: launches}


def step(seq: int, kind: str, start: float, end: float, done: Row | None, **more: Any) -> Row:
    """A step of `end - start` ms after BASE, whose `schedule` took no time."""
    rank = more.get("rank", 0)
    return {
        "run_id": "run-1",
        "service_name": "llm",
        "replica": "0",
        "rank": rank,
        "step_seq": seq,
        "trace_id": b"engine%010d" % rank,
        "span_id": b"%08d" % (seq + 10_000 * rank),
        "kind": f"{kind}_step",
        "start_ns": BASE + int(start * MS),
        "schedule_end_ns": BASE + int(start * MS),
        "end_ns": BASE + int(end * MS),
        "prefill_tokens": 0 if kind == "decode" else 8,
        "decode_tokens": 0 if kind == "prefill" else 1,
        "cpu_ns": MS,
        "received_ns": BASE,
        **(done or {}),
        **more,
    }


def step_span(row: Row, device: str = "cpu", boot_id: str = BOOT) -> Row:
    """The span that a step's row was made of."""
    told = {"perfledger.device": device, "perfledger.dtype": "float32"}
    same = ("run_id", "service_name", "replica", "rank", "step_seq", "trace_id", "span_id")
    return {
        **{name: row[name] for name in (*same, "start_ns", "end_ns", "received_ns")},
        "name": row["kind"],
        "kind": "internal",
        "boot_id": boot_id,
        "attributes": pairs(told),
    }


def copy_span(number: int, boundary: str, size: int, start: float, end: float, **more: Any) -> Row:
    """A copy between the host and cuda:0."""
    to_host = boundary in ("device_to_host", "offload_out")
    places = ("cuda:0", "cpu") if to_host else ("cpu", "cuda:0")
    told = {
        "perfledger.copy.boundary": boundary,
        "perfledger.copy.source": places[0],
        "perfledger.copy.target": places[1],
        "perfledger.copy.bytes": size,
    }
    return {
        "run_id": "run-1",
        "service_name": "llm",
        "replica": "0",
        "rank": 0,
        "trace_id": b"engine%010d" % 0,
        "span_id": b"copy%04d" % number,
        "name": "copy",
        "kind": "internal",
        "start_ns": BASE + int(start * MS),
        "end_ns": BASE + int(end * MS),
        "boot_id": BOOT,
        "attributes": pairs(told),
        "received_ns": BASE,
        **more,
    }


def collective(group: str, sequence: int, rank: int, start: float, end: float, size: int) -> Row:
    """One rank's part of an all-reduce over ranks 0 and 1."""
    return {
        "run_id": "run-1",
        "service_name": "llm",
        "replica": "0",
        "rank": rank,
        "dimension": group,
        "group": group,
        "members": "0-1",
        "ranks": 2,
        "sequence": sequence,
        "op": "all_reduce",
        "dtype": "float32",
        "bytes": size,
        "wire_bytes": size,
        "trace_id": b"engine%010d" % rank,
        "span_id": f"{group[:2]}{rank}{sequence:05d}".encode(),
        "enqueue_ns": BASE + int(start * MS),
        "end_ns": BASE + int(end * MS),
        "received_ns": BASE,
    }


def point(name: str, at: float, value: float, kind: str = "sum", **told: Any) -> Row:
    """A point at ms after BASE; keyword `service`, the others are attributes (`__` is a dot)."""
    service = told.pop("service", "perfledger.host")
    return {
        "time_ns": BASE + int(at * MS),
        "start_ns": BASE - 1000 * MS if kind == "sum" else None,
        "name": name,
        "kind": kind,
        "value": float(value),
        "service_name": service,
        "service_instance_id": "host",
        "attributes": pairs({key.replace("__", "."): text for key, text in told.items()}),
        "resource_attributes": json.dumps(
            {"perfledger.clock.boot_id": BOOT}, separators=(",", ":")
        ),
        "received_ns": BASE,
    }


def ceilings(*items: Ceiling, boot_id: str = BOOT, cpu: str = "a CPU", **more: Any) -> Row:
    """The row of `runs` of ceilings measured on a host; `more` are fields (`__` is a dot)."""
    host = Manifest.of(
        {
            **{"host.boot_id": boot_id, "host.cpu_model": cpu},
            **{"device.names": [], "runtime.threads": 2},
            **{key.replace("__", "."): value for key, value in more.items()},
        }
    )
    return {**Ceilings("ceilings-1", host, BASE, items).to_row(), "received_ns": BASE}


def ceiling(edge: str, operation: str, variant: str, unit: str, value: float) -> Ceiling:
    return Ceiling(edge, operation, variant, unit, value, (value,))


def fill(
    store: Store,
    *,
    steps: tuple[Row, ...] = (),
    spans: tuple[Row, ...] = (),
    points: tuple[Row, ...] = (),
    collectives: tuple[Row, ...] = (),
    runs: tuple[Row, ...] = (),
) -> Store:
    """Write rows to a store and return it."""
    tables = ((STEPS, steps), (SPANS, spans), (POINTS, points), (COLLECTIVES, collectives))
    for table, rows in (*tables, (RUNS, runs)):
        if rows:
            store.write(table.name, table.from_rows(rows))
    return store


GB_CEILINGS = (
    ceiling("device_memory", "read", "4MiB", "bytes/s", 10e9),
    ceiling("registers_sram", "matmul", "float32 m=1 k=64 n=64 set=8MiB", "flop/s", 100e9),
    ceiling("host", "launch", "operator", "ns", 1000.0),
)


PREFILL = work({"linear_weights_read": 4_000_000, "linear_activations_written": 500}, {"linear": 7})
DECODE = work(
    {
        "linear_weights_read": 4_000_000,
        "attention_kv_read": 900_000,
        "attention_kv_written": 100_000,
    },
    {"linear": 2_000_000, "attention": 500_000},
    launches=100,
)
KNOWN_STEPS = (
    step(1, "prefill", 0, 2, PREFILL),
    step(2, "decode", 2, 3, DECODE),
    step(3, "decode", 4, 5, DECODE),
)


def store_of(
    folder: Path,
    steps: tuple[Row, ...] = KNOWN_STEPS,
    device: str = "cpu",
    *,
    spans: tuple[Row, ...] = (),
    **more: tuple[Row, ...],
) -> Store:
    """Return a store of steps with their spans, and whatever else `fill` takes."""
    made = tuple(step_span(row, device) for row in steps)
    return fill(Store(folder), steps=steps, spans=(*made, *spans), **more)


def ledger_of(
    folder: Path, steps: tuple[Row, ...] = KNOWN_STEPS, device: str = "cpu", **more: tuple[Row, ...]
) -> EdgeLedger:
    """Return the ledger of `store_of`."""
    return edge_ledger(Selection(store_of(folder, steps, device, **more)))


def edge_of(found: EdgeLedger, name: str) -> EdgeLine:
    """Return the line of an edge."""
    return {line.edge: line for line in found.edges}[name]
