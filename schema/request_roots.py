"""Which spans are requests: the server spans of LLM operations.

A request is keyed by (trace id, span id), never by trace id alone: one trace may hold many.
"""

from dataclasses import dataclass

import polars as pl

from perfledger.schema.attributes import REQUEST_ROOTS
from perfledger.schema.span_ids import SpanIds, SpanIndex

ROOT_COLUMNS: tuple[str, ...] = (
    *("trace_id", "span_id", "parent_span_id", "name", "start_ns", "end_ns", "status"),
    *("run_id", "service_name", "operation", "model", "input_tokens", "cached_tokens"),
    *("output_tokens", "reasoning_tokens", "error_type", "outcome", "tenant", "traffic_class"),
    *("session", "deadline_ms", "ttfc_ns", "boot_id", "replica"),
)
# Operations that generate; an agent, a tool or an embedding is not a request of an LLM's tokens
# (OpenTelemetry GenAI conventions, `gen_ai.operation.name`).
REQUEST_OPERATIONS = REQUEST_ROOTS | {"generate_content"}
_IDS = ["trace_id", "span_id"]


@dataclass(frozen=True)
class RequestRoots:
    """The server roots of requests, one row each, sorted by trace and span id."""

    rows: pl.DataFrame  # ROOT_COLUMNS
    index: SpanIndex


def is_request_root() -> pl.Expr:
    """Return the condition under which a span is the server root of a request.

    Its operation decides; where it tells none, a name of a request or a model does.
    """
    operation = pl.col("operation")
    hinted = pl.col("name").is_in(list(REQUEST_ROOTS)) | pl.col("model").is_not_null()
    generates = operation.is_in(list(REQUEST_OPERATIONS))
    known = pl.when(operation.is_null()).then(hinted).otherwise(generates)
    return (pl.col("kind") == "server") & known


def find_roots(spans: pl.LazyFrame, wanted: pl.Expr | None = None) -> RequestRoots:
    """Find the requests among `spans` (columns of SPANS) whose root is `wanted`, or all.

    Of two roots with one id the one that ends last counts.
    """
    chosen = is_request_root() if wanted is None else is_request_root() & wanted
    roots = newest_of_each_id(spans.filter(chosen).select(ROOT_COLUMNS).collect()).sort(_IDS)
    return RequestRoots(roots, SpanIndex(SpanIds.of(roots["trace_id"], roots["span_id"])))


def newest_of_each_id(spans: pl.DataFrame) -> pl.DataFrame:
    """Keep one span of each id: the one that ends last."""
    if spans.select(_IDS).n_unique() == len(spans):
        return spans
    order = ["end_ns", "start_ns", *(c for c in ("name", "schedule_end_ns") if c in spans.columns)]
    newest = spans.sort(order, descending=[True, *[False] * (len(order) - 1)])
    return newest.unique(_IDS, keep="first", maintain_order=True)
