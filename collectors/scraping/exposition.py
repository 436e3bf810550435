"""The text of a /metrics page -> metric families: Prometheus 0.0.4 and OpenMetrics 1.0.

prometheus_client's parsers are the oracle of the tests and not used here: they cost 50 us a sample
(2,000 samples: 100 ms), give up the rest of a page at one bad line, take time that grows with the
square of a hostile label's length, and rename counters without `_total`. Here each line is matched
by one regular expression that cannot backtrack, a bad line is rejected alone and counted, and what
was parsed of a series is remembered for the next scrape.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from io import BytesIO
from typing import NamedTuple

from perfledger.collectors.scraping.config import ScrapeLimits

Labels = tuple[tuple[str, str], ...]

# What the samples of a family of each type are called, after the family's name.
_SUFFIXES: Mapping[str, frozenset[str]] = {
    "counter": frozenset({"", "_total", "_created"}),
    "gauge": frozenset({""}),
    "unknown": frozenset({""}),
    "stateset": frozenset({""}),
    "info": frozenset({"", "_info"}),
    "summary": frozenset({"", "_sum", "_count", "_created"}),
    "histogram": frozenset({"_bucket", "_sum", "_count", "_created"}),
    "gaugehistogram": frozenset({"_bucket", "_gsum", "_gcount"}),
}
_ANY_SUFFIX = ("_total", "_bucket", "_sum", "_count", "_created", "_info", "_gsum", "_gcount")

_QUOTED = r'"(?:[^"\\]++|\\.)*+"'
_SAMPLE = re.compile(
    r"((?:[A-Za-z_:][\w:]*+)?+(?:[ \t]*+\{(?:[^\"{}]++|" + _QUOTED + r")*+\})?+)"
    r"[ \t]*+([-+.0-9A-Za-z]{1,64}+)"
    r"(?:[ \t]++([-+.0-9eE]{1,64}+))?+"
    r"(?:[ \t]++\#[ \t]*+(\{.*+))?+[ \t\r]*+",
    re.ASCII,
)
_META = re.compile(
    r"\#[ \t]++(HELP|TYPE|UNIT)[ \t]++(" + _QUOTED + r"|[A-Za-z_:][\w:]*+)(?:[ \t]++(.*+))?+",
    re.ASCII,
)
_IS_META = re.compile(r"\#[ \t]++(?:HELP|TYPE|UNIT)[ \t]")
_LABEL = re.compile(
    r"[ \t]*+(" + _QUOTED + r"|[A-Za-z_][\w.]*+)"
    r"(?:[ \t]*+=[ \t]*+(" + _QUOTED + r"))?+[ \t]*+(?:,|\Z)[ \t]*+",
    re.ASCII,
)
_EXEMPLAR = re.compile(
    r"\{((?:[^\"{}]++|" + _QUOTED + r")*+)\}"
    r"[ \t]++([-+.0-9A-Za-z]{1,64}+)(?:[ \t]++([-+.0-9eE]{1,64}+))?+[ \t\r]*+",
    re.ASCII,
)
_ESCAPE = re.compile(r"\\(.)")
_UNESCAPED = {"n": "\n", "\\": "\\", '"': '"'}
_LATEST_S = (2**63 - 1) / 1e9


class UnusableScrape(Exception):
    """A page that cannot be used at all; `reason` is a word of low cardinality."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class BadLine(Exception):
    """A line, sample or point that is rejected alone; the text says why."""


class Series(NamedTuple):
    """A sample's name and labels, sorted. `edge` is the label `le` of a bucket, else `quantile`;
    `rest` are the labels without it."""

    name: str
    labels: Labels
    edge: str | None
    rest: Labels


class Sample(NamedTuple):
    """One line. `exemplar` is its text, not yet parsed."""

    series: Series
    value: float
    time_ns: int | None
    exemplar: str | None


class Header(NamedTuple):
    """What a page says about a family."""

    name: str
    type: str
    help: str
    unit: str


@dataclass
class Family:
    """Samples of one family, by the suffix of their name."""

    header: Header
    samples: dict[str, list[Sample]] = field(default_factory=dict)


@dataclass
class Exposition:
    """A page. `rejected` counts lines by reason; hand `series` to the parsing of the next page."""

    families: list[Family]
    samples: int
    rejected: Counter[str]
    series: dict[str, Series]


def parse(
    body: bytes, limits: ScrapeLimits, *, openmetrics: bool, known: Mapping[str, Series]
) -> Exposition:
    """Parse a page; `known` are the series of the page before, by their text.

    Raises UnusableScrape: too many series, OpenMetrics without its end, or no metrics at all.
    """
    page = _Page(limits, openmetrics, known)
    # A sample and its family have at most four lines; beyond, a page is only there to be slow.
    most_lines = 5 * limits.max_series + 100
    for number, line in enumerate(BytesIO(body)):
        if number >= most_lines:
            raise UnusableScrape("too_many_lines")
        page.take(line)
    if openmetrics and not page.ended:
        raise UnusableScrape("truncated")
    if page.rejected and not page.by_name:
        raise UnusableScrape("not_metrics")
    return Exposition(list(page.families()), page.samples, page.rejected, page.series)


def parse_exemplar(text: str, limits: ScrapeLimits) -> tuple[Labels, float, int | None]:
    """Return an exemplar's labels, value and time (ns). Raises BadLine."""
    match = _EXEMPLAR.fullmatch(text)
    if match is None:
        raise BadLine("not an exemplar")
    inner, value, time = match.groups()
    labels = _labels(inner, limits)
    time_ns = _time_ns(time, 1) if time else None
    return tuple(sorted(labels.items())), _number(value), time_ns


class _Page:
    """What has been read of one page so far."""

    def __init__(
        self, limits: ScrapeLimits, openmetrics: bool, known: Mapping[str, Series]
    ) -> None:
        self.limits = limits
        self.rejected: Counter[str] = Counter()
        self.series: dict[str, Series] = {}
        self.by_name: dict[str, list[Sample]] = {}
        self.samples = 0
        self.ended = False
        self._known = known
        self._openmetrics = openmetrics
        self._stamps_per_s = 1 if openmetrics else 1000
        self._told: dict[str, dict[str, str]] = {"HELP": {}, "TYPE": {}, "UNIT": {}}

    def take(self, encoded: bytes) -> None:
        """Take one line, or count why not."""
        try:
            line = encoded.decode().strip(" \t\r\n")
            if not line:
                return
            if self.ended:
                raise BadLine("after the end")
            if line[0] == "#":
                self._take_comment(line)
            else:
                self._take_sample(line)
        except BadLine as reason:
            self.rejected[str(reason)] += 1
        except UnicodeDecodeError:
            self.rejected["not UTF-8"] += 1

    def _take_comment(self, line: str) -> None:
        if line == "# EOF" and self._openmetrics:
            self.ended = True
            return
        if not _IS_META.match(line):
            return
        match = _META.fullmatch(line)
        if match is None:
            raise BadLine("not metadata")
        kind, name, text = match.groups()
        name, text = _unquoted(name), _unescaped(text or "")
        if kind == "TYPE":
            text = "unknown" if text == "untyped" else text
            if text not in _SUFFIXES:
                raise BadLine("unknown type")
        if self._told[kind].setdefault(name, text) != text:
            raise BadLine("contradicting metadata")

    def _take_sample(self, line: str) -> None:
        match = _SAMPLE.fullmatch(line)
        if match is None:
            raise BadLine("not a sample")
        self.samples += 1
        if self.samples > self.limits.max_series:
            raise UnusableScrape("too_many_series")
        text, value, time, exemplar = match.groups()
        series = self.series.get(text)
        if series is None:
            series = self._known.get(text) or _series(text, self.limits)
            self.series[text] = series
        time_ns = _time_ns(time, self._stamps_per_s) if time else None
        sample = Sample(series, _number(value), time_ns, exemplar)
        self.by_name.setdefault(series.name, []).append(sample)

    def families(self) -> Iterator[Family]:
        """Yield each family with its samples, in the order of the page."""
        families: dict[str, Family] = {}
        for name, samples in self.by_name.items():
            found = _family_of(name, self._told["TYPE"])
            if found is None:
                self.rejected["not of its family's type"] += len(samples)
                continue
            family, suffix = found
            if family not in families:
                families[family] = Family(self._header(family))
            families[family].samples.setdefault(suffix, []).extend(samples)
        yield from families.values()

    def _header(self, family: str) -> Header:
        told = self._told
        kind = told["TYPE"].get(family, "unknown")
        return Header(family, kind, told["HELP"].get(family, ""), told["UNIT"].get(family, ""))


def _family_of(name: str, types: Mapping[str, str]) -> tuple[str, str] | None:
    """Return the family that a sample belongs to, and its suffix there; None where it fits none.

    The older format has no place for creation times, so prometheus_client tells them as gauges of
    their own; they belong to the counter, histogram or summary beside them.
    """
    if types.get(name) == "gauge" and name.endswith("_created"):
        base = name.removesuffix("_created")
        for owner in (base, f"{base}_total"):
            if "_created" in _SUFFIXES[types.get(owner, "gauge")]:
                return owner, "_created"
    if name in types:
        return (name, "") if "" in _SUFFIXES[types[name]] else None
    for suffix in _ANY_SUFFIX:
        family = name.removesuffix(suffix)
        if family != name and suffix in _SUFFIXES[types.get(family, "unknown")]:
            return family, suffix
    return name, ""


def _series(text: str, limits: ScrapeLimits) -> Series:
    name, _, inner = text.partition("{")
    name = name.strip(" \t")
    labels = _labels(inner.removesuffix("}"), limits, is_named=bool(name))
    name = name or labels.pop("", "")
    if not name:
        raise BadLine("no name")
    if _is_longer(name, limits.max_label_value_bytes):
        raise BadLine("name too long")
    pairs = tuple(sorted(labels.items()))
    key = "le" if name.endswith("_bucket") else "quantile"
    edge = labels.get(key)
    rest = pairs if edge is None else tuple(pair for pair in pairs if pair[0] != key)
    return Series(name, pairs, edge, rest)


def _labels(inner: str, limits: ScrapeLimits, *, is_named: bool = True) -> dict[str, str]:
    """Return labels; the metric's own name, quoted among them, stands under the empty name."""
    labels: dict[str, str] = {}
    position, inner = 0, inner.strip(" \t")
    while position < len(inner):
        match = _LABEL.match(inner, position)
        if match is None:
            raise BadLine("not labels")
        position = match.end()
        name, value = match.groups()
        if value is None:
            if is_named or name[0] != '"':
                raise BadLine("not labels")
            name, value = "", name
        elif name == '""':
            raise BadLine("not labels")
        name, value = _unquoted(name), _unquoted(value)
        if name in labels:
            raise BadLine("the same label twice")
        labels[name] = value
        _check_label(name, value, limits)
        if len(labels) > limits.max_labels:
            raise BadLine("too many labels")
    return labels


def _check_label(name: str, value: str, limits: ScrapeLimits) -> None:
    if _is_longer(name, limits.max_label_name_bytes) or _is_longer(
        value, limits.max_label_value_bytes
    ):
        raise BadLine("label too long")


def _is_longer(text: str, limit_bytes: int) -> bool:
    # A character has at most four bytes.
    return 4 * len(text) > limit_bytes and len(text.encode()) > limit_bytes


def _unquoted(text: str) -> str:
    return _unescaped(text[1:-1]) if text[:1] == '"' else text


def _unescaped(text: str) -> str:
    if "\\" not in text:
        return text
    return _ESCAPE.sub(lambda match: _UNESCAPED.get(match[1], match[0]), text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise BadLine("not a number") from None


def _time_ns(text: str, stamps_per_s: int) -> int:
    """Return ns since 1970 of a time in seconds or, in the older format, in milliseconds."""
    if not 0 < _number(text) / stamps_per_s < _LATEST_S:
        raise BadLine("no time of this era")
    return int(Decimal(text) * (1_000_000_000 // stamps_per_s))
