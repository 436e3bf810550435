"""Derives `steps`, `requests` and `collectives` while spans arrive, from what is held in memory.

A step's row is made once its span is `settle_s` old. A request is derived when its root is
`settle_s` old, and again at two later ages (`checks_ns`) in case spans were late: where the result
differs from the row written last, a row with the next version is. Then its spans are let go.
A collective's row is made at once, from its span alone, which is not held.
Spans without a request are held for `hold_s`: parts of a long request arrive long before its root.

Memory is bounded. What is let go unused, the oldest first, is counted, and a request that began
before the end of something let go may lack a part of itself: it is counted and not derived
(`attribute` derives it from the store). So is what cannot be derived, for a defect of ours: it
goes alone, as it must neither stay nor keep others from being derived.
Ages are of the caller's monotonic clock.
"""

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.compute as pc

from perfledger.collectors.derived_rows import (
    Derived,
    as_table,
    derive_what_can_be,
    empty_rows,
)
from perfledger.collectors.held_spans import (
    NEVER_READ,
    Arrived,
    held_rows,
    owners_of,
    rows_since,
)
from perfledger.schema.attributes import COLLECTIVE_NAME, STEP_NAMES
from perfledger.schema.derive import request_rows, step_rows
from perfledger.schema.derive_collectives import collective_rows, is_collective
from perfledger.schema.request_roots import is_request_root
from perfledger.schema.tables import COLLECTIVES, REQUESTS, SPANS, STEPS

_SECOND_NS = 1_000_000_000
_MOST_REQUESTS = 1_000_000  # remembered, so that a root sent again makes no row
_IDS = ["trace_id", "span_id"]
_PARENT_IDS = ["trace_id", "parent_span_id"]
_NOT_CONTENT = ("version", "received_ns")

COUNTS = (
    *("steps_derived", "requests_derived", "requests_rewritten", "requests_skipped"),
    *("spans_let_go", "steps_let_go", "steps_failed", "requests_failed"),
    *("collectives_derived", "collectives_failed"),
)

Key = tuple[bytes, bytes]


@dataclass(frozen=True)
class SettleLimits:
    """At which ages of arrival rows are derived, and how much may be held for them."""

    settle_s: float = 5.0
    window_s: float = 60.0
    hold_s: float = 600.0
    max_spans: int = 200_000
    max_step_bytes: int = 128 * 2**20

    @property
    def checks_ns(self) -> list[int]:
        """Return the ages of a root at which its request is derived, ascending."""
        ages_s = {self.settle_s, min(4 * self.settle_s, self.window_s), self.window_s}
        return sorted(int(age_s * _SECOND_NS) for age_s in ages_s)


@dataclass
class _Request:
    """How far a request is: checks done, and version and content hash of the row written last."""

    seen_ns: int
    checks: int = 0
    version: int = 0
    content: int = 0


@dataclass(frozen=True)
class Settled:
    """Rows to write, and the errors of what could not be derived: defects of ours, to be told."""

    steps: pa.Table
    requests: pa.Table
    collectives: pa.Table
    defects: tuple[Exception, ...] = ()


class Settling:
    """`add` may be called from one thread while another one is in `settle`."""

    def __init__(self, limits: SettleLimits | None = None) -> None:
        self.limits = limits or SettleLimits()
        # Read from other threads, so no key comes later.
        self.counts: Counter[str] = Counter(dict.fromkeys(COUNTS, 0))
        self._checks_ns = self.limits.checks_ns
        self._arrived: deque[Arrived] = deque()
        self._calls: deque[pa.Table] = deque()
        # Arrived, and of no use so far: there is no request or step that they might belong to.
        self._idle: deque[Arrived] = deque()
        self._spans = held_rows(empty_rows(SPANS), 0)
        self._steps = held_rows(empty_rows(STEPS), 0)
        self._requests: dict[Key, _Request] = {}
        self._pending: dict[Key, _Request] = {}
        # Telemetry's time: what ended before it may have been let go.
        self._let_go_ns = -1

    @property
    def held_spans(self) -> int:
        """Return how many spans are held."""
        return len(self._spans) + int(sum(one.rows.num_rows for one in self._idle))

    def add(self, spans: pa.Table, now_ns: int) -> None:
        """Take rows of `spans` that have just arrived."""
        spans = self._without_calls(spans)
        if spans.num_rows:
            self._arrived.append(Arrived.of(spans, now_ns))

    def _without_calls(self, spans: pa.Table) -> pa.Table:
        """Take the collectives among spans, and return the others."""
        is_call = pc.equal(spans["name"], COLLECTIVE_NAME)
        if not pc.any(is_call).as_py():
            return spans
        calls = spans.filter(is_call).drop_columns([*NEVER_READ, "links"])
        waiting = self._calls.copy()  # in one piece: `settle` may be taking them
        if sum(one.num_rows for one in waiting) + calls.num_rows <= self.limits.max_spans:
            self._calls.append(calls)
        else:
            self.counts["spans_let_go"] += calls.num_rows
        return spans.filter(pc.invert(is_call))

    def resume(
        self,
        spans: pl.DataFrame,
        steps: pl.DataFrame,
        requests: pl.DataFrame,
        collectives: pl.DataFrame,
        *,
        since_ns: int,
        now_ns: int,
    ) -> None:
        """Take what an earlier collector wrote lately, so that this one goes on where it ended.

        Rows that are already there are not written again. Requests that had their last check, or
        that began before `since_ns` (wall), when the tables given here do, are taken as finished.
        """
        if spans.is_empty():
            return
        derived = spans.join(collectives, on=_IDS, how="semi").filter(is_collective())
        left = spans.join(derived, on=[*_IDS, "name"], how="anti", maintain_order="left")
        self.add(left.select(SPANS.names()).to_arrow(), now_ns)
        self._steps = held_rows(steps, now_ns)
        for key, version, content in zip(
            _keys(requests), requests["version"], _content(requests), strict=True
        ):
            self._requests[key] = _Request(now_ns, 0, version, content)
        checked = pl.col("received_ns") < pl.col("received_ns").max() - self._checks_ns[-1]
        begun_before = pl.col("start_ns") < since_ns
        for key in _keys(spans.filter(is_request_root() & (checked | begun_before))):
            known = self._requests.setdefault(key, _Request(now_ns))
            known.checks = len(self._checks_ns)
        self._pending = {k: r for k, r in self._requests.items() if not self._is_finished(r)}

    def settle(self, now_ns: int, received_ns: int, *, everything: bool = False) -> Settled:
        """Return the rows that are due, or with `everything` all that can be made.

        `received_ns` is the wall clock; it stamps the rows.
        """
        calls = self._settle_calls(received_ns)
        steps, requests = Derived(empty_rows(STEPS)), Derived(empty_rows(REQUESTS))
        try:
            self._take_arrived()
            if not self._spans.is_empty():
                age_ns = 0 if everything else int(self.limits.settle_s * _SECOND_NS)
                steps = self._settle_steps(now_ns - age_ns, received_ns)
                requests = self._settle_requests(now_ns, received_ns, everything)
        finally:
            self._let_go(now_ns)
        return Settled(
            as_table(steps.rows, STEPS),
            as_table(requests.rows, REQUESTS),
            as_table(calls.rows, COLLECTIVES),
            (*steps.defects, *requests.defects, *calls.defects),
        )

    def _settle_calls(self, received_ns: int) -> "Derived":
        """Make rows of the collectives that have arrived."""
        arrived = [self._calls.popleft() for _ in range(len(self._calls))]
        if not arrived:
            return Derived(empty_rows(COLLECTIVES))
        spans = pl.DataFrame(pa.concat_tables(arrived))
        derived = derive_what_can_be(
            spans, COLLECTIVES, lambda some: collective_rows(some, received_ns)
        )
        self.counts["collectives_derived"] += len(derived.rows)
        self.counts["collectives_failed"] += derived.failed
        return derived

    def _take_arrived(self) -> None:
        """Take what has come into the frame of held spans, once some of it can be derived from."""
        while self._arrived:
            self._idle.append(self._arrived.popleft())
        if self._pending or any(one.matters for one in self._idle):
            parts = [self._spans, *(one.frame() for one in self._idle)]
            self._idle.clear()
            if len(parts) > 1:
                self._spans = pl.concat(parts, rechunk=True)

    def _settle_steps(self, until_ns: int, received_ns: int) -> "Derived":
        """Make rows of the steps seen until then; their spans have served."""
        is_due = pl.col("name").is_in(list(STEP_NAMES)) & (pl.col("seen_ns") <= until_ns)
        due = self._spans.filter(is_due)
        if due.is_empty():
            return Derived(empty_rows(STEPS))
        children = self._spans.join(due, left_on=_PARENT_IDS, right_on=_IDS, how="semi")

        def derive(some: pl.DataFrame) -> pl.DataFrame:
            theirs = children.join(some, left_on=_PARENT_IDS, right_on=_IDS, how="semi")
            return step_rows(pl.concat([some, theirs]).drop("seen_ns"), received_ns)

        derived = derive_what_can_be(due.join(self._steps, on=_IDS, how="anti"), STEPS, derive)
        self._steps = pl.concat([self._steps, held_rows(derived.rows, until_ns)])
        self._spans = self._spans.filter(~is_due).join(
            self._steps, left_on=_PARENT_IDS, right_on=_IDS, how="anti", maintain_order="left"
        )
        self.counts["steps_derived"] += len(derived.rows)
        self.counts["steps_failed"] += derived.failed
        return derived

    def _settle_requests(self, now_ns: int, received_ns: int, everything: bool) -> "Derived":
        """Make rows of the requests whose next check is due and whose content has changed."""
        roots = self._spans.filter(is_request_root())
        for key, seen_ns in zip(_keys(roots), roots["seen_ns"], strict=True):
            if key not in self._requests:
                self._requests[key] = self._pending[key] = _Request(seen_ns)
        due = self._due_checks(now_ns, everything)
        if not due:
            return Derived(empty_rows(REQUESTS))
        roots = roots.filter(pl.Series([key in due for key in _keys(roots)], dtype=pl.Boolean))
        roots = self._without_incomplete(roots)
        derived = derive_what_can_be(roots, REQUESTS, lambda some: self._derive(some, received_ns))
        changed = replace(derived, rows=self._changed(derived.rows))
        self.counts["requests_failed"] += derived.failed
        self._pass_checks(due)
        return changed

    def _is_finished(self, request: _Request) -> bool:
        return request.checks == len(self._checks_ns)

    def _due_checks(self, now_ns: int, everything: bool) -> dict[Key, int]:
        """Return the requests that have come to a check, with how many they have then passed."""
        due = {}
        for key, request in self._pending.items():
            age_ns = now_ns - request.seen_ns
            passed = sum(everything or age_ns >= check_ns for check_ns in self._checks_ns)
            if passed > request.checks:
                due[key] = passed
        return due

    def _pass_checks(self, passed: dict[Key, int]) -> None:
        """Move requests on, now that their rows are made; let the spans of finished ones go."""
        for key, checks in passed.items():
            self._requests[key].checks = checks
        self._pending = {k: r for k, r in self._pending.items() if not self._is_finished(r)}
        self._forget_spans_of({key for key in passed if self._is_finished(self._requests[key])})

    def _without_incomplete(self, roots: pl.DataFrame) -> pl.DataFrame:
        complete = roots.filter(pl.col("start_ns") > self._let_go_ns)
        self.counts["requests_skipped"] += len(roots) - len(complete)
        return complete

    def _derive(self, roots: pl.DataFrame, received_ns: int) -> pl.DataFrame:
        if roots.is_empty():
            return empty_rows(REQUESTS)
        spans = self._spans.join(roots, on="trace_id", how="semi").drop("seen_ns")
        steps = self._steps.filter(
            (pl.col("end_ns") >= roots["start_ns"].min())
            & (pl.col("start_ns") <= roots["end_ns"].max())
        )
        rows = request_rows(spans, steps.drop("seen_ns"), received_ns=received_ns)
        return rows.join(roots, on=_IDS, how="semi", maintain_order="left")

    def _changed(self, rows: pl.DataFrame) -> pl.DataFrame:
        """Return the rows that differ from those written last, with their versions."""
        changed, versions = [], []
        for key, content in zip(_keys(rows), _content(rows), strict=True):
            request = self._requests[key]
            is_new = not request.version or request.content != content
            request.version += is_new
            request.content = content
            changed.append(is_new)
            versions.append(request.version)
            self.counts["requests_derived"] += is_new and request.version == 1
            self.counts["requests_rewritten"] += is_new and request.version > 1
        dtype = rows.schema["version"]
        rows = rows.with_columns(pl.Series("version", versions, dtype=dtype))
        return rows.filter(pl.Series(changed, dtype=pl.Boolean))

    def _forget_spans_of(self, finished: set[Key]) -> None:
        """Let the spans of finished requests go; their keys stay, so that none is made anew."""
        if not finished:
            return
        owner = owners_of(self._spans)
        roots = np.unique(owner[owner >= 0])
        done = np.zeros(len(self._spans), dtype=bool)
        done[roots] = [key in finished for key in _keys(self._spans[roots])]
        self._spans = self._spans.filter(pl.Series((owner < 0) | ~done[owner]))

    def _let_go(self, now_ns: int) -> None:
        """Let go what is too old or too much, and remember until when something is missing."""
        oldest_ns = now_ns - int(self.limits.hold_s * _SECOND_NS)
        idle_rows = self._let_idle_go(oldest_ns)
        spans = rows_since(self._spans, oldest_ns).tail(max(0, self.limits.max_spans - idle_rows))
        self._note_gone(self._spans, len(spans), "spans_let_go")
        self._spans = spans
        steps = rows_since(self._steps, oldest_ns)
        while steps.estimated_size() > self.limits.max_step_bytes:
            steps = steps.tail(len(steps) // 2)
        self._note_gone(self._steps, len(steps), "steps_let_go")
        self._steps = steps
        self._forget_requests_before(oldest_ns - self._checks_ns[-1])

    def _let_idle_go(self, oldest_ns: int) -> int:
        """Let go what is idle and too old or too much; return how many spans stay."""
        rows = int(sum(one.rows.num_rows for one in self._idle))
        while self._idle and (rows > self.limits.max_spans or self._idle[0].seen_ns < oldest_ns):
            gone = self._idle.popleft()
            rows -= gone.rows.num_rows
            self.counts["spans_let_go"] += gone.rows.num_rows
            self._let_go_ns = max(self._let_go_ns, gone.last_ns())
        return rows

    def _forget_requests_before(self, oldest_ns: int) -> None:
        while self._requests:
            key = next(iter(self._requests))
            if self._requests[key].seen_ns >= oldest_ns and len(self._requests) < _MOST_REQUESTS:
                return
            del self._requests[key]
            self._pending.pop(key, None)

    def _note_gone(self, held: pl.DataFrame, kept: int, count: str) -> None:
        if kept == len(held):
            return
        gone = held.head(len(held) - kept)
        self.counts[count] += len(gone)
        # A nonsense end far in the future must not hide every request from now on.
        end_ns = gone.select(pl.min_horizontal("end_ns", "received_ns").max()).item()
        self._let_go_ns = max(self._let_go_ns, end_ns)


def _keys(rows: pl.DataFrame) -> Iterable[Key]:
    return zip(rows["trace_id"].to_list(), rows["span_id"].to_list(), strict=True)


def _content(requests: pl.DataFrame) -> list[int]:
    """Return a hash of each row, but for when and how often it was written."""
    return requests.drop(_NOT_CONTENT).hash_rows(seed=0).to_list()
