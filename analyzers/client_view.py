"""The same requests as the client saw them, beside the server's view.

`perfledger load` (or any client that traces itself) leaves a client span whose child is the
server's root, with an event `chunk` for each chunk received. Durations are each side's own; where
the difference is split at an instant that both sides stamped, one clock is needed (same boot).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import polars as pl

from perfledger.analyzers.latency import Distribution, distribution
from perfledger.analyzers.ledger import Selection
from perfledger.schema.attributes import REQUEST_ROOTS
from perfledger.schema.request_roots import is_request_root
from perfledger.schema.request_traces import RequestTraces

_EARLIER_NS = 60 * 1_000_000_000

DEFINITIONS: Mapping[str, str] = {
    "ttft_ns": "client: start of its span to its first chunk",
    "e2e_ns": "client: start to end of its span",
    "server_ttft_ns": "the server's TTFT of the same requests",
    "server_e2e_ns": "the server's time of the same requests",
    "ttft_difference_ns": "client TTFT minus server TTFT, request by request",
    "e2e_difference_ns": "client time minus server time, request by request",
    "before_ns": "client start to arrival at the server: connection and request (one clock only)",
    "first_chunk_ns": "first sample to the client's first chunk: text, socket, client (one clock)",
    "after_ns": "end at the server to the client's end (one clock only)",
}


@dataclass(frozen=True)
class ClientView:
    """Ok requests of both sides, matched; `unmatched` client spans have no request here."""

    matched: int
    unmatched: int
    one_clock: int
    ttft_ns: Distribution
    server_ttft_ns: Distribution
    ttft_difference_ns: Distribution
    e2e_ns: Distribution
    server_e2e_ns: Distribution
    e2e_difference_ns: Distribution
    before_ns: Distribution
    first_chunk_ns: Distribution
    after_ns: Distribution


def client_view(
    selection: Selection, traces: RequestTraces, requests: pl.DataFrame
) -> ClientView | None:
    """Match client spans to the requests that are their children; None where there are none.

    `requests` holds the `requests` rows of `traces`, in their order.
    """
    clients = _client_spans(selection, requests)
    if clients.is_empty():
        return None
    callers = traces.roots.select("parent_span_id", server_boot_id="boot_id")
    served = pl.concat([requests, callers], how="horizontal").filter(pl.col("status") == "ok")
    pairs = clients.join(
        served,
        left_on=["trace_id", "span_id"],
        right_on=["trace_id", "parent_span_id"],
        suffix="_of_server",
    )
    return _view(pairs, unmatched=_unmatched(selection, clients))


def _client_spans(selection: Selection, requests: pl.DataFrame) -> pl.DataFrame:
    """Return the client spans of LLM operations that began while these requests were served."""
    chunk_ns = pl.element().struct.field("time_ns")
    is_chunk = pl.element().struct.field("name") == "chunk"
    operation = pl.coalesce("operation", "name").is_in(list(REQUEST_ROOTS))
    # A client begins before the server's arrival; its clock may run a little ahead of it.
    first_ns = requests["arrival_ns"].min() - _EARLIER_NS  # type: ignore[operator]
    return (
        selection.spans()
        .filter((pl.col("kind") == "client") & operation)
        .filter(pl.col("start_ns").is_between(first_ns, requests["end_ns"].max()))
        .select(
            *("trace_id", "span_id", "boot_id"),
            client_start_ns="start_ns",
            client_end_ns="end_ns",
            first_chunk_ns=pl.col("events").list.eval(chunk_ns.filter(is_chunk).min()).list.first(),
        )
        .collect()
        .unique(["trace_id", "span_id"])
    )


def _unmatched(selection: Selection, clients: pl.DataFrame) -> int:
    """Count the client spans that have no request in the whole store."""
    callers = selection.spans().filter(is_request_root()).select("trace_id", "parent_span_id")
    return len(
        clients.join(
            callers.collect(),
            left_on=["trace_id", "span_id"],
            right_on=["trace_id", "parent_span_id"],
            how="anti",
        )
    )


def _view(pairs: pl.DataFrame, unmatched: int) -> ClientView:
    one_clock = (pl.col("boot_id") == pl.col("server_boot_id")) & (pl.col("boot_id") != "")
    start, end = pl.col("client_start_ns"), pl.col("client_end_ns")
    first_chunk, first_sample = pl.col("first_chunk_ns"), pl.col("arrival_ns") + pl.col("ttft_ns")
    both = pairs.select(
        ttft_ns=first_chunk - start,
        server_ttft_ns="ttft_ns",
        ttft_difference_ns=first_chunk - start - pl.col("ttft_ns"),
        e2e_ns=end - start,
        server_e2e_ns="e2e_ns",
        e2e_difference_ns=end - start - pl.col("e2e_ns"),
    )
    split = pairs.filter(one_clock).select(
        before_ns=pl.col("arrival_ns") - start,
        first_chunk_ns=first_chunk - first_sample,
        after_ns=end - pl.col("end_ns"),
    )
    columns = [*both.iter_columns(), *split.iter_columns()]
    values = {c.name: distribution(c.drop_nulls().to_numpy()) for c in columns}
    return ClientView(matched=len(pairs), unmatched=unmatched, one_clock=len(split), **values)
