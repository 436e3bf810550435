"""One target's OTLP requests: what it told, and what is told about the scrape itself.

`up`, `scrape_duration_seconds` and `scrape_samples_scraped` are Prometheus's; how often scraping
failed, series began anew or lines were rejected are sums since this process began.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.metrics.v1.metrics_pb2 import Metric

from perfledger.collectors.scraping.config import ScrapeLimits
from perfledger.collectors.scraping.conversion import (
    Conversion,
    Packed,
    gone_metrics,
    key_values,
    new_metric,
    target_info,
)
from perfledger.collectors.scraping.dcgm import typed
from perfledger.collectors.scraping.exposition import Header, Series, UnusableScrape, parse
from perfledger.collectors.scraping.series_memory import SeriesMemory
from perfledger.collectors.scraping.targets import Target
from perfledger.schema.attributes import SCHEMA_VERSION

SCOPE_NAME = "perfledger.scrape"

_UP = Header("up", "gauge", "1 where the last scrape succeeded, else 0", "")
_DURATION = Header("scrape_duration_seconds", "gauge", "how long the scrape took", "seconds")
_SAMPLES = Header("scrape_samples_scraped", "gauge", "samples that the target exposed", "")
_RESETS = Header("perfledger.scrape.resets", "counter", "series that began anew", "")
_FAILURES = Header("perfledger.scrape.failures", "counter", "scrapes that failed, by error", "")
_REJECTED = Header("perfledger.scrape.rejected", "counter", "lines or points not taken", "")


class TargetTelemetry:
    """What is remembered of one target between scrapes. Time is the wall clock, ns."""

    def __init__(self, target: Target, limits: ScrapeLimits, started_ns: int) -> None:
        self._samples = 0
        self._all_samples = 0
        self._rejected: Counter[str] = Counter()
        self._failures: Counter[str] = Counter()
        self._resource = target.resource()
        self._limits = limits
        self._started_ns = started_ns
        self._memory = SeriesMemory()
        self._series: Mapping[str, Series] = {}
        self._packed: Packed = {}

    def counts(self) -> Counter[str]:
        """Return what happened so far."""
        return Counter(
            scrapes_failed=self._failures.total(),
            scrape_samples=self._all_samples,
            scrape_rejected=self._rejected.total(),
            scrape_resets=self._memory.resets,
        )

    def scraped(self, body: bytes, openmetrics: bool, time_ns: int, duration_s: float) -> bytes:
        """Return the request for a page; one that cannot be used is a failed scrape."""
        try:
            page = typed(parse(body, self._limits, openmetrics=openmetrics, known=self._series))
        except UnusableScrape as failure:
            return self.failed(failure.reason, time_ns, duration_s)
        self._series = page.series
        conversion = Conversion(self._memory, self._packed, time_ns, self._limits)
        metrics = conversion.metrics(page)
        self._packed = conversion.packed
        self._rejected += page.rejected + conversion.rejected
        self._samples = page.samples
        self._all_samples += page.samples
        metrics += self._about(1, time_ns, duration_s)
        return self._request(metrics, target_info(page))

    def failed(self, reason: str, time_ns: int, duration_s: float) -> bytes:
        """Return the request that says that a scrape failed: the target is down, as data."""
        self._failures[reason] += 1
        self._samples = 0
        metrics = gone_metrics(self._memory.mark_all_gone(), time_ns)
        return self._request([*metrics, *self._about(0, time_ns, duration_s)], {})

    def gone(self, time_ns: int) -> bytes:
        """Return the request that says that this is no target any more."""
        gone = self._memory.mark_all_gone() + [(own, ()) for own in (_UP, _DURATION, _SAMPLES)]
        return self._request(gone_metrics(gone, time_ns), {})

    def _about(self, up: int, time_ns: int, duration_s: float) -> Iterable[Metric]:
        yield _gauge(_UP, up, time_ns)
        yield _gauge(_DURATION, duration_s, time_ns)
        yield _gauge(_SAMPLES, self._samples, time_ns)
        yield self._sum(_RESETS, "", {"": self._memory.resets}, time_ns)
        if self._failures:
            yield self._sum(_FAILURES, "error.type", self._failures, time_ns)
        if self._rejected:
            yield self._sum(_REJECTED, "reason", self._rejected, time_ns)

    def _sum(self, header: Header, key: str, counts: Mapping[str, int], time_ns: int) -> Metric:
        metric = new_metric(header)
        for value, count in counts.items():
            metric.sum.data_points.add(
                time_unix_nano=time_ns,
                start_time_unix_nano=self._started_ns,
                as_int=count,
                attributes=key_values([(key, value)] if key else []),
            )
        return metric

    def _request(self, metrics: Iterable[Metric], told: Mapping[str, str]) -> bytes:
        request = ExportMetricsServiceRequest()
        group = request.resource_metrics.add()
        for name, value in {**told, **self._resource}.items():
            group.resource.attributes.append(KeyValue(key=name, value=_any_value(value)))
        scoped = group.scope_metrics.add()
        scoped.scope.name, scoped.scope.version = SCOPE_NAME, SCHEMA_VERSION
        scoped.metrics.extend(metrics)
        return bytes(request.SerializeToString())


def _gauge(header: Header, value: float, time_ns: int) -> Metric:
    metric = new_metric(header)
    metric.gauge.data_points.add(time_unix_nano=time_ns, as_double=value)
    return metric


def _any_value(value: str | int) -> AnyValue:
    return AnyValue(int_value=value) if isinstance(value, int) else AnyValue(string_value=value)
