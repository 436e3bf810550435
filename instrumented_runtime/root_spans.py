"""The root span of a request: what the API says of it, with what it cost the engine. Pure."""

from typing import NamedTuple

from perfledger.instrumented_runtime.finished_spans import FinishedSpan
from perfledger.instrumented_runtime.record_attributes import account_attributes
from perfledger.instrumented_runtime.records import Leave
from perfledger.instrumented_runtime.telemetry import RequestRecord
from perfledger.schema import metrics
from perfledger.schema.metrics import Metric


class LeftRequest(NamedTuple):
    """What the root of a request that left the engine still wants to know."""

    at_ns: int
    reason: str
    cached_tokens: int | None  # None: never admitted
    account: Leave | None  # what it cost the KV cache; None: never admitted


def root_span(
    record: RequestRecord, cached_tokens: int | None, left: LeftRequest | None
) -> FinishedSpan:
    """Return the root; `cached_tokens` are None where the engine never admitted the request."""
    attributes = {**record.attributes, "perfledger.status": record.outcome}
    if left is not None and left.account is not None:
        attributes.update(account_attributes(left.account))
    if cached_tokens is not None:
        attributes["gen_ai.usage.cache_read.input_tokens"] = cached_tokens
    if record.outcome == "aborted" and left is not None:
        attributes.setdefault("perfledger.reason", left.reason)
    return FinishedSpan(
        record.name,
        record.trace_id,
        record.span_id,
        record.parent_span_id,
        record.start_ns,
        record.end_ns,
        attributes,
        server=True,
        error=record.outcome == "error",
    )


def never_admitted(record: RequestRecord, cached_tokens: int | None) -> bool:
    """Whether the request waited until its end, as far as no record of it was lost."""
    return cached_tokens is None and record.outcome != "ok"


def root_counts(root: FinishedSpan) -> list[tuple[Metric, str]]:
    """Return the counters that a root is counted in, each with the value of its attribute."""
    attributes, outcome = root.attributes, str(root.attributes["perfledger.status"])
    counted = [(metrics.REQUESTS, outcome)]
    if outcome == "error":
        counted.append((metrics.ERRORS, str(attributes.get("error.type", "unknown"))))
    if outcome == "aborted":
        counted.append((metrics.ABORTS, str(attributes.get("perfledger.reason", "unknown"))))
    return counted
