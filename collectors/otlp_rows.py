"""The bytes of an OTLP export request -> rows of one table, and the bytes without content.

Spans go through the compiled scanner (wire/); metrics and logs through protobuf's classes, as
lenient_messages has them.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import Any

import pyarrow as pa
from google.protobuf.message import DecodeError, Message
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import (
    ExportLogsServiceRequest,
    ExportLogsServiceResponse,
)
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
    ExportMetricsServiceResponse,
)
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from perfledger.collectors.attribute_values import AttributeReader, Tally
from perfledger.collectors.content_removal import remove_content
from perfledger.collectors.lenient_messages import lenient
from perfledger.collectors.otlp_logs import log_rows
from perfledger.collectors.otlp_origin import Row
from perfledger.collectors.otlp_points import point_rows
from perfledger.collectors.wire.census import MOST_MESSAGES, has_too_many_messages
from perfledger.schema.errors import UsageError
from perfledger.schema.tables import TABLES

# Rows exist as Python objects only this many at a time; the rest of a request is protobuf or Arrow.
_ROWS_AT_ONCE = 4096


class UndecodableRequest(UsageError):
    """Bytes that are not a request of their signal."""


@dataclass(frozen=True)
class Signal:
    """One kind of telemetry: how it is asked for, where it goes, and how a refusal is told."""

    name: str
    table: str
    grpc_service: str
    request: type[Message]
    response: type[Message]
    rejected_field: str
    # Request, reader, time of arrival -> rows; None for spans, which are scanned.
    rows: Callable[[Any, AttributeReader, int], Iterator[Row]] | None

    @property
    def path(self) -> str:
        """Return the path of an HTTP export."""
        return f"/v1/{self.name}"

    @cached_property
    def lenient_request(self) -> Any:
        """Return the class of lenient_messages for its request."""
        return lenient(self.request.DESCRIPTOR.full_name)


SIGNALS = (
    Signal(
        "traces",
        "spans",
        "opentelemetry.proto.collector.trace.v1.TraceService",
        ExportTraceServiceRequest,
        ExportTraceServiceResponse,
        "rejected_spans",
        None,
    ),
    Signal(
        "metrics",
        "points",
        "opentelemetry.proto.collector.metrics.v1.MetricsService",
        ExportMetricsServiceRequest,
        ExportMetricsServiceResponse,
        "rejected_data_points",
        point_rows,
    ),
    Signal(
        "logs",
        "logs",
        "opentelemetry.proto.collector.logs.v1.LogsService",
        ExportLogsServiceRequest,
        ExportLogsServiceResponse,
        "rejected_log_records",
        log_rows,
    ),
)


TRACES, METRICS, LOGS = SIGNALS


@dataclass(frozen=True)
class Outcome:
    """What became of a request that was taken: how many items were rejected and why, and more."""

    signal: Signal
    rejected: Counter[str] = field(default_factory=Counter)
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, signal: Signal, tally: Tally) -> "Outcome":
        """Tell a sender what is wrong with its telemetry, from what was found in a request."""
        warnings = []
        if tally.repaired:
            warnings.append(f"{tally.repaired} texts were not UTF-8 and were repaired")
        return cls(signal, tally.rejected, tuple(warnings))

    def response(self) -> Message:
        """Return the export response: empty, or with a partial success that says what and why."""
        response = self.signal.response()
        if self.rejected or self.warnings:
            partial: Any = response.partial_success
            setattr(partial, self.signal.rejected_field, self.rejected.total())
            reasons = [f"{count}: {reason}" for reason, count in self.rejected.most_common()]
            partial.error_message = "; ".join((*reasons, *self.warnings))
        return response


@dataclass(frozen=True)
class Decoded:
    """A request of metrics or logs: its rows, what was found, and its bytes without content."""

    rows: pa.Table
    tally: Tally
    kept: bytes


def decode_messages(signal: Signal, body: bytes, received_ns: int, max_value_bytes: int) -> Decoded:
    """Return the rows of a request of metrics or logs. Raises UndecodableRequest."""
    assert signal.rows is not None
    if has_too_many_messages(body, signal.lenient_request):
        why = f"over {MOST_MESSAGES} points, records, attributes and values; send smaller batches"
        raise undecodable_request(signal, why)
    try:
        request = signal.lenient_request.FromString(body)
    except DecodeError:
        raise undecodable_request(signal) from None
    reader = AttributeReader(max_value_bytes)
    rows = signal.rows(request, reader, received_ns)
    table = TABLES[signal.table]
    parts = []
    while some := list(islice(rows, _ROWS_AT_ONCE)):
        parts.append(table.from_rows(some))
    whole = pa.concat_tables(parts) if parts else table.arrow().empty_table()
    remove_content(request)
    return Decoded(whole, reader.tally, request.SerializeToString())


def undecodable_request(signal: Signal, why: str = "") -> UndecodableRequest:
    """Return the error of bytes that are not a request of this signal, or `why` it is none."""
    return UndecodableRequest(why or f"not an OTLP {signal.name} request in protobuf")
