"""Spans as a trace file that ui.perfetto.dev and chrome://tracing load.

The format is Chrome's JSON (Trace Event Format): complete events ("X") with microsecond stamps.
Slices of one thread must nest, so each request takes a lane of its own while it lasts, and a
child that does not nest in what is open there moves to a lane beside it.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import polars as pl

from perfledger.schema.attributes import STEP_NAMES

REQUESTS_PID, ENGINE_PID = 1, 2
Event = dict[str, object]

_ARGUMENTS = ("input_tokens", "output_tokens", "cached_tokens", "tokens", "reason", "outcome")


@dataclass
class _Lane:
    """One thread of the drawing: the slices open at the current time, outermost first."""

    open: list[tuple[bytes, int]] = field(default_factory=list)

    def fits(self, owner: bytes, start_ns: int, end_ns: int) -> bool:
        while self.open and self.open[-1][1] <= start_ns:
            self.open.pop()
        return not self.open or (self.open[-1][0] == owner and end_ns <= self.open[-1][1])


def trace_events(spans: pl.DataFrame, steps: pl.DataFrame) -> list[Event]:
    """Return the events of request spans and engine steps (columns of `spans` and `steps`).

    Times are microseconds after the earliest span, exact to the nanosecond in three decimals.
    """
    starts = [frame["start_ns"].min() for frame in (spans, steps) if frame.height]
    if not starts:
        return []
    base_ns = min(int(start) for start in starts)  # type: ignore[arg-type]
    return [
        *_names(),
        *_request_events(spans, base_ns),
        *_step_events(steps, base_ns),
    ]


def write_trace(path: Path, spans: pl.DataFrame, steps: pl.DataFrame) -> int:
    """Write the trace file and return the number of its events."""
    events = trace_events(spans, steps)
    document = {"displayTimeUnit": "ns", "traceEvents": events}
    path.write_bytes(orjson.dumps(document))
    return len(events)


def _names() -> Iterator[Event]:
    for pid, name in ((REQUESTS_PID, "requests"), (ENGINE_PID, "engine")):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}


def _request_events(spans: pl.DataFrame, base_ns: int) -> Iterator[Event]:
    """Yield the spans of requests; a lane belongs to a trace as long as a slice is open in it."""
    wanted = ["trace_id", "name", "kind", "start_ns", "end_ns", *_ARGUMENTS]
    # Children of steps are in the engine's own trace; requests' prefill spans name their step too.
    engine_traces = spans.filter(pl.col("name").is_in(list(STEP_NAMES)))["trace_id"].unique()
    engine = pl.col("trace_id").is_in(engine_traces.implode())
    rows = (
        spans.filter(~engine)
        .select(wanted)
        .sort(["start_ns", "end_ns"], descending=[False, True])
        .iter_rows(named=True)
    )
    lanes: list[_Lane] = []
    for row in rows:
        owner, start_ns, end_ns = row["trace_id"], row["start_ns"], row["end_ns"]
        lane = _find_lane(lanes, owner, start_ns, end_ns)
        lanes[lane].open.append((owner, end_ns))
        arguments = {key: row[key] for key in _ARGUMENTS if row[key] is not None}
        arguments["trace_id"] = owner.hex()
        yield _slice(REQUESTS_PID, lane, row["name"], start_ns, end_ns, base_ns, arguments)


def _find_lane(lanes: list[_Lane], owner: bytes, start_ns: int, end_ns: int) -> int:
    """Return the lane that the owner holds and the slice fits, else the first free one."""
    free = None
    for at, lane in enumerate(lanes):
        if lane.fits(owner, start_ns, end_ns):
            if lane.open:
                return at
            free = at if free is None else free
    if free is None:
        lanes.append(_Lane())
        free = len(lanes) - 1
    return free


def _step_events(steps: pl.DataFrame, base_ns: int) -> Iterator[Event]:
    """Yield each rank's steps with their phases inside, and counters of the batch."""
    ranks: dict[tuple[str, int], int] = {}
    for step in steps.sort("start_ns").iter_rows(named=True):
        lane = ranks.setdefault((step["replica"], step["rank"]), len(ranks))
        keys = ("step_seq", "width", "prefill_tokens", "decode_tokens")
        arguments = {key: step[key] for key in keys}
        yield _slice(
            ENGINE_PID, lane, step["kind"], step["start_ns"], step["end_ns"], base_ns, arguments
        )
        for name, start_ns, end_ns in _phases(step):
            yield _slice(ENGINE_PID, lane, name, start_ns, end_ns, base_ns, {})
        for counter in ("width", "waiting", "kv_blocks_used"):
            if step[counter] is not None:
                yield {
                    "ph": "C",
                    "name": counter,
                    "pid": ENGINE_PID,
                    "ts": (step["start_ns"] - base_ns) / 1000,
                    "args": {f"{step['replica']}/{step['rank']}": step[counter]},
                }
    for (replica, rank), lane in ranks.items():
        title = {"name": f"replica {replica} rank {rank}"}
        yield {"ph": "M", "name": "thread_name", "pid": ENGINE_PID, "tid": lane, "args": title}


def _phases(step: dict[str, int]) -> Iterable[tuple[str, int, int]]:
    yield "schedule", step["start_ns"], step["schedule_end_ns"]
    if step["sample_start_ns"] is not None:
        yield "forward", step["schedule_end_ns"], step["sample_start_ns"]
        yield "sample", step["sample_start_ns"], step["sample_end_ns"]


def _slice(
    pid: int, tid: int, name: str, start_ns: int, end_ns: int, base_ns: int, arguments: Event
) -> Event:
    return {
        "ph": "X",
        "name": name,
        "pid": pid,
        "tid": tid,
        "ts": (start_ns - base_ns) / 1000,
        "dur": (end_ns - start_ns) / 1000,
        "args": arguments,
    }
