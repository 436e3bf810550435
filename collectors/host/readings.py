"""A value that was read, and the OTLP request that many of them make.

The protobuf messages of a request are kept from one sample to the next: only numbers and times
change, so a sample of some hundred series costs a fraction of building it anew.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AggregationTemporality,
    NumberDataPoint,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    Metric as MetricMessage,
)

from perfledger.schema.attributes import SCHEMA_VERSION
from perfledger.schema.metrics import Metric

Attributes = tuple[tuple[str, str | int], ...]
LARGEST_INT = 2**63 - 1


class Reading(NamedTuple):
    """One value of one series."""

    metric: Metric
    value: int | float
    attributes: Attributes = ()


@dataclass(slots=True)
class _Series:
    """One series of a stream: its point in the request, and since when it counts."""

    metric: Metric
    attributes: Attributes
    point: NumberDataPoint
    start_ns: int | None = None  # of a counter; None until its first value
    last: int | float = 0

    def set(self, value: int | float, time_ns: int, newest_start_ns: int) -> None:
        point = self.point
        point.time_unix_nano = time_ns
        if self.metric.kind == "counter":
            if self.start_ns is None or value < self.last:
                self.start_ns = newest_start_ns
            self.last = value
            point.start_time_unix_nano = min(self.start_ns, time_ns)
        if isinstance(value, int) and -LARGEST_INT <= value <= LARGEST_INT:
            point.as_int = value
        else:
            point.as_double = value


class PointStream:
    """The metrics of one resource as OTLP requests, one after the other.

    A counter starts at `start_ns`, or where it was first seen later or went down (a device was
    reset) at the time of the sample before.
    """

    def __init__(self, scope_name: str, resource: Mapping[str, str | int], start_ns: int) -> None:
        self._scope_name, self._resource = scope_name, dict(resource)
        self._newest_start_ns = start_ns
        self._series: list[_Series] = []
        self._request = ExportMetricsServiceRequest()

    def encode(self, readings: Sequence[Reading], time_ns: int) -> bytes:
        """Return the request that says the readings, taken at `time_ns` (wall clock).

        Of two readings of one series the last one is said.
        """
        if not self._are_as_before(readings):
            readings = list({(r.metric.name, r.attributes): r for r in readings}.values())
            self._rebuild(readings)
        for series, reading in zip(self._series, readings, strict=True):
            series.set(reading.value, time_ns, self._newest_start_ns)
        self._newest_start_ns = time_ns
        return bytes(self._request.SerializeToString())

    def _are_as_before(self, readings: Sequence[Reading]) -> bool:
        return len(readings) == len(self._series) and all(
            series.metric is reading.metric and series.attributes == reading.attributes
            for series, reading in zip(self._series, readings, strict=True)
        )

    def _rebuild(self, readings: Sequence[Reading]) -> None:
        self._request = ExportMetricsServiceRequest()
        group = self._request.resource_metrics.add()
        group.resource.attributes.extend(
            key_value(key, value) for key, value in self._resource.items() if value != ""
        )
        scoped = group.scope_metrics.add()
        scoped.scope.name, scoped.scope.version = self._scope_name, SCHEMA_VERSION
        known = {(series.metric.name, series.attributes): series for series in self._series}
        messages: dict[str, MetricMessage] = {}
        self._series = []
        for metric, _, attributes in readings:
            if metric.name not in messages:
                messages[metric.name] = describe(scoped.metrics.add(), metric)
            message = messages[metric.name]
            data = message.sum if metric.kind == "counter" else message.gauge
            series = _Series(metric, attributes, data.data_points.add())
            series.point.attributes.extend(key_value(key, value) for key, value in attributes)
            if (before := known.get((metric.name, attributes))) is not None:
                series.start_ns, series.last = before.start_ns, before.last
            self._series.append(series)


def describe(message: MetricMessage, metric: Metric) -> MetricMessage:
    """Fill a message in with what is declared of a metric, and return it."""
    message.name, message.unit, message.description = metric.name, metric.unit, metric.meaning
    if metric.kind == "counter":
        message.sum.is_monotonic = True
        message.sum.aggregation_temporality = (
            AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
        )
    return message


def key_value(key: str, value: str | int) -> KeyValue:
    """Return an attribute as OTLP has it."""
    pair = KeyValue(key=key)
    if isinstance(value, int):
        pair.value.int_value = value
    else:
        pair.value.string_value = value
    return pair
