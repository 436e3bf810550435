"""A span that has ended, as plain values, whatever carries it from here."""

from typing import NamedTuple

from perfledger.instrumented_runtime.telemetry import AttributeValue

Attributes = dict[str, AttributeValue]


class SpanLink(NamedTuple):
    """A request in the batch of a step."""

    trace_id: int
    span_id: int
    attributes: Attributes


class FinishedSpan(NamedTuple):
    """A span, whatever carries it. Ids are unsigned; times are monotonic ns."""

    name: str
    trace_id: int
    span_id: int
    parent_span_id: int | None
    start_ns: int
    end_ns: int
    attributes: Attributes
    links: tuple[SpanLink, ...] = ()
    server: bool = False
    error: bool = False
