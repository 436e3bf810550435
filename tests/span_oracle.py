"""OTLP spans -> rows of `spans` through protobuf's classes: what the compiled scanner must equal.

Slow and plain. It shares with the scanner how a resource and a nested value are read, and nothing
else.
"""

from collections.abc import Iterator
from typing import Any

import pyarrow as pa

from perfledger.collectors.attribute_values import AttributeReader, Pair, Tally, Value, pair
from perfledger.collectors.content import status_repeats_content
from perfledger.collectors.lenient_messages import TRACES_REQUEST
from perfledger.collectors.otlp_origin import LATEST_NS, Origin, Row, is_id, read_origin
from perfledger.schema.attributes import LINK_ATTRIBUTES, SPAN_ATTRIBUTES
from perfledger.schema.tables import SPANS

_KINDS = ("internal", "internal", "server", "client", "producer", "consumer")
_STATUSES = ("unset", "ok", "error")
_LONGEST_STATUS_MESSAGE_BYTES = 256
_PROMOTED = {a.name: a.column for a in SPAN_ATTRIBUTES if a.column}
_BITS = {c.name: c.type.bit_width for c in SPANS.columns if pa.types.is_integer(c.type)}
_PROMOTED_LINK = {a.column: a.name for a in LINK_ATTRIBUTES if a.column}


def oracle(body: bytes, received_ns: int, limit: int) -> tuple[pa.Table, Tally]:
    """Return the rows of a request and what was found in it, in the order of the request."""
    reader = AttributeReader(limit)
    rows = list(span_rows(TRACES_REQUEST.FromString(body), reader, received_ns))
    return SPANS.from_rows(rows), reader.tally


def span_rows(request: Any, reader: AttributeReader, received_ns: int) -> Iterator[Row]:
    """Yield a row for each span that is not rejected; `reader.tally` counts both."""
    for group in request.resource_spans:
        for scoped in group.scope_spans:
            origin = read_origin(
                reader, group.resource, group.schema_url, scoped.scope, scoped.schema_url
            )
            shared = {
                **origin.columns,
                "scope_name": origin.scope_name,
                "scope_version": origin.scope_version,
                "received_ns": received_ns,
            }
            for span in scoped.spans:
                reader.tally.items += 1
                if fault := _fault(span):
                    reader.tally.rejected[fault] += 1
                else:
                    row = shared.copy()
                    _fill(row, span, origin, reader)
                    yield row


def _fault(span: Any) -> str:
    """Return why this span can never be stored, or ""."""
    if not is_id(span.trace_id, 16):
        return "trace_id is not 16 bytes, or all zero"
    if not is_id(span.span_id, 8):
        return "span_id is not 8 bytes, or all zero"
    if len(span.parent_span_id) not in (0, 8):
        return "parent_span_id is not 8 bytes"
    if span.start_time_unix_nano > LATEST_NS:
        return "start_time_unix_nano is after the year 2262"
    return ""


def _fill(row: Row, span: Any, origin: Origin, reader: AttributeReader) -> None:
    cut_before = reader.tally.cut
    row["trace_id"] = span.trace_id
    row["span_id"] = span.span_id
    row["parent_span_id"] = span.parent_span_id if any(span.parent_span_id) else None
    row["name"] = reader.text(span.name)
    row["kind"] = _KINDS[span.kind] if 0 <= span.kind < len(_KINDS) else "internal"
    row["start_ns"], row["end_ns"], row["time_repaired"] = _times(span)
    row["flags"] = span.flags
    row["trace_state"] = reader.text_or_none(span.trace_state)
    row["events"] = [_event(event, reader) for event in span.events]
    row["links"] = [_link(link, reader) for link in span.links]
    row["status"] = _STATUSES[span.status.code] if 0 <= span.status.code < 3 else "unset"
    row["status_message"] = _status_message(span, reader)
    others = _promote(reader.values(span.attributes), row)
    row["attributes"] = others + _dropped_counts(span)
    row["values_cut"] = origin.cut + reader.tally.cut - cut_before


def _times(span: Any) -> tuple[int, int, bool]:
    """Return start, end and whether they had to be repaired: a duration is never negative."""
    start_ns, end_ns = span.start_time_unix_nano, span.end_time_unix_nano
    if not start_ns and end_ns <= LATEST_NS:
        start_ns = end_ns
        return start_ns, end_ns, True
    if not start_ns <= end_ns <= LATEST_NS:
        return start_ns, start_ns, True
    return start_ns, end_ns, False


def _event(event: Any, reader: AttributeReader) -> tuple[object, ...]:
    """Return one element of an EVENTS column."""
    time_ns = event.time_unix_nano
    known_ns = time_ns if 0 < time_ns <= LATEST_NS else None
    return (known_ns, reader.text(event.name), reader.pairs(event.attributes))


def _status_message(span: Any, reader: AttributeReader) -> str | None:
    message = span.status.message
    if message and status_repeats_content(
        event.name.decode(errors="replace") for event in span.events
    ):
        reader.tally.denied += 1
        return None
    return reader.text(message, _LONGEST_STATUS_MESSAGE_BYTES) or None


def _promote(values: dict[str, Value], row: Row) -> list[Pair]:
    """Set promoted columns; return the pairs that have no column, or not its column's type."""
    others = []
    for key, value in values.items():
        column = _PROMOTED.get(key)
        if column is not None and _fits(value, _BITS.get(column)):
            row[column] = value
        else:
            others.append(pair(key, value))
    return others


def _fits(value: Value, bits: int | None) -> bool:
    """Return whether a column of integers of so many bits, or of text (None), can hold it."""
    if bits is None:
        return type(value) is str
    return type(value) is int and -(1 << bits - 1) <= value < 1 << bits - 1


def _dropped_counts(span: Any) -> list[Pair]:
    """Return what the sender says it dropped, under OpenTelemetry's names for it."""
    counts = (
        ("otel.dropped_attributes_count", span.dropped_attributes_count),
        ("otel.dropped_events_count", span.dropped_events_count),
        ("otel.dropped_links_count", span.dropped_links_count),
    )
    return [pair(key, count) for key, count in counts if count]


def _link(link: Any, reader: AttributeReader) -> tuple[object, ...]:
    """Return one element of a LINKS column; an id that is none becomes null."""
    values = reader.values(link.attributes)
    if link.trace_state:
        values.pop("w3c.tracestate", None)
        values["w3c.tracestate"] = reader.text(link.trace_state)
    phase_key, tokens_key = _PROMOTED_LINK["phase"], _PROMOTED_LINK["tokens"]
    phase = values.pop(phase_key) if type(values.get(phase_key)) is str else None
    tokens = values.pop(tokens_key) if type(values.get(tokens_key)) is int else None
    return (
        link.trace_id if is_id(link.trace_id, 16) else None,
        link.span_id if is_id(link.span_id, 8) else None,
        phase,
        tokens,
        [pair(key, value) for key, value in values.items()],
    )
