"""Samples of one device, kept until they are sent on together: one message a metric, not a sample.

Describing a metric and its resource costs more than a point, here and where it is decoded.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric as MetricMessage
from opentelemetry.proto.metrics.v1.metrics_pb2 import NumberDataPoint

from perfledger.collectors.host.readings import Attributes, Reading, describe, key_value
from perfledger.schema.attributes import SCHEMA_VERSION
from perfledger.schema.metrics import Metric


@dataclass(slots=True)
class _Series:
    """One series: a point to copy, and of a counter since when it counts."""

    point: NumberDataPoint
    start_ns: int
    last: int | float
    seen: int  # the number of the sample that said it last


class PointBatch:
    """The samples of one resource since the last request.

    A counter starts at `start_ns`; one that was not in the sample before, or fell, at the time of
    that sample.
    """

    def __init__(self, scope_name: str, resource: Mapping[str, str | int], start_ns: int) -> None:
        self._scope_name, self._resource = scope_name, dict(resource)
        self._before_ns, self._number = start_ns, 0
        self._samples: list[tuple[int, Sequence[Reading]]] = []
        self._series: dict[tuple[str, Attributes], _Series] = {}

    def add(self, readings: Sequence[Reading], time_ns: int) -> None:
        """Note what was read at `time_ns` (wall clock); nothing ends the series."""
        self._samples.append((time_ns, readings))

    def encode(self) -> bytes:
        """Return an OTLP metrics request of the samples since the last one; b"" without any."""
        if not any(readings for _, readings in self._samples):
            self._pass_over()
            return b""
        request = ExportMetricsServiceRequest()
        group = request.resource_metrics.add()
        group.resource.attributes.extend(
            key_value(key, value) for key, value in self._resource.items() if value != ""
        )
        scoped = group.scope_metrics.add()
        scoped.scope.name, scoped.scope.version = self._scope_name, SCHEMA_VERSION
        messages: dict[str, MetricMessage] = {}
        for time_ns, readings in self._samples:
            self._number += 1
            for reading in readings:
                name = reading.metric.name
                if name not in messages:
                    messages[name] = describe(scoped.metrics.add(), reading.metric)
                self._add_point(messages[name], reading, time_ns)
            self._before_ns = time_ns
        self._samples.clear()
        return bytes(request.SerializeToString())

    def _pass_over(self) -> None:
        for time_ns, _ in self._samples:
            self._number, self._before_ns = self._number + 1, time_ns
        self._samples.clear()

    def _add_point(self, message: MetricMessage, reading: Reading, time_ns: int) -> None:
        metric, value, attributes = reading
        series = self._series.get((metric.name, attributes))
        if series is None:
            series = self._new_series(metric, attributes, value)
        if metric.kind == "counter":
            if value < series.last or series.seen != self._number - 1:
                series.start_ns = self._before_ns
            point = message.sum.data_points.add()
        else:
            point = message.gauge.data_points.add()
        point.CopyFrom(series.point)
        point.time_unix_nano = time_ns
        if metric.kind == "counter":
            point.start_time_unix_nano = min(series.start_ns, time_ns)
        series.last, series.seen = value, self._number
        if isinstance(value, int) and -(2**63) <= value < 2**63:
            point.as_int = value
        else:
            point.as_double = value

    def _new_series(self, metric: Metric, attributes: Attributes, value: int | float) -> _Series:
        point = NumberDataPoint(attributes=[key_value(key, text) for key, text in attributes])
        series = _Series(point, self._before_ns, value, self._number - 1)
        self._series[metric.name, attributes] = series
        return series
