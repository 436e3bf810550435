"""A sink that keeps what it is given, or refuses it; and what it was given as plain values."""

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)

from perfledger.collectors.otlp_rows import Outcome, Signal
from perfledger.collectors.transport.otlp_receiver import Refusal, overloaded
from perfledger.schema.tables import POINTS

Value = int | float


class MemorySink:
    """Takes metrics requests into a list. With `full`, it has no room."""

    def __init__(self, full: bool = False) -> None:
        self.full = full
        self.bodies: list[bytes] = []
        self.held_bytes = 0

    def check_room(self) -> None:
        if self.full:
            raise overloaded()

    def reserve(self, size_bytes: int) -> None:
        self.held_bytes += size_bytes

    def release(self, size_bytes: int) -> None:
        self.held_bytes -= size_bytes

    def refused(self, refusal: Refusal) -> None:
        raise AssertionError(refusal)

    async def export(self, signal: Signal, body: bytes, hops: tuple[str, ...] = ()) -> Outcome:
        assert signal.table == POINTS.name
        assert self.held_bytes == len(body)
        self.bodies.append(body)
        return Outcome(signal)


def attributes(pairs: object) -> dict[str, str | int]:
    return {
        pair.key: getattr(pair.value, pair.value.WhichOneof("value"))
        for pair in pairs  # type: ignore[attr-defined]
    }


def values(body: bytes) -> dict[tuple[str, frozenset[tuple[str, str | int]]], Value]:
    """Return the values of a request by metric name and attributes; each series is there once."""
    request = ExportMetricsServiceRequest.FromString(body)
    found: dict[tuple[str, frozenset[tuple[str, str | int]]], Value] = {}
    for group in request.resource_metrics:
        for scoped in group.scope_metrics:
            for metric in scoped.metrics:
                for point in getattr(metric, metric.WhichOneof("data")).data_points:
                    series = (metric.name, frozenset(attributes(point.attributes).items()))
                    assert series not in found
                    found[series] = getattr(point, point.WhichOneof("value"))
    return found
