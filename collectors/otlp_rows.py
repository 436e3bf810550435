"""The bytes of an OTLP export request -> rows of one table, through the official protobuf classes.

`decode` is the seam between transport and store: what replaces it must give the same rows for
the same bytes. Limits of this one: a string that is not UTF-8 makes the whole request undecodable
(protobuf refuses it), and it handles some tens of thousands of spans a second.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
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

from perfledger.collectors.attribute_values import DEFAULT_MAX_VALUE_BYTES, AttributeReader, Tally
from perfledger.collectors.otlp_logs import log_rows
from perfledger.collectors.otlp_points import point_rows
from perfledger.collectors.otlp_spans import Row, span_rows
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
    # Request, reader, time of arrival -> rows; typed loosely as each signal has its own request.
    rows: Callable[[Any, AttributeReader, int], Iterator[Row]]

    @property
    def path(self) -> str:
        """Return the path of an HTTP export."""
        return f"/v1/{self.name}"


SIGNALS = (
    Signal(
        "traces",
        "spans",
        "opentelemetry.proto.collector.trace.v1.TraceService",
        ExportTraceServiceRequest,
        ExportTraceServiceResponse,
        "rejected_spans",
        span_rows,
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


@dataclass(frozen=True)
class Decoded:
    """A request as rows of `signal.table`, and what was rejected, cut and denied on the way."""

    signal: Signal
    rows: pa.Table
    tally: Tally

    @property
    def rejected(self) -> int:
        """Return how many spans, points or log records have no row."""
        return self.tally.rejected.total()

    def response(self) -> bytes:
        """Return the export response: empty, or with a partial success that says what and why."""
        response = self.signal.response()
        if self.rejected:
            reasons = self.tally.rejected.most_common()
            partial = response.partial_success
            setattr(partial, self.signal.rejected_field, self.rejected)
            partial.error_message = "; ".join(f"{count}: {reason}" for reason, count in reasons)
        return bytes(response.SerializeToString())


def decode(
    signal: Signal,
    body: bytes,
    received_ns: int | None = None,
    max_value_bytes: int = DEFAULT_MAX_VALUE_BYTES,
) -> Decoded:
    """Return the rows of a request, stamped `received_ns` (wall clock; default: now).

    Raises UndecodableRequest where the bytes are not a request of this signal.
    """
    request = signal.request()
    try:
        request.ParseFromString(body)
    except DecodeError as error:
        raise UndecodableRequest(f"not an OTLP {signal.name} request in protobuf") from error
    reader = AttributeReader(max_value_bytes)
    received_ns = time.time_ns() if received_ns is None else received_ns
    rows = signal.rows(request, reader, received_ns)
    table = TABLES[signal.table]
    parts = []
    while some := list(islice(rows, _ROWS_AT_ONCE)):
        parts.append(table.from_rows(some))
    whole = pa.concat_tables(parts) if parts else table.arrow().empty_table()
    return Decoded(signal, whole, reader.tally)
