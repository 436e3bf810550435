"""OTLP log records -> rows of `logs`. Bodies are content and are dropped."""

from collections.abc import Iterator
from typing import Any

from perfledger.collectors.attribute_values import AttributeReader, pair
from perfledger.collectors.otlp_origin import LATEST_NS, Row, is_id, read_origin
from perfledger.schema.tables import LOGS

_NAMES = frozenset(LOGS.names())


def log_rows(request: Any, reader: AttributeReader, received_ns: int) -> Iterator[Row]:
    """Yield a row for each log record; `reader.tally` counts them and the bodies denied.

    A record without a time gets the time it was observed, or received. Ids that are none are null.
    """
    for group in request.resource_logs:
        for scoped in group.scope_logs:
            origin = read_origin(
                reader, group.resource, group.schema_url, scoped.scope, scoped.schema_url
            )
            known = {k: v for k, v in origin.columns.items() if k in _NAMES}
            for record in scoped.log_records:
                reader.tally.items += 1
                yield {**known, **_row(record, reader, received_ns)}


def _row(record: Any, reader: AttributeReader, received_ns: int) -> Row:
    if record.HasField("body"):
        reader.tally.denied += 1
    values = reader.values(record.attributes)
    if record.event_name:
        values["event.name"] = reader.text(record.event_name)
    times_ns = (record.time_unix_nano, record.observed_time_unix_nano, received_ns)
    return {
        "time_ns": next(time_ns for time_ns in times_ns if 0 < time_ns <= LATEST_NS),
        "trace_id": record.trace_id if is_id(record.trace_id, 16) else None,
        "span_id": record.span_id if is_id(record.span_id, 8) else None,
        "severity": record.severity_number,
        "attributes": [pair(key, value) for key, value in values.items()],
        "received_ns": received_ns,
    }
