"""A store of many requests, with the spans, steps and derived rows that our runtime would send.

    python benchmarks/synthetic_store.py FOLDER [REQUESTS]

One engine runs `SLOTS` sequences; each slot serves one request after the other, so every step
links that many requests. All times are made up, all tables and ids have their real form.
"""

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import polars as pl
import pyarrow as pa
from numpy.typing import NDArray

from perfledger.schema.attributes import SCHEMA_VERSION, SCOPE_NAME
from perfledger.schema.derive import request_rows
from perfledger.schema.store import Store
from perfledger.schema.tables import LINKS, MEMBERS, REQUESTS, SPANS, STEPS

Ints = NDArray[np.int64]
SLOTS, PROMPT_TOKENS = 16, 100
STEP_NS, SCHEDULE_NS, SAMPLE_NS = 10_000_000, 200_000, 500_000
START_NS = 1_790_000_000_000_000_000
SPANS_A_FILE, REQUESTS_A_FILE = 130_000, 20_000
ENGINE_TRACE = bytes(range(1, 17))
US = 1000


@dataclass(frozen=True)
class Plan:
    """What happened: the steps of each request `[first, last]`, its prefill steps, its arrival."""

    first: Ints
    last: Ints
    chunks: Ints
    arrival_ns: Ints
    end_ns: Ints
    trace_id: NDArray[np.uint64]
    span_id: NDArray[np.uint64]
    step_start_ns: Ints

    @property
    def step_end_ns(self) -> Ints:
        return np.asarray(self.step_start_ns + STEP_NS)


def write_synthetic_store(store: Store, requests: int, seed: int = 0) -> dict[str, int]:
    """Write the tables `spans`, `steps` and `requests`; return how many rows each one got."""
    plan = make_plan(requests, seed)
    spans, rows = _request_spans(plan), 0
    engine = _engine_spans(plan, first_id=1)
    order = np.argsort(np.concatenate([spans.end_ns, engine.end_ns]), kind="stable")
    everything = _Spans.joined(spans, engine).take(order)  # as a collector receives it
    links = _members(plan)
    for first in range(0, len(order), SPANS_A_FILE):
        part = everything.take(np.arange(first, min(first + SPANS_A_FILE, len(order))))
        store.write("spans", _span_table(part, plan, links))
        rows += part.end_ns.size
    steps = _step_table(plan, links)
    for at in range(0, len(steps), 20_000):
        store.write("steps", steps.slice(at, 20_000))
    _write_requests(store, plan, everything, links, steps)
    return {"spans": rows, "steps": len(steps), "requests": requests}


def make_plan(requests: int, seed: int) -> Plan:
    """Deal requests of 16 to 48 steps to the slots."""
    random = np.random.default_rng(seed)
    per_slot = -(-requests // SLOTS)
    lengths = random.integers(16, 49, (SLOTS, per_slot))
    last = np.cumsum(lengths, axis=1) - 1
    first = (last - lengths + 1).T.ravel()[:requests]
    last = last.T.ravel()[:requests]
    gaps = random.integers(STEP_NS, STEP_NS * 11 // 10, int(last.max()) + 1)
    step_start = START_NS + np.cumsum(gaps)
    arrival = step_start[first] - random.exponential(40e6, requests).astype(np.int64) - 2_000 * US
    end = step_start[last] + STEP_NS + random.integers(400 * US, 4_000 * US, requests)
    return Plan(
        first,
        last,
        random.integers(1, 3, requests),
        arrival,
        end,
        random.integers(1, 1 << 63, (requests, 2), np.uint64),
        random.integers(1, 1 << 63, requests, np.uint64),
        step_start,
    )


# --- Spans as columns of integers --------------------------------------------------------------

NAMES = (
    *("chat", "template", "tokenize", "queue", "context", "prefill", "sample", "decode"),
    *("detokenize", "stream", "decode_step", "prefill_step", "mixed_step", "schedule", "forward"),
)
CODE = {name: code for code, name in enumerate(NAMES)}


@dataclass(frozen=True)
class _Spans:
    """`request` is -1 for the engine's spans, `step` -1 for spans that are no step."""

    request: Ints
    step: Ints
    name: Ints
    span_id: NDArray[np.uint64]
    parent_id: NDArray[np.uint64]
    start_ns: Ints
    end_ns: Ints

    def take(self, rows: Ints) -> "_Spans":
        return _Spans(*(getattr(self, name)[rows] for name in self.__dataclass_fields__))

    @classmethod
    def joined(cls, *parts: "_Spans") -> "_Spans":
        names = cls.__dataclass_fields__
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _request_spans(plan: Plan) -> _Spans:
    count = len(plan.first)
    everyone = np.arange(count)
    admitted = plan.step_start_ns[plan.first]
    sampled = plan.step_end_ns[plan.first + plan.chunks - 1]
    left = plan.step_end_ns[plan.last]
    random = np.random.default_rng(1)

    def child(name: str, who: Ints, start: Ints, end: Ints) -> _Spans:
        ids = random.integers(1, 1 << 63, len(who), np.uint64)
        code = np.full(len(who), CODE[name])
        none = np.full(len(who), -1)
        return _Spans(who, none, code, ids, plan.span_id[who], start, end)

    arrival = plan.arrival_ns
    two = np.flatnonzero(plan.chunks == 2)
    second = plan.first[two] + 1
    forward = SCHEDULE_NS, STEP_NS - SAMPLE_NS - 100 * US
    zeros = np.zeros(count, np.uint64)
    chat = np.full(count, CODE["chat"])
    root = _Spans(everyone, everyone * 0 - 1, chat, plan.span_id, zeros, arrival, plan.end_ns)
    return _Spans.joined(
        root,
        child("template", everyone, arrival + 50 * US, arrival + 300 * US),
        child("tokenize", everyone, arrival + 300 * US, arrival + 900 * US),
        child("queue", everyone, arrival + 950 * US, admitted),
        child("context", everyone, admitted, admitted + 100 * US),
        child("prefill", everyone, admitted + forward[0], admitted + forward[1]),
        child(
            "prefill",
            two,
            plan.step_start_ns[second] + forward[0],
            plan.step_start_ns[second] + forward[1],
        ),
        child("sample", everyone, sampled - SAMPLE_NS - 100 * US, sampled - 100 * US),
        child("decode", everyone, sampled - 100 * US, left),
        child("detokenize", everyone, left + 100 * US, left + 150 * US),
        child("stream", everyone, left + 150 * US, plan.end_ns - 20 * US),
    )


def _engine_spans(plan: Plan, first_id: int) -> _Spans:
    count = len(plan.step_start_ns)
    steps = np.arange(count)
    start, end = plan.step_start_ns, plan.step_end_ns
    ids = (first_id + np.arange(4 * count)).astype(np.uint64).reshape(4, count)
    nothing = np.full(count, -1)

    def spans(name: str, row: int, begin: Ints, finish: Ints) -> _Spans:
        code = np.full(count, CODE[name])
        parent = ids[0] if row else np.zeros(count, np.uint64)
        return _Spans(nothing, nothing if row else steps, code, ids[row], parent, begin, finish)

    return _Spans.joined(
        spans("mixed_step", 0, start, end),
        spans("schedule", 1, start, start + SCHEDULE_NS),
        spans("forward", 2, start + SCHEDULE_NS, end - SAMPLE_NS - 100 * US),
        spans("sample", 3, end - SAMPLE_NS - 100 * US, end - 100 * US),
    )


# --- Arrow -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Members:
    """Who was in each step, flat, with the offset of each step."""

    offset: Ints
    request: Ints
    prefills: NDArray[np.bool_]


def _members(plan: Plan) -> _Members:
    lengths = plan.last - plan.first + 1
    request = np.repeat(np.arange(len(lengths)), lengths)
    begin = np.repeat(np.cumsum(lengths) - lengths, lengths)
    step = plan.first[request] + np.arange(len(request)) - begin
    order = np.argsort(step, kind="stable")
    counts = np.bincount(step, minlength=len(plan.step_start_ns))
    request, step = request[order], step[order]
    prefills = step < plan.first[request] + plan.chunks[request]
    return _Members(np.concatenate([[0], np.cumsum(counts)]), request, prefills)


def _ids(words: NDArray[np.uint64], width: int, where: NDArray[np.bool_] | None = None) -> pa.Array:
    """Return ids as an Arrow column, null where `where` is false."""
    flat = pa.py_buffer(np.ascontiguousarray(words))
    valid = None if where is None else pa.py_buffer(np.packbits(where, bitorder="little"))
    return pa.FixedSizeBinaryArray.from_buffers(pa.binary(width), len(words), [valid, flat])


def _text(codes: Ints, words: tuple[str, ...]) -> pa.Array:
    return pa.array(np.array(words, object)[codes], pa.string())


def _all(value: object, kind: pa.DataType, where: NDArray[np.bool_]) -> pa.Array:
    """Return a column that has one value, and null elsewhere."""
    return pa.array(np.full(len(where), value), kind, mask=~where)


def _linked(plan: Plan, links: _Members, steps: Ints, kind: pa.DataType) -> pa.Array:
    """Return the links of some steps; a step of -1 has none."""
    real = steps >= 0
    size = np.where(real, links.offset[steps + 1] - links.offset[steps], 0)
    offset = np.concatenate([[0], np.cumsum(size)])
    begin = np.repeat(links.offset[np.where(real, steps, 0)], size)
    rows = begin + np.arange(offset[-1]) - np.repeat(offset[:-1], size)
    request, prefills = links.request[rows], links.prefills[rows]
    values = {
        "trace_id": _ids(plan.trace_id[request], 16).cast(pa.binary()),
        "span_id": _ids(plan.span_id[request], 8).cast(pa.binary()),
        "phase": _text(prefills.astype(np.int64), ("decode", "prefill")),
        "tokens": pa.array(np.where(prefills, PROMPT_TOKENS, 1)),
    }
    fields = [kind.value_type.field(at) for at in range(kind.value_type.num_fields)]
    columns = [values.get(f.name, pa.nulls(len(rows), f.type)) for f in fields]
    structs = pa.StructArray.from_arrays(columns, fields=fields)
    return pa.ListArray.from_arrays(pa.array(offset, pa.int32()), structs)


def _span_table(spans: _Spans, plan: Plan, links: _Members) -> pa.Table:
    of_request, root = spans.request >= 0, spans.name == CODE["chat"]
    everywhere = np.ones(len(root), np.bool_)
    engine = np.frombuffer(ENGINE_TRACE, np.uint64)
    given = {
        "trace_id": _ids(np.where(of_request[:, None], plan.trace_id[spans.request], engine), 16),
        "span_id": _ids(spans.span_id, 8),
        "parent_span_id": _ids(spans.parent_id, 8, spans.parent_id > 0),
        "name": _text(spans.name, NAMES),
        "kind": _text(root.astype(np.int64), ("internal", "server")),
        "start_ns": pa.array(spans.start_ns),
        "end_ns": pa.array(spans.end_ns),
        "status": _all("unset", pa.string(), everywhere),
        "run_id": _all("synthetic", pa.string(), everywhere),
        "service_name": _all("perfledger-runtime", pa.string(), everywhere),
        "scope_name": _all(SCOPE_NAME, pa.string(), everywhere),
        "scope_version": _all(SCHEMA_VERSION, pa.string(), everywhere),
        "operation": _all("chat", pa.string(), root),
        "model": _all("reference", pa.string(), root),
        "outcome": _all("ok", pa.string(), root),
        "input_tokens": _all(PROMPT_TOKENS, pa.int64(), root),
        "output_tokens": pa.array(_output_tokens(plan)[spans.request], mask=~root),
        "replica": _all("0", pa.string(), ~of_request),
        "links": _linked(plan, links, spans.step, LINKS),
        "received_ns": pa.array(spans.end_ns + 1_000_000_000),
    }
    return _table(SPANS.arrow(), given, len(root))


def _output_tokens(plan: Plan) -> Ints:
    return np.asarray(plan.last - plan.first + 2 - plan.chunks)


def _step_table(plan: Plan, links: _Members) -> pa.Table:
    start, end = plan.step_start_ns, plan.step_end_ns
    everywhere = np.ones(len(start), np.bool_)
    prefills = np.add.reduceat(links.prefills.astype(np.int64), links.offset[:-1])
    given = {
        "run_id": _all("synthetic", pa.string(), everywhere),
        "service_name": _all("perfledger-runtime", pa.string(), everywhere),
        "replica": _all("0", pa.string(), everywhere),
        "rank": _all(0, pa.int32(), everywhere),
        "step_seq": pa.array(np.arange(len(start))),
        "trace_id": _all(ENGINE_TRACE, pa.binary(16), everywhere),
        "span_id": _ids((1 + np.arange(len(start))).astype(np.uint64), 8),
        "kind": _all("mixed_step", pa.string(), everywhere),
        "start_ns": pa.array(start),
        "schedule_end_ns": pa.array(start + SCHEDULE_NS),
        "sample_start_ns": pa.array(end - SAMPLE_NS - 100 * US),
        "sample_end_ns": pa.array(end - 100 * US),
        "end_ns": pa.array(end),
        "width": pa.array(np.diff(links.offset), pa.int32()),
        "prefill_tokens": pa.array(prefills * PROMPT_TOKENS),
        "decode_tokens": pa.array(np.diff(links.offset) - prefills),
        "members": _linked(plan, links, np.arange(len(start)), MEMBERS),
        "received_ns": pa.array(end + 6_000_000_000),
    }
    return _table(STEPS.arrow(), given, len(start))


def _table(schema: pa.Schema, given: dict[str, pa.Array], rows: int) -> pa.Table:
    columns = [given.get(field.name, pa.nulls(rows, field.type)) for field in schema]
    return pa.Table.from_arrays(columns, names=schema.names)


def _write_requests(
    store: Store, plan: Plan, spans: _Spans, links: _Members, steps: pa.Table
) -> None:
    """Write derived rows as the collector does: some thousand requests at a time."""
    everyone = np.argsort(plan.end_ns)
    all_steps = pl.DataFrame(steps)
    for first in range(0, len(everyone), REQUESTS_A_FILE):
        mine = np.zeros(len(everyone) + 1, np.bool_)
        mine[everyone[first : first + REQUESTS_A_FILE]] = True
        frame = pl.DataFrame(
            _span_table(spans.take(np.flatnonzero(mine[spans.request])), plan, links)
        )
        near = all_steps.filter(
            pl.col("end_ns").is_between(frame["start_ns"].min(), frame["end_ns"].max() + STEP_NS)
        )
        rows = request_rows(frame, near, received_ns=int(plan.end_ns.max()) + 6_000_000_000)
        store.write("requests", rows.to_arrow().cast(REQUESTS.arrow()))


if __name__ == "__main__":
    wanted = int(sys.argv[2]) if len(sys.argv) > 2 else 100_000
    print(json.dumps(write_synthetic_store(Store(Path(sys.argv[1])), wanted)))
