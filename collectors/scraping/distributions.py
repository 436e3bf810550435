"""Lines of histograms and summaries, put together: one distribution for each set of labels."""

import math
from collections import Counter
from dataclasses import dataclass, field

from perfledger.collectors.scraping.exposition import BadLine, Family, Labels, Sample

_LARGEST_COUNT = 2**63 - 1


@dataclass
class Distribution:
    """What a page tells of one histogram or summary.

    `edges` are (le, observations up to it) or (quantile, value).
    """

    edges: list[tuple[float, float]] = field(default_factory=list)
    sum: float | None = None
    count: float | None = None
    time_ns: int | None = None
    exemplars: list[str] = field(default_factory=list)


def histograms_of(family: Family, rejected: Counter[str]) -> dict[Labels, Distribution]:
    """Put the lines of a histogram family together; a bucket without a bound is rejected."""
    return _distributions(family, "_bucket", rejected)


def summaries_of(family: Family, rejected: Counter[str]) -> dict[Labels, Distribution]:
    """Put the lines of a summary family together; a value without a quantile is rejected."""
    return _distributions(family, "", rejected)


def per_bucket(told: Distribution) -> tuple[list[float], list[int]]:
    """Return upper bounds without the last, infinite one, and the observations in each bucket.

    Raises BadLine where the buckets contradict each other, or do not say how many there are.
    """
    edges = sorted(told.edges)
    bounds = [bound for bound, _ in edges]
    if not bounds or bounds[-1] != math.inf:
        edges.append((math.inf, whole_count(told.count)))
    else:
        bounds.pop()
    if not all(map(math.isfinite, bounds)) or len(set(bounds)) < len(bounds):
        raise BadLine("bounds of buckets contradict each other")
    counts, before = [], 0
    for _, value in edges:
        up_to = whole_count(value)
        if up_to < before:
            raise BadLine("counts of buckets contradict each other")
        counts.append(up_to - before)
        before = up_to
    return bounds, counts


def whole_count(value: float | None) -> int:
    """Return a number of observations. Raises BadLine where it is none, or is missing."""
    if value is None:
        raise BadLine("a histogram or summary without its count")
    if not 0 <= value <= _LARGEST_COUNT or value != int(value):
        raise BadLine("a count that is no whole number")
    return int(value)


def is_quantile(edge: tuple[float, float]) -> bool:
    """Say whether a summary's edge is a quantile: from 0 to 1."""
    return 0 <= edge[0] <= 1


def _distributions(
    family: Family, edge_suffix: str, rejected: Counter[str]
) -> dict[Labels, Distribution]:
    found: dict[Labels, Distribution] = {}
    for sample in family.samples.get(edge_suffix, ()):
        edge = _edge(sample)
        if edge is None:
            rejected["a bucket or quantile without its edge"] += 1
            continue
        told = _at(found, sample.series.rest, sample)
        told.edges.append((edge, sample.value))
        if sample.exemplar is not None:
            told.exemplars.append(sample.exemplar)
    for sample in family.samples.get("_sum", ()):
        _at(found, sample.series.labels, sample).sum = sample.value
    for sample in family.samples.get("_count", ()):
        _at(found, sample.series.labels, sample).count = sample.value
    return found


def _at(found: dict[Labels, Distribution], labels: Labels, sample: Sample) -> Distribution:
    told = found.get(labels)
    if told is None:
        told = found[labels] = Distribution(time_ns=sample.time_ns)
    return told


def _edge(sample: Sample) -> float | None:
    try:
        edge = float(sample.series.edge or "")
    except ValueError:
        return None
    return None if math.isnan(edge) else edge
