"""OTLP metrics -> rows of `points`, histograms whole.

One row a data point; a summary also has one row a quantile, told apart by the attribute
`quantile`. An exponential histogram gets explicit bounds. Exemplars are not kept (`points` has no
place for them) and are counted.
"""

from collections.abc import Iterator
from typing import Any

from opentelemetry.proto.metrics.v1.metrics_pb2 import DataPointFlags

from perfledger.collectors.attribute_values import AttributeReader, pair
from perfledger.collectors.otlp_origin import LATEST_NS, Row, read_origin
from perfledger.schema.tables import POINTS

LARGEST_COUNT = 2**63 - 1
MOST_BUCKETS = 10_000
_TEMPORALITIES = (None, "delta", "cumulative")
_NAMES = frozenset(POINTS.names())

# Messages are those of lenient_messages, whose classes have no types: a point of whatever kind.
Point = Any


class _Reject(Exception):
    """A point that can never be stored; the text says why."""


def point_rows(request: Any, reader: AttributeReader, received_ns: int) -> Iterator[Row]:
    """Yield the rows of each point that is not rejected; `reader.tally` counts points."""
    for group in request.resource_metrics:
        for scoped in group.scope_metrics:
            origin = read_origin(
                reader, group.resource, group.schema_url, scoped.scope, scoped.schema_url
            )
            shared = {k: v for k, v in origin.columns.items() if k in _NAMES}
            shared["received_ns"] = received_ns
            for metric in scoped.metrics:
                yield from _metric_rows(metric, shared, reader, received_ns)


def _metric_rows(
    metric: Any, shared: Row, reader: AttributeReader, received_ns: int
) -> Iterator[Row]:
    kind = metric.WhichOneof("data")
    if kind is None:
        return
    data = getattr(metric, kind)
    shared = shared | {
        "name": reader.text(metric.name),
        "unit": reader.text_or_none(metric.unit),
        "kind": kind,
        "temporality": _temporality(getattr(data, "aggregation_temporality", 0)),
        "monotonic": data.is_monotonic if kind == "sum" else None,
    }
    for point in data.data_points:
        reader.tally.items += 1
        try:
            if not metric.name:
                raise _Reject("metric without a name")
            rows = [shared | row for row in _point_rows(kind, point, reader, received_ns)]
        except _Reject as reason:
            reader.tally.rejected[str(reason)] += 1
        else:
            yield from rows


def _point_rows(
    kind: str, point: Point, reader: AttributeReader, received_ns: int
) -> Iterator[Row]:
    if point.time_unix_nano > LATEST_NS or point.start_time_unix_nano > LATEST_NS:
        raise _Reject("time_unix_nano is after the year 2262")
    row: Row = {
        "time_ns": point.time_unix_nano or received_ns,
        "start_ns": point.start_time_unix_nano or None,
        "attributes": reader.pairs(point.attributes),
    }
    if point.flags & DataPointFlags.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK:
        yield row
        return
    if kind != "summary":
        reader.tally.exemplars_dropped += len(point.exemplars)
    if kind in ("gauge", "sum"):
        value = point.WhichOneof("value")
        yield row | {"value": None if value is None else float(getattr(point, value))}
    elif kind == "summary":
        yield row | {"value": point.sum, "count": _count(point.count)}
        yield from _quantile_rows(row, point)
    else:
        yield row | _histogram(kind, point)


def _histogram(kind: str, point: Point) -> Row:
    if kind == "histogram":
        bounds, counts = list(point.explicit_bounds), list(point.bucket_counts)
    else:
        bounds, counts = _explicit_buckets(point)
    if counts and len(counts) != len(bounds) + 1:
        raise _Reject("a histogram has one bucket more than bounds")
    if max(len(bounds), len(counts)) > MOST_BUCKETS:
        raise _Reject(f"a histogram has more than {MOST_BUCKETS} buckets")
    return {
        "count": _count(point.count),
        "value": point.sum if point.HasField("sum") else None,
        "min": point.min if point.HasField("min") else None,
        "max": point.max if point.HasField("max") else None,
        "bounds": bounds,
        "bucket_counts": [_count(count) for count in counts],
    }


def _explicit_buckets(point: Point) -> tuple[list[float], list[int]]:
    """Return bounds and counts of an exponential histogram.

    Bucket i of `positive` holds base^(offset+i) < v <= base^(offset+i+1), base = 2^(2^-scale);
    `negative` mirrors it (OpenTelemetry metrics data model, "ExponentialHistogram").
    """
    positive, negative = list(point.positive.bucket_counts), list(point.negative.bucket_counts)
    if len(positive) + len(negative) > MOST_BUCKETS:
        raise _Reject(f"a histogram has more than {MOST_BUCKETS} buckets")
    bounds: list[float] = []
    counts: list[int] = []
    if negative:
        offset = point.negative.offset
        bounds += [-_power(point.scale, offset + i) for i in range(len(negative), -1, -1)]
        counts += [0, *reversed(negative)]
    counts.append(point.zero_count)
    if positive:
        offset = point.positive.offset
        bounds += [_power(point.scale, offset + i) for i in range(len(positive) + 1)]
        counts += [*positive, 0]
    return bounds, counts


def _power(scale: int, index: int) -> float:
    """Return base^index, base = 2^(2^-scale); beyond a double's range infinity or 0."""
    try:
        return float(2.0 ** (index * 2.0**-scale))
    except OverflowError:
        return float("inf")


def _quantile_rows(row: Row, point: Point) -> Iterator[Row]:
    attributes = row["attributes"]
    assert isinstance(attributes, list)
    for at in point.quantile_values:
        yield row | {"value": at.value, "attributes": [*attributes, pair("quantile", at.quantile)]}


def _temporality(code: int) -> str | None:
    return _TEMPORALITIES[code] if 0 <= code < len(_TEMPORALITIES) else None


def _count(count: int) -> int:
    if count > LARGEST_COUNT:
        raise _Reject("a count is beyond 2^63")
    return count
