"""What is missing or doubtful behind the numbers, counted."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa

from perfledger.analyzers.ledger import Selection
from perfledger.analyzers.telemetry_loss import lost_on_the_way
from perfledger.schema.errors import NoDataError
from perfledger.schema.intervals import Ints
from perfledger.schema.partition_input import KIND
from perfledger.schema.request_roots import is_request_root
from perfledger.schema.request_traces import RequestTraces
from perfledger.schema.span_ids import SpanIds, SpanIndex, may_be_repeated
from perfledger.schema.stages import STAGE_COLUMNS, SUB_STAGE_COLUMNS
from perfledger.schema.store import id_conflicts
from perfledger.schema.tables import SPANS

DEFINITIONS: Mapping[str, str] = {
    "without_steps": "ok requests that no engine step is linked to",
    "missing_spans": "ok requests without such a span, by its name",
    "untimed_tokens": "output tokens told by the roots of ok requests, beyond the token times"
    " (one of a step for all choices of a request)",
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
    "kept_by_chance": "requests whose root tail sampling kept by chance",
    "stand_for": "how many requests those stand for: the sum of 1 / kept_share of their roots",
    "without_root": "rows of the table `requests` in this selection whose root span is not in the"
    " store a minute after its end: sampled away, or deleted",
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
    kept_by_chance: int
    stand_for: int
    without_root: int

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
        return found + self._sampled()

    def _sampled(self) -> list[str]:
        found = []
        if self.kept_by_chance:
            found.append(
                f"sampled: {self.kept_by_chance:,} of the {self.requests:,} requests here were kept"
                f" by chance and stand for about {self.stand_for:,} (1 / kept_share each)"
            )
        if self.without_root:
            found.append(
                f"{self.without_root:,} more rows of the table `requests` in this selection have no"
                " root span: sampled away, or deleted"
            )
        return found


def completeness(
    selection: Selection, traces: RequestTraces, requests: pl.DataFrame, *, now_ns: int
) -> Completeness:
    """Count what is missing. `requests` holds the `requests` rows of `traces`, in their order;
    `now_ns` is the wall time, by which late spans may still be under way."""
    ok = (requests["status"] == "ok").to_numpy()
    gaps, dropped = _gaps(selection, requests)
    not_derived, unsettled, differing, without_root = _compare(selection, requests, now_ns)
    kept_by_chance, stand_for = _kept_by_chance(selection)
    first_ns, last_ns = requests["arrival_ns"].min(), requests["end_ns"].max()
    return Completeness(
        requests=len(requests),
        without_steps=requests.filter(pl.Series(ok))["steps"].null_count(),
        missing_spans=_missing_spans(traces, requests, ok),
        untimed_tokens=_untimed_tokens(selection, requests.filter(pl.Series(ok))),
        telemetry_gaps=gaps,
        records_dropped=dropped,
        lost_on_the_way=lost_on_the_way(selection, first_ns, last_ns),  # type: ignore[arg-type]
        times_repaired=_times_repaired(selection, requests),
        id_conflicts=_conflicts(selection, traces),
        not_derived=not_derived,
        unsettled=unsettled,
        differing=differing,
        kept_by_chance=kept_by_chance,
        stand_for=stand_for,
        without_root=without_root,
    )


def _untimed_tokens(selection: Selection, requests: pl.DataFrame) -> int:
    """Count the tokens beyond the token times; the choices of a request have theirs together."""
    timed = pl.col("token_times_ns").list.len().fill_null(0).cast(pl.Int64)
    few = requests.select(*_IDS, "output_tokens", timed=timed).filter(
        pl.col("output_tokens") > pl.col("timed")
    )
    if few.is_empty():
        return 0
    roots = selection.spans().join(few.select(_IDS).lazy(), on=_IDS, how="semi")
    told = roots.select(*_IDS, "attributes").collect().explode("attributes").unnest("attributes")
    choices = (
        told.filter(pl.col("key") == "gen_ai.request.choice.count")
        .group_by(_IDS)
        .agg(choices=pl.col("int").max())
    )
    few = few.join(choices, on=_IDS, how="left")
    untimed = pl.col("output_tokens") - pl.col("timed") * pl.col("choices").fill_null(1)
    return int(few.select(untimed.clip(lower_bound=0).sum()).item())


def why_nothing(selection: Selection, found: NoDataError) -> NoDataError:
    """Return `found`, the error of a selection without request roots, or one that says more.

    Rows of `requests` outlive the spans that sampling drops, and a foreign service may send server
    spans that are no requests to us.
    """
    stored = selection.store.scan_as_received("requests", selection.since_ns)
    if rows := _unique_ids(stored.filter(selection.of_request("arrival_ns"))):
        return NoDataError(
            f"no root span is left of the {rows:,} requests here: all were sampled away, or"
            " deleted, or are not written yet",
            where=found.where,
            fix="read the table `requests`, which has them all; raise `share` of [sampling]",
        )
    ours = (pl.col("kind") == "server") & selection.of_request("start_ns")
    if servers := _unique_ids(selection.spans().filter(ours)):
        return NoDataError(
            f"{servers:,} server spans are there that are not recognised as requests",
            where=found.where,
            fix="send gen_ai.operation.name or gen_ai.request.model on them, or name them chat or"
            " text_completion; the `llm_request` spans of vLLM are not recognised yet",
        )
    calls = selection.spans().filter(
        (pl.col("kind") == "client") & selection.of_arrival("start_ns")
    )
    if selection.run and (made := _unique_ids(calls)):
        return NoDataError(
            f"run {selection.run} is one of a client: {made:,} calls, and no request of a server"
            " continues their traces",
            where=found.where,
            fix="send the server's telemetry to a collector on this store; or select what it served"
            " with --service NAME --from T --to T",
        )
    return found


def _unique_ids(rows: pl.LazyFrame) -> int:
    return rows.select(_IDS).unique().select(pl.len()).collect().item()  # type: ignore[no-any-return]


def _kept_by_chance(selection: Selection) -> tuple[int, int]:
    """Return how many requests were kept by chance, and about how many they stand for."""
    by_chance = pl.col("kept_share") < 1
    # Without sampling this reads one empty column.
    if not selection.spans().select(by_chance.any()).collect().item():
        return 0, 0
    roots = is_request_root() & selection.of_request("start_ns")
    kept = selection.spans().filter(by_chance & roots).select(*_IDS, "kept_share").collect()
    kept = kept.unique(_IDS)
    return len(kept), round((1 / kept["kept_share"]).sum())


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


def _compare(
    selection: Selection, requests: pl.DataFrame, now_ns: int
) -> tuple[int, int, int, int]:
    """Return how many of these requests have no stored row, how many have a different one (those
    whose row may yet be written again, and the others), and how many stored rows are of no request
    here though they are in the selection, a minute after their end."""
    stored = selection.store.scan_as_received("requests", selection.since_ns)
    # The spans of younger ones may have come after they were read, or wait for tail sampling.
    is_old = pl.col("end_ns") <= now_ns - _SETTLED_AFTER_NS
    selected = (selection.of_request("arrival_ns") & is_old).fill_null(False).alias("selected")
    rows = stored.select(*_IDS, "version", "received_ns", *_TIMES, selected).collect()
    if rows.select(_IDS).n_unique() < len(rows):
        rows = rows.sort("version", "received_ns").unique(_IDS, keep="last")
    index = SpanIndex(SpanIds.of(rows["trace_id"], rows["span_id"]))
    at = index.find(SpanIds.of(requests["trace_id"], requests["span_id"]))
    known = np.flatnonzero(at >= 0)
    is_without = rows["selected"].to_numpy(writable=True)
    is_without[at[known]] = False
    without_root = int(is_without.sum())
    if not len(known):
        return len(requests), 0, 0, without_root
    now = requests if len(known) == len(requests) else requests[known]
    at = at[known]
    differs = np.zeros(len(known), np.bool_)
    for name in _TIMES:
        differs |= rows[name].gather(at).ne_missing(now[name]).to_numpy()
    young = (now["end_ns"] > now_ns - _SETTLED_AFTER_NS).to_numpy()
    counts = int((differs & young).sum()), int((differs & ~young).sum())
    return len(requests) - len(known), *counts, without_root
