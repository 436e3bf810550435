"""What is missing or doubtful behind the numbers, counted."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa

from perfledger.analyzers.ledger import Selection
from perfledger.analyzers.telemetry_loss import lost_on_the_way
from perfledger.schema.intervals import Ints
from perfledger.schema.partition_input import KIND
from perfledger.schema.request_traces import RequestTraces
from perfledger.schema.span_ids import SpanIds, SpanIndex, may_be_repeated
from perfledger.schema.stages import STAGE_COLUMNS, SUB_STAGE_COLUMNS
from perfledger.schema.store import id_conflicts
from perfledger.schema.tables import SPANS

DEFINITIONS: Mapping[str, str] = {
    "without_steps": "ok requests that no engine step is linked to",
    "missing_spans": "ok requests without such a span, by its name",
    "untimed_tokens": "output tokens told by the roots of ok requests, beyond the token times",
    "telemetry_gaps": "telemetry_dropped spans of the service while these requests were served",
    "records_dropped": "records that the runtime says it lost in these gaps",
    "lost_on_the_way": "spans and request records that the service says it lost on the way to the"
    " collector, by its metrics, while these requests were served",
    "times_repaired": "spans of these traces whose end was before their start, or absent",
    "id_conflicts": "span ids of these traces that several different spans carry",
    "not_derived": "requests that the table `requests` has no row of (yet)",
    "unsettled": "requests whose row has other times than found now, within a minute of their end:"
    " the collector derives them again",
    "differing": "the same, later than that",
}

_IDS = ["trace_id", "span_id"]
_EXPECTED = ("tokenize", "queue", "context", "sample", "detokenize", "stream")
# A completion may be asked for in token ids: then there is nothing to tokenize.
_EXPECTED_OF_CHAT = frozenset({"tokenize"})
# The collector looks at a request for the last time a minute after its root's end.
_SETTLED_AFTER_NS = 75 * 1_000_000_000
_TIMES = ("arrival_ns", "end_ns", "ttft_ns", "ttfc_ns", *STAGE_COLUMNS, *SUB_STAGE_COLUMNS)


@dataclass(frozen=True)
class Completeness:
    """Counts; see DEFINITIONS."""

    requests: int
    without_steps: int
    missing_spans: dict[str, int]
    untimed_tokens: int
    telemetry_gaps: int
    records_dropped: int
    lost_on_the_way: int
    times_repaired: int
    id_conflicts: int
    not_derived: int
    unsettled: int
    differing: int

    def losses(self) -> list[str]:
        """Return what was certainly lost or is in doubt, in words."""
        found = []
        if self.telemetry_gaps:
            found.append(
                f"{self.records_dropped} telemetry records dropped in {self.telemetry_gaps} gaps"
            )
        if self.lost_on_the_way:
            found.append(f"{self.lost_on_the_way} spans or records lost on the way to a collector")
        if self.id_conflicts:
            found.append(f"{self.id_conflicts} span ids are carried by several different spans")
        if self.differing:
            found.append(f"{self.differing} stored requests differ from their spans (late spans?)")
        return found


def completeness(
    selection: Selection, traces: RequestTraces, requests: pl.DataFrame, *, now_ns: int
) -> Completeness:
    """Count what is missing. `requests` holds the `requests` rows of `traces`, in their order;
    `now_ns` is the wall time, by which late spans may still be under way."""
    ok = (requests["status"] == "ok").to_numpy()
    gaps, dropped = _gaps(selection, requests)
    not_derived, unsettled, differing = _compare(selection, requests, now_ns)
    first_ns, last_ns = requests["arrival_ns"].min(), requests["end_ns"].max()
    timed = pl.col("token_times_ns").list.len().fill_null(0)
    untimed = requests.filter(pl.Series(ok)).select(
        (pl.col("output_tokens") - timed).clip(lower_bound=0).sum()
    )
    return Completeness(
        requests=len(requests),
        without_steps=requests.filter(pl.Series(ok))["steps"].null_count(),
        missing_spans=_missing_spans(traces, requests, ok),
        untimed_tokens=untimed.item(),
        telemetry_gaps=gaps,
        records_dropped=dropped,
        lost_on_the_way=lost_on_the_way(selection, first_ns, last_ns),  # type: ignore[arg-type]
        times_repaired=_times_repaired(selection, requests),
        id_conflicts=_conflicts(selection, traces),
        not_derived=not_derived,
        unsettled=unsettled,
        differing=differing,
    )


def _missing_spans(traces: RequestTraces, requests: pl.DataFrame, ok: Ints) -> dict[str, int]:
    missing = {}
    chat = requests["operation"].ne_missing("text_completion").to_numpy()
    for name in _EXPECTED:
        has = np.zeros(len(ok), np.bool_)
        has[traces.spans.request[traces.spans.kind == KIND[name]]] = True
        expected = ok & chat if name in _EXPECTED_OF_CHAT else ok
        if count := int((expected & ~has).sum()):
            missing[name] = count
    return missing


def _gaps(selection: Selection, requests: pl.DataFrame) -> tuple[int, int]:
    """Return how many gaps there were while these requests were served, and their records."""
    gaps = (
        selection.spans()
        .filter((pl.col("name") == "telemetry_dropped") & selection.of_resource())
        .filter(pl.col("start_ns") <= requests["end_ns"].max())
        .filter(pl.col("end_ns") >= requests["arrival_ns"].min())
    )
    ids = gaps.select(_IDS).collect().unique()
    if ids.is_empty():
        return 0, 0
    told = gaps.select(*_IDS, "attributes").collect()
    pairs = told.unique(_IDS).explode("attributes").unnest("attributes")
    return len(ids), int(pairs.filter(pl.col("key") == "perfledger.dropped")["int"].sum())


def _conflicts(selection: Selection, traces: RequestTraces) -> int:
    """Count the ids in conflict, in the traces of these requests and of the engines."""
    span_ids = (ids["span_id"] for ids in _columns_by_file(selection, ["span_id"]))
    rows = may_be_repeated(span_ids)
    if not any(len(part) for part in rows):
        return 0
    parts = zip(_columns_by_file(selection, _IDS), rows, strict=True)
    repeated = pl.concat([pl.DataFrame(ids)[part] for ids, part in parts]).unique()
    ours = pl.concat([traces.roots["trace_id"], traces.step_rows["trace_id"]]).unique()
    repeated = repeated.filter(pl.col("trace_id").is_in(ours.implode()))
    spans = selection.spans().join(repeated.lazy(), on=_IDS, how="semi")
    return len(id_conflicts(spans.select(SPANS.key).unique()).collect())


def _columns_by_file(selection: Selection, names: list[str]) -> Iterator[pa.Table]:
    return selection.store.read_as_received("spans", names, (), selection.since_ns)


def _times_repaired(selection: Selection, requests: pl.DataFrame) -> int:
    repaired = selection.spans().filter(pl.col("time_repaired")).select(_IDS).collect().unique()
    ours = repaired["trace_id"].is_in(requests["trace_id"].unique().implode())
    return int(ours.sum())


def _compare(selection: Selection, requests: pl.DataFrame, now_ns: int) -> tuple[int, int, int]:
    """Return how many of these requests have no stored row, and how many have a different one:
    those whose row may yet be written again, and the others."""
    stored = selection.store.scan_as_received("requests", selection.since_ns)
    rows = stored.select(*_IDS, "version", "received_ns", *_TIMES).collect()
    if rows.select(_IDS).n_unique() < len(rows):
        rows = rows.sort("version", "received_ns").unique(_IDS, keep="last")
    index = SpanIndex(SpanIds.of(rows["trace_id"], rows["span_id"]))
    at = index.find(SpanIds.of(requests["trace_id"], requests["span_id"]))
    known = np.flatnonzero(at >= 0)
    if not len(known):
        return len(requests), 0, 0
    now = requests if len(known) == len(requests) else requests[known]
    at = at[known]
    differs = np.zeros(len(known), np.bool_)
    for name in _TIMES:
        differs |= rows[name].gather(at).ne_missing(now[name]).to_numpy()
    young = (now["end_ns"] > now_ns - _SETTLED_AFTER_NS).to_numpy()
    counts = int((differs & young).sum()), int((differs & ~young).sum())
    return len(requests) - len(known), *counts
