"""Pages for the tests of scraping, and prometheus_client as the oracle of their points."""

import math
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
from otlp_messages import METRICS, decode
from prometheus_client.metrics_core import Metric

from perfledger.collectors.scraping.config import ScrapeLimits
from perfledger.collectors.scraping.target_telemetry import TargetTelemetry
from perfledger.collectors.scraping.targets import Target

PAGES = Path(__file__).parent / "pages"
TARGET = Target("llm", "engine:8000", "http://engine:8000/metrics", (("zone", "a"),))
STARTED_NS = 1_700_000_000_000_000_000
OWN_NAMES = {"up", "scrape_duration_seconds", "scrape_samples_scraped"}

Point = dict[str, object]
Key = tuple[str, frozenset[tuple[str, str]]]


def telemetry(**limits: int) -> TargetTelemetry:
    return TargetTelemetry(TARGET, ScrapeLimits(**limits), STARTED_NS)


def rows_of(request: bytes) -> list[dict[str, object]]:
    """Return the rows that the collector makes of a request; none may be rejected."""
    decoded = decode(METRICS, request, 7)
    assert not decoded.tally.rejected
    assert isinstance(decoded.rows, pa.Table)
    return decoded.rows.to_pylist()


def is_own(row: Point) -> bool:
    name = str(row["name"])
    return name.startswith("perfledger.") or (name in OWN_NAMES and not row["attributes"])


def labels_of(row: Point) -> frozenset[tuple[str, str]]:
    pairs = row["attributes"]
    assert isinstance(pairs, list)
    return frozenset((pair["key"], pair["text"]) for pair in pairs if pair["text"] is not None)


def points(request: bytes) -> dict[Key, Point]:
    """Return what each point of the page says, without what all rows share and our own."""
    found: dict[Key, Point] = {}
    for row in rows_of(request):
        if is_own(row):
            continue
        labels = labels_of(row)
        for pair in row["attributes"]:  # type: ignore[attr-defined]
            if pair["key"] == "quantile" and pair["double"] is not None:
                labels |= {("quantile", pair["double"])}
        key = (str(row["name"]), labels)
        assert key not in found
        said = ("kind", "value", "count", "bounds", "bucket_counts", "time_ns", "start_ns")
        found[key] = {name: row[name] for name in said}
    return found


def value_of(rows: Iterable[Point], name: str, **labels: str) -> object:
    (value,) = [
        row["value"]
        for row in rows
        if row["name"] == name and labels_of(row) == frozenset(labels.items())
    ]
    return value


def expected_points(families: Iterable[Metric], time_ns: int) -> dict[Key, Point]:
    """Return what `points` must be for families that prometheus_client parsed or collected."""
    families = [family for family in families if family.samples]
    created = {
        (sample.name.removesuffix("_created"), frozenset(sample.labels.items())): sample.value
        for family in families
        for sample in family.samples
        if sample.name.endswith("_created")
    }
    found: dict[Key, Point] = {}
    for family in families:
        if {sample.name for sample in family.samples} == {f"{family.name}"} and (
            family.name.endswith("_created")
        ):
            continue
        expected = _Expected(family, created, time_ns)
        found |= expected.points()
    return found


class _Expected:
    """The points of one family, computed sample by sample."""

    def __init__(self, family: Metric, created: dict[Key, float], time_ns: int) -> None:
        self.family, self.created, self.time_ns = family, created, time_ns

    def points(self) -> dict[Key, Point]:
        if self.family.type in ("histogram", "summary"):
            return self._distributions()
        kind = "sum" if self.family.type in ("counter", "info", "stateset") else "gauge"
        return {
            (s.name, frozenset(s.labels.items())): self._point(
                kind,
                self._start_ns(s.labels) if self.family.type == "counter" else None,
                value=float(s.value),
                time_ns=round(s.timestamp * 1e9) if s.timestamp else self.time_ns,
            )
            for s in self.family.samples
            if not s.name.endswith("_created")
        }

    def _distributions(self) -> dict[Key, Point]:
        name, found = self.family.name, {}
        for sample in self.family.samples:
            if sample.name != f"{name}_count":
                continue
            labels = frozenset(sample.labels.items())
            told = self._told(labels)
            start_ns = self._start_ns(sample.labels)
            found[name, labels] = self._point(
                self.family.type, start_ns, value=told.get("_sum"), count=int(sample.value)
            )
            if self.family.type == "histogram":
                found[name, labels] |= self._buckets(labels)
            for quantile, value in self._edges("quantile", "", labels):
                key = (name, labels | {("quantile", quantile)})
                found[key] = self._point("summary", start_ns, value=value)
        return found

    def _buckets(self, labels: frozenset[tuple[str, str]]) -> Point:
        edges = self._edges("le", "_bucket", labels)
        counts = [int(value) for _, value in edges]
        return {
            "bounds": [bound for bound, _ in edges if bound != math.inf],
            "bucket_counts": [n - m for m, n in zip([0, *counts], counts, strict=False)],
        }

    def _edges(
        self, label: str, suffix: str, labels: frozenset[tuple[str, str]]
    ) -> list[tuple[float, float]]:
        return [
            (float(s.labels[label]), s.value)
            for s in self.family.samples
            if s.name == self.family.name + suffix
            and frozenset(s.labels.items()) - {(label, s.labels.get(label, ""))} == labels
        ]

    def _told(self, labels: frozenset[tuple[str, str]]) -> dict[str, float]:
        start = len(self.family.name)
        return {
            s.name[start:]: s.value
            for s in self.family.samples
            if frozenset(s.labels.items()) == labels
        }

    def _start_ns(self, labels: dict[str, str]) -> int:
        name = self.family.name.removesuffix("_total")
        owners = (self.family.name, name)
        for owner in owners:
            if created_s := self.created.get((owner, frozenset(labels.items()))):
                return min(self.time_ns, round(created_s * 1e6) * 1000)
        return self.time_ns

    def _point(self, kind: str, start_ns: int | None, **said: object) -> Point:
        empty: Point = dict.fromkeys(("value", "count", "bounds", "bucket_counts"))
        return {"kind": kind, "time_ns": self.time_ns, "start_ns": start_ns, **empty, **said}
