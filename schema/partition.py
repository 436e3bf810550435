"""Where each nanosecond of a request goes: the partition of its time from arrival to end.

At each instant the first of these that holds wins (`stages.STAGES` says what each stage means):

1. in a step of the request: `sample` while its sample child runs, else `prefill` where any of its
   tokens there are prompt or recomputed ones (share `recompute`), else `decode`;
2. its spans `encode`, `adapter_load`, `kv_transfer`; 3. `context`; 4. `queue`;
5. `route`, `template`, `tokenize`;
6. from the first admission to the last sample: `stream` while held back for an unread client, else
   `host_gap` (shares: `other_step` while a step of its engine runs without it, else `schedule`
   while its engine schedules, else `rest`);
7. after that last sample: `detokenize`, then `stream`; 8. else `unattributed`.

A step counts from the end of its schedule child to its end. The first admission is the earliest
end of a `context` span, or the start of the first step where there is no such span. The last
sample is the latest end of a step's sample child (of the step, where it has none). A request
without steps is described by its own `prefill`, `decode` and `sample` spans instead. A request
that no engine worked on has no last sample: its `detokenize` and `stream` spans always count.

Pure: integers of ns in, integers of ns out. The stages of a request add up to its end minus its
arrival exactly, whatever the spans look like; the order of the input rows does not matter.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import TypeVar

import numpy as np

from perfledger.schema.intervals import Coverage, Ints, Timeline
from perfledger.schema.partition_input import EngineSteps, Members, OwnSpans, once_per_step
from perfledger.schema.stage_time import CLASS, CLASSES, Engine, GapShares, stage_time
from perfledger.schema.stages import STAGE_NAMES, SUB_STAGE_COLUMNS

SLICES_AT_ONCE = 2
_MOST_NS = 1 << 62  # of request time in one slice
_STAGE_OF = {"recompute": "prefill", "held_back": "stream"}

Rows = TypeVar("Rows", OwnSpans, Members)


@dataclass(frozen=True)
class Partition:
    """ns per request: columns in the order of STAGE_NAMES and of SUB_STAGE_COLUMNS.

    `until` has the stages of the time from arrival to the instants asked for.
    """

    stages: Ints
    sub_stages: Ints
    until: Ints


def partition(
    arrival_ns: Ints,
    end_ns: Ints,
    spans: OwnSpans,
    steps: EngineSteps,
    members: Members,
    *,
    until_ns: Ints | None = None,
    slice_size: int = 8192,
) -> Partition:
    """Return where the time of each request went, in ns (the rules are in the module's docstring).

    `until_ns` is an instant of each request up to which its time is also partitioned; by default
    its arrival. Requests are worked on in slices of at most `slice_size`, to bound memory.
    """
    end_ns = np.maximum(arrival_ns, end_ns)
    until_ns = arrival_ns if until_ns is None else until_ns
    steps = _repaired(steps)
    spans = _by_request(spans)
    members = once_per_step(members, steps)
    engines = _engines(steps)
    widths = (len(STAGE_NAMES), len(SUB_STAGE_COLUMNS), len(STAGE_NAMES))
    found = Partition(*(np.zeros((len(arrival_ns), width), np.int64) for width in widths))

    def fill(bounds: tuple[int, int]) -> None:
        first, last = bounds
        sums, shares = stage_time(
            Timeline.of(arrival_ns[first:last], end_ns[first:last]),
            until_ns[first:last],
            _of_requests(spans, first, last),
            steps,
            _of_requests(members, first, last),
            engines,
        )
        found.stages[first:last] = _stages(sums.whole)
        found.sub_stages[first:last] = _sub_stages(sums.whole, shares)
        found.until[first:last] = _stages(sums.before)

    with ThreadPoolExecutor(SLICES_AT_ONCE) as pool:  # numpy lets go of the interpreter's lock
        list(pool.map(fill, _slices(end_ns - arrival_ns, slice_size)))
    return found


def _of_requests(rows: Rows, first: int, last: int) -> Rows:
    """Return the rows (sorted by request) of some requests, which are numbered from 0 again."""
    part = slice(*np.searchsorted(rows.request, [first, last]))
    columns = {field.name: getattr(rows, field.name)[part] for field in fields(rows)}
    return replace(rows, **{**columns, "request": columns["request"] - first})


def _repaired(steps: EngineSteps) -> EngineSteps:
    """Make each step run forwards, its sample child inside it."""
    start = steps.schedule_end_ns
    end = np.maximum(start, steps.end_ns)
    sample_start = np.clip(steps.sample_start_ns, start, end)
    sample_end = np.clip(steps.sample_end_ns, sample_start, end)
    return EngineSteps(
        steps.engine, np.minimum(steps.start_ns, start), start, sample_start, sample_end, end
    )


def _by_request(spans: OwnSpans) -> OwnSpans:
    order = np.argsort(spans.request, kind="stable")
    start = spans.start_ns[order]
    end = np.maximum(start, spans.end_ns[order])
    return OwnSpans(spans.request[order], spans.kind[order], start, end)


def _engines(steps: EngineSteps) -> list[Engine]:
    """Return when each engine ran and scheduled, by its number."""
    order = np.argsort(steps.engine, kind="stable")
    numbers = np.arange(steps.engine.max(initial=-1) + 2)
    first = np.searchsorted(steps.engine[order], numbers)
    return [_engine(steps, order[begin:end]) for begin, end in pairwise(first)]


def _engine(steps: EngineSteps, rows: Ints) -> Engine:
    end = steps.end_ns[rows]
    return Engine(
        Coverage.of(steps.schedule_end_ns[rows], end), Coverage.of(steps.start_ns[rows], end)
    )


def _slices(length_ns: Ints, size: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of requests whose times, laid one after another, fit an integer."""
    ranges = [(first, first + size) for first in range(0, len(length_ns), size)]
    while ranges:
        first, last = ranges.pop()
        if last - first > 1 and length_ns[first:last].sum(dtype=np.float64) > _MOST_NS:
            middle = (first + last) // 2
            ranges += [(first, middle), (middle, last)]
        else:
            yield first, min(last, len(length_ns))


def _stages(sums: Ints) -> Ints:
    """Return the stages in their order; a share is added to its stage."""
    stages = np.zeros((len(sums), len(STAGE_NAMES)), np.int64)
    for column, name in enumerate(CLASSES):
        stages[:, STAGE_NAMES.index(_STAGE_OF.get(name, name))] += sums[:, column]
    return stages


def _sub_stages(sums: Ints, gaps: GapShares) -> Ints:
    rest = sums[:, CLASS["host_gap"]] - gaps.other_step - gaps.schedule
    shares = {
        "prefill_recompute_ns": sums[:, CLASS["recompute"]],
        "host_gap_schedule_ns": gaps.schedule,
        "host_gap_other_step_ns": gaps.other_step,
        "host_gap_rest_ns": rest,
    }
    return np.column_stack([shares[name] for name in SUB_STAGE_COLUMNS])
