"""What an analyzer is given: a store, and which of its requests to look at."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import numpy as np
import polars as pl
import pyarrow as pa

from perfledger.schema.attributes import STEP_NAMES
from perfledger.schema.derive import step_rows
from perfledger.schema.errors import NoDataError
from perfledger.schema.own_spans import OWN_COLUMNS, OWN_ENCODED, find_own_spans
from perfledger.schema.request_roots import find_roots
from perfledger.schema.request_traces import STEP_COLUMNS, RequestTraces, find_steps
from perfledger.schema.span_ids import SpanIds, SpanIndex
from perfledger.schema.step_members import MEMBER_LEAVES
from perfledger.schema.store import DEFAULT_NAMESPACE, Store
from perfledger.schema.tables import STEPS

# A file is written after its spans have ended; the clocks of hosts may differ by this much.
_CLOCK_SLACK_NS = 3600 * 1_000_000_000


def open(store: str, namespace: str = DEFAULT_NAMESPACE) -> "Selection":
    """Open a store (a folder) and select all its requests. Raises UsageError on a bad URL."""
    return Selection(Store.at(store, namespace))


@dataclass(frozen=True)
class ClientCalls:
    """The traces that the clients of a run began."""

    run: str
    trace_ids: pl.Series


@dataclass(frozen=True)
class Selection:
    """The requests of a store that arrived in `[from_ns, to_ns)`, of one run or service if given.

    Of these, `replica` leaves those that it answered, `calls` those that a run of clients made.
    Times are wall ns. It reads nothing until an analyzer does.
    """

    store: Store
    run: str = ""
    service: str = ""
    from_ns: int | None = None
    to_ns: int | None = None
    replica: str = ""
    calls: ClientCalls | None = None

    def where(
        self,
        *,
        run: str = "",
        service: str = "",
        from_ns: int | None = None,
        to_ns: int | None = None,
        replica: str = "",
    ) -> "Selection":
        """Return the same store with another selection."""
        return Selection(self.store, run, service, from_ns, to_ns, replica)

    def resolved(self) -> "Selection":
        """Return what a run of clients alone stands for: the requests that they made; else self.

        `perfledger load` marks its client spans with its run; the service that it calls may be in
        another run, or in none. Analyzers begin with this; it reads the run ids of spans.
        """
        if not self.run or self.calls is not None:
            return self
        of_run = self.spans().filter(pl.col("run_id") == self.run)
        kinds = of_run.select(pl.col("kind").unique()).collect()["kind"].to_list()
        if kinds != ["client"]:
            return self
        traces = of_run.select(pl.col("trace_id").unique()).collect()["trace_id"]
        made = find_roots(self.spans(), pl.col("trace_id").is_in(traces.implode())).rows
        if made.is_empty():
            return self
        services = made["service_name"].unique().to_list()
        first_ns = int(made["start_ns"].to_numpy().min())
        last_ns = int(made["end_ns"].to_numpy().max()) + 1
        return replace(
            self,
            run="",
            service=self.service or (services[0] or "" if len(services) == 1 else ""),
            from_ns=max(first_ns, first_ns if self.from_ns is None else self.from_ns),
            to_ns=min(last_ns, last_ns if self.to_ns is None else self.to_ns),
            calls=ClientCalls(self.run, traces),
        )

    def describe(self) -> str:
        """Return the selection in words."""
        words = [f"run {self.run}"] if self.run else []
        words += [f"requests made by run {self.calls.run}"] if self.calls else []
        words += [f"service {self.service}"] if self.service else []
        words += [f"from {_stamp(self.from_ns)}"] if self.from_ns is not None else []
        words += [f"to {_stamp(self.to_ns)}"] if self.to_ns is not None else []
        words += [f"replica {self.replica}"] if self.replica else []
        return ", ".join(words) or "all requests"

    def of_resource(self) -> pl.Expr:
        """Return the condition on run and service."""
        condition = pl.lit(True)
        if self.run:
            condition &= pl.col("run_id") == self.run
        if self.service:
            condition &= pl.col("service_name") == self.service
        return condition

    def of_request(self, column: str) -> pl.Expr:
        """Return the whole condition on root spans or rows of requests that arrived in `column`."""
        condition = self.of_arrival(column)
        if self.replica:
            condition &= pl.col("replica") == self.replica
        if self.calls is not None:
            condition &= pl.col("trace_id").is_in(self.calls.trace_ids.implode())
        return condition

    def of_arrival(self, column: str) -> pl.Expr:
        """Return the condition on run, service and time, with the time in `column`."""
        condition = self.of_resource()
        if self.from_ns is not None:
            condition &= pl.col(column) >= self.from_ns
        if self.to_ns is not None:
            condition &= pl.col(column) < self.to_ns
        return condition

    @property
    def since_ns(self) -> int:
        """Files written before this wall time hold nothing of the selection; 0 where unbounded."""
        return 0 if self.from_ns is None else max(0, self.from_ns - _CLOCK_SLACK_NS)

    def spans(self) -> pl.LazyFrame:
        """Return the spans of the store as they were received, re-sent ones too."""
        return self.store.scan_as_received("spans", self.since_ns)

    def traces(self) -> RequestTraces:
        """Return the selected requests with their spans and steps.

        Raises NoDataError where there are none.
        """
        roots = find_roots(self.spans(), self.of_request("start_ns"))
        if roots.rows.is_empty():
            raise self._nothing()
        with ThreadPoolExecutor(1) as beside:  # two cores are faster than one
            steps = beside.submit(lambda: find_steps(roots, *self._steps()))
            files = self.store.read_as_received("spans", OWN_COLUMNS, OWN_ENCODED, self.since_ns)
            own = find_own_spans(roots, files, self.spans())
        return RequestTraces.of(roots, own, steps.result())

    def _steps(self) -> tuple[pl.DataFrame, Iterator[pa.Array]]:
        """Return the steps, and their members file by file, still as Parquet's dictionaries."""
        leaves = [*STEP_COLUMNS, *MEMBER_LEAVES]
        tables = list(self.store.read_as_received("steps", leaves, MEMBER_LEAVES, self.since_ns))
        parts = [_step_frame(table.drop_columns("members")) for table in tables]
        steps = pl.concat([_step_frame(STEPS.arrow().empty_table()), *parts])
        underived = self._underived_steps(steps)
        members = [chunk for table in tables for chunk in table["members"].chunks]
        if len(underived):
            members.append(underived["members"].rechunk().to_arrow())
        return pl.concat([steps, underived.select(STEP_COLUMNS)]), iter(members)

    def _underived_steps(self, steps: pl.DataFrame) -> pl.DataFrame:
        """Return rows for step spans that the collector has not made rows of (yet)."""
        received = self.spans().filter(pl.col("name").is_in(list(STEP_NAMES)))
        ids = received.select("trace_id", "span_id", "start_ns", "end_ns").collect()
        derived = SpanIndex(SpanIds.of(steps["trace_id"], steps["span_id"]))
        found = derived.find(SpanIds.of(ids["trace_id"], ids["span_id"]))
        lost = ids[np.flatnonzero(found == -1)]
        if lost.is_empty():
            return step_rows(self.spans().clear().collect(), received_ns=0)
        near = (
            pl.col("trace_id").is_in(lost["trace_id"].unique().implode())
            & (pl.col("start_ns") >= lost["start_ns"].min())
            & (pl.col("end_ns") <= lost["end_ns"].max())
        )
        rows = step_rows(self.spans().filter(near).collect(), received_ns=0)
        return rows.join(lost, on=["trace_id", "span_id"], how="semi")

    def _nothing(self) -> NoDataError:
        where = f"store {self.store.root}, namespace {self.store.namespace}: {self.describe()}"
        if not self.store.files("spans"):
            fix = "start `perfledger collect` on this store and send it telemetry"
            return NoDataError("no spans in this store", where=where, fix=fix)
        fix = "widen the selection; a request counts when its root span has arrived"
        return NoDataError("no request matches", where=where, fix=fix)


def _step_frame(table: pa.Table) -> pl.DataFrame:
    return pl.DataFrame(table.select(STEP_COLUMNS))


def _stamp(wall_ns: int) -> str:
    return datetime.fromtimestamp(wall_ns / 1e9, UTC).isoformat(timespec="milliseconds")
