"""Metric families -> OTLP metrics, after OpenTelemetry's "Prometheus and OpenMetrics
Compatibility".

Names stay as they are on the page, and are the same from both formats. A histogram is one point
for each set of labels, with every bucket; its count is the bucket +Inf, or `_count` where there is
none. Info and state sets are sums that do not only grow; gauge histograms have no place in OTLP and
are rejected. A unit is what UNIT says, never guessed from a name: llama.cpp's
`prompt_tokens_seconds` are tokens per second.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    AggregationTemporality,
    DataPointFlags,
    Exemplar,
    HistogramDataPoint,
    Metric,
    NumberDataPoint,
    SummaryDataPoint,
)

from perfledger.collectors.scraping.config import ScrapeLimits
from perfledger.collectors.scraping.distributions import (
    histograms_of,
    is_quantile,
    per_bucket,
    summaries_of,
    whole_count,
)
from perfledger.collectors.scraping.exposition import (
    BadLine,
    Exposition,
    Family,
    Header,
    Labels,
    Sample,
    parse_exemplar,
)
from perfledger.collectors.scraping.series_memory import Cumulative, SeriesMemory

# What we say about a scrape ourselves, so that a page may not.
OWN_NAMES = frozenset({"up", "scrape_duration_seconds", "scrape_samples_scraped"})

_CUMULATIVE = AggregationTemporality.AGGREGATION_TEMPORALITY_CUMULATIVE
_NO_VALUE = DataPointFlags.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK
# Prometheus writes words, OpenTelemetry UCUM.
_UNITS = {
    "seconds": "s",
    "milliseconds": "ms",
    "microseconds": "us",
    "nanoseconds": "ns",
    "minutes": "min",
    "hours": "h",
    "days": "d",
    "bytes": "By",
    "bits": "bit",
    "ratio": "1",
    "percent": "%",
    "celsius": "Cel",
    "hertz": "Hz",
    "joules": "J",
    "watts": "W",
    "volts": "V",
    "amperes": "A",
    "meters": "m",
    "grams": "g",
}


_Point = NumberDataPoint | HistogramDataPoint | SummaryDataPoint
# Labels as the bytes of a point's attributes: merging them costs a tenth of building them.
Packed = dict[tuple[type[_Point], Labels], bytes]


class Conversion:
    """Turns one page into metrics. `rejected` counts samples and points by reason.

    Hand `packed` to the conversion of the next page.
    """

    def __init__(
        self, memory: SeriesMemory, packed: Packed, time_ns: int, limits: ScrapeLimits
    ) -> None:
        self.rejected: Counter[str] = Counter()
        self.packed: Packed = {}
        self._known = packed
        self._pairs: dict[tuple[type[_Point], tuple[str, str]], bytes] = {}
        self._memory = memory
        self._time_ns = time_ns
        self._limits = limits

    def metrics(self, page: Exposition) -> list[Metric]:
        """Return the metrics of a page, without `target_info`, and marks for what is gone."""
        self._memory.begin_scrape()
        metrics = [m for family in page.families for m in self._of_family(family)]
        return metrics + gone_metrics(self._memory.end_scrape(), self._time_ns)

    def _of_family(self, family: Family) -> Iterator[Metric]:
        header = family.header
        if _is_target_info(family):
            return
        if header.type == "gaugehistogram":
            self.rejected["gauge histogram"] += sum(map(len, family.samples.values()))
        elif header.type == "histogram":
            yield from self._histograms(family)
        elif header.type == "summary":
            yield from self._summaries(family)
        else:
            created = _created(family)
            for suffix, samples in family.samples.items():
                if suffix != "_created":
                    named = header._replace(name=header.name + suffix)
                    yield from self._numbers(named, samples, created)

    def _numbers(
        self, header: Header, samples: Iterable[Sample], created: Mapping[Labels, float]
    ) -> Iterator[Metric]:
        metric = new_metric(header)
        points = metric.sum.data_points if metric.HasField("sum") else metric.gauge.data_points
        is_count = header.type == "counter"
        for series, value, time_ns, exemplar in samples:
            labels, time_ns = series.labels, time_ns or self._time_ns
            if not labels and header.name in OWN_NAMES:
                self.rejected["reserved name"] += 1
                continue
            cumulative = Cumulative((value,), created.get(labels)) if is_count else None
            start_ns = self._start_ns(header, labels, time_ns, cumulative)
            if start_ns is None:
                continue
            point = points.add(
                time_unix_nano=time_ns, start_time_unix_nano=start_ns, as_double=value
            )
            self._label(point, labels)
            if exemplar is not None:
                point.exemplars.extend(self._exemplars([exemplar]))
        if points:
            yield metric

    def _histograms(self, family: Family) -> Iterator[Metric]:
        metric, created = new_metric(family.header), _created(family)
        points = metric.histogram.data_points
        for labels, told in histograms_of(family, self.rejected).items():
            try:
                bounds, counts = per_bucket(told)
            except BadLine as reason:
                self.rejected[str(reason)] += 1
                continue
            cumulative = Cumulative((sum(counts), *counts), created.get(labels))
            time_ns = told.time_ns or self._time_ns
            start_ns = self._start_ns(family.header, labels, time_ns, cumulative)
            if start_ns is None:
                continue
            point = points.add(
                time_unix_nano=time_ns,
                start_time_unix_nano=start_ns,
                count=sum(counts),
                sum=told.sum,
                explicit_bounds=bounds,
                bucket_counts=counts if told.edges else (),
            )
            self._label(point, labels)
            point.exemplars.extend(self._exemplars(told.exemplars))
        if points:
            yield metric

    def _summaries(self, family: Family) -> Iterator[Metric]:
        metric, created = new_metric(family.header), _created(family)
        points = metric.summary.data_points
        for labels, told in summaries_of(family, self.rejected).items():
            try:
                count = whole_count(told.count)
            except BadLine as reason:
                self.rejected[str(reason)] += 1
                continue
            time_ns = told.time_ns or self._time_ns
            cumulative = Cumulative((count,), created.get(labels))
            start_ns = self._start_ns(family.header, labels, time_ns, cumulative)
            if start_ns is None:
                continue
            # A sum that was not told has no other sign in OTLP; 0 would be a lie.
            point = points.add(
                time_unix_nano=time_ns,
                start_time_unix_nano=start_ns,
                count=count,
                sum=float("nan") if told.sum is None else told.sum,
            )
            self._label(point, labels)
            for quantile, value in filter(is_quantile, told.edges):
                point.quantile_values.add(quantile=quantile, value=value)
        if points:
            yield metric

    def _start_ns(
        self, header: Header, labels: Labels, time_ns: int, cumulative: Cumulative | None
    ) -> int | None:
        start_ns = self._memory.take(header, labels, time_ns, cumulative)
        if start_ns is None:
            self.rejected["the same series twice"] += 1
        return start_ns

    def _label(self, point: _Point, labels: Labels) -> None:
        key = (type(point), labels)
        packed = self.packed.get(key)
        if packed is None:
            packed = self._known.get(key)
            if packed is None:
                packed = b"".join(self._pair(type(point), label) for label in labels)
            self.packed[key] = packed
        point.MergeFromString(packed)

    def _pair(self, kind: type[_Point], label: tuple[str, str]) -> bytes:
        """Return one attribute's bytes: those of a repeated field may be joined."""
        packed = self._pairs.get((kind, label))
        if packed is None:
            packed = kind(attributes=key_values([label])).SerializeToString()
            self._pairs[kind, label] = packed
        return packed

    def _exemplars(self, texts: Iterable[str]) -> Iterator[Exemplar]:
        for text in texts:
            try:
                labels, value, time_ns = parse_exemplar(text, self._limits)
            except BadLine as reason:
                self.rejected[str(reason)] += 1
            else:
                yield _exemplar(labels, value, time_ns)


def new_metric(header: Header) -> Metric:
    """Return a metric without points, of the kind that its Prometheus type asks for."""
    metric = Metric(
        name=header.name,
        description=header.help,
        unit=_UNITS.get(header.unit, header.unit),
        metadata=key_values((("prometheus.type", header.type),)),
    )
    if header.type == "histogram":
        metric.histogram.aggregation_temporality = _CUMULATIVE
    elif header.type == "summary":
        metric.summary.SetInParent()
    elif header.type in ("counter", "info", "stateset"):
        metric.sum.aggregation_temporality = _CUMULATIVE
        metric.sum.is_monotonic = header.type == "counter"
    else:
        metric.gauge.SetInParent()
    return metric


def gone_metrics(gone: Iterable[tuple[Header, Labels]], time_ns: int) -> list[Metric]:
    """Return points without a value, which say that these series are not told any more."""
    metrics: dict[Header, Metric] = {}
    for header, labels in gone:
        if header not in metrics:
            metrics[header] = new_metric(header)
        metric = metrics[header]
        points = getattr(metric, metric.WhichOneof("data") or "gauge").data_points
        points.add(time_unix_nano=time_ns, flags=_NO_VALUE, attributes=key_values(labels))
    return list(metrics.values())


def target_info(page: Exposition) -> dict[str, str]:
    """Return what a target says about itself as a whole: attributes of its resource."""
    for family in filter(_is_target_info, page.families):
        for samples in family.samples.values():
            return dict(samples[0].series.labels)
    return {}


def key_values(labels: Iterable[tuple[str, str]]) -> list[KeyValue]:
    """Return labels as OTLP attributes."""
    return [KeyValue(key=name, value=AnyValue(string_value=value)) for name, value in labels]


def _is_target_info(family: Family) -> bool:
    header = family.header
    return header.name == "target_info" or (header.name, header.type) == ("target", "info")


def _created(family: Family) -> dict[Labels, float]:
    return {sample.series.labels: sample.value for sample in family.samples.get("_created", ())}


def _exemplar(labels: Labels, value: float, time_ns: int | None) -> Exemplar:
    others = dict(labels)
    exemplar = Exemplar(as_double=value, time_unix_nano=time_ns or 0)
    exemplar.trace_id = _id(others, "trace_id", 16)
    exemplar.span_id = _id(others, "span_id", 8)
    exemplar.filtered_attributes.extend(key_values(others.items()))
    return exemplar


def _id(labels: dict[str, str], name: str, size_bytes: int) -> bytes:
    """Take an id out of the labels where it is one in hex; else leave it there."""
    try:
        found = bytes.fromhex(labels.get(name, ""))
    except ValueError:
        return b""
    if len(found) != size_bytes:
        return b""
    del labels[name]
    return found
