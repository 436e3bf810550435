"""The collector's own metrics and health: what each namespace received and what became of it.

Always, for spans, data points and log records: received = accepted + rejected, and accepted =
written + waiting + deduplicated + sampled away.
"""

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from perfledger.collectors.otlp_rows import SIGNALS
from perfledger.collectors.transport.http_body import Receive
from perfledger.collectors.transport.otlp_http import Application, Scope, Send

PREFIX = "perfledger_collector_"
# Telemetry is a file some seconds after its acknowledgement; much later means that nothing moves.
BEHIND_S = 60.0
_TEXT = "text/plain; version=0.0.4; charset=utf-8"
_OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
_REFUSED = "requests_refused_"

Labels = dict[str, str]


@dataclass(frozen=True)
class Family:
    """One metric; a counter's samples end in `_total`."""

    name: str
    kind: str
    meaning: str

    @property
    def unit(self) -> str:
        """Return the unit that the name ends in, or ""."""
        last = self.name.rpartition("_")[2]
        return last if last in ("bytes", "seconds") else ""


Sample = tuple[Family, Labels, float]


def _counter(name: str, meaning: str) -> Family:
    return Family(name, "counter", meaning)


_ITEMS = "Spans, data points or log records"
# Counts `TABLE_fate` of the three signals.
FATES = {
    "received": _counter("items_received", f"{_ITEMS} in requests that could be read"),
    "accepted": _counter("items_accepted", f"{_ITEMS} acknowledged"),
    "written": _counter("items_written", f"{_ITEMS} in files of the store"),
    "deduplicated": _counter("items_deduplicated", f"{_ITEMS} that had come before"),
    "sampled_away": _counter("items_sampled_away", f"{_ITEMS} not kept by tail sampling"),
    "waiting": Family("items_waiting", "gauge", f"{_ITEMS} acknowledged, not yet in files"),
}
REJECTED = _counter("items_rejected", f"{_ITEMS} that can never be stored, by reason")
REFUSED = _counter("requests_refused", "Requests refused as a whole, by HTTP status")
LAG = Family("lag_seconds", "gauge", "Age of the oldest acknowledged item that is not in a file")
REFUSING = Family("refusing", "gauge", "1 while every request is refused, by reason")
DISK_LOW, MEMORY_FULL = "disk low", "memory full"
REASONS = (DISK_LOW, MEMORY_FULL)
OTHER = _counter("events", "What else was counted, by name")
# Counts of one namespace, by their name in `Collector.counts()`.
COUNTS = {
    "steps_written": _counter("steps_written", "Rows of the table steps in files"),
    "collectives_written": _counter(
        "collectives_written", "Rows of the table collectives in files"
    ),
    "requests_written": _counter("requests_written", "Rows of the table requests in files"),
    "values_cut": _counter("values_cut", "Attribute values cut to the limit"),
    "values_denied": _counter("values_denied", "Values removed because they hold content"),
    "values_repaired": _counter("values_repaired", "Strings with bytes that were not UTF-8"),
    "duplicate_keys": _counter("duplicate_keys", "Attributes whose key came again; the last won"),
    "exemplars_dropped": _counter("exemplars_dropped", "Exemplars not kept"),
    "write_failures": _counter("write_failures", "Attempts to write that failed"),
    "defects": _counter("defects", "Errors of the collector itself; see its log"),
    "log_bytes": Family("log_bytes", "gauge", "Size of the write-ahead log"),
    "log_segments": Family("log_segments", "gauge", "Segments of the write-ahead log"),
    "log_quarantined_bytes": _counter("log_quarantined_bytes", "Damaged log set aside"),
    "log_torn_bytes": _counter("log_torn_bytes", "Of them appends that a crash cut short"),
    "log_replayed_requests": _counter("log_replayed_requests", "Requests read again at a start"),
}
_ORDER = (*FATES.values(), REJECTED, REFUSED, REFUSING, LAG, *COUNTS.values(), OTHER)


class Counted(Protocol):
    """Counts by name: those who turn requests away."""

    def counts(self) -> Counter[str]:
        """Return what happened so far, by name."""


class Measured(Counted, Protocol):
    """A collector."""

    def rejected_by_reason(self) -> Counter[tuple[str, str]]:
        """Return how many items were rejected, by table and reason."""

    def lag_s(self) -> float:
        """Return the age of the oldest acknowledged item that is not in a file."""

    def refusing(self) -> str:
        """Return why every request is refused now: one of REASONS, or ""."""


@dataclass(frozen=True)
class Reading:
    """What one collector says of itself at one moment."""

    counts: Counter[str]
    rejected: Mapping[tuple[str, str], int]
    lag_s: float
    refusing: str = ""

    @property
    def trouble(self) -> str:
        """Return what is wrong, in a word or two, or ""."""
        return self.refusing or ("behind" if self.lag_s > BEHIND_S else "")


def read(collector: Measured) -> Reading:
    """Ask a collector, for numbers of one moment: rejected items only ever become more."""
    while True:
        rejected, counts = collector.rejected_by_reason(), collector.counts()
        if rejected == collector.rejected_by_reason():
            return Reading(counts, rejected, collector.lag_s(), collector.refusing())


def samples(readings: Mapping[str, Reading], strangers: Counter[str]) -> Iterator[Sample]:
    """Yield the samples of all namespaces, and of what has none: `strangers`."""
    for namespace, reading in readings.items():
        labels = {"namespace": namespace}
        yield LAG, labels, reading.lag_s
        for reason in REASONS:
            yield REFUSING, {**labels, "reason": reason}, int(reading.refusing == reason)
        yield from _of_signals(reading, labels)
        for name, family in COUNTS.items():
            yield family, labels, reading.counts[name]
        yield from _of_requests(reading.counts, labels)
        for name in sorted(reading.counts.keys() - _known(reading.counts)):
            yield OTHER, {**labels, "event": name}, reading.counts[name]
    nowhere = {"namespace": ""}
    yield from _of_requests(strangers, nowhere)
    for name in sorted(strangers.keys() - _known(strangers)):
        yield OTHER, {**nowhere, "event": name}, strangers[name]


def _of_signals(reading: Reading, labels: Labels) -> Iterator[Sample]:
    for signal in SIGNALS:
        of_signal = {**labels, "signal": signal.name}
        for fate, family in FATES.items():
            yield family, of_signal, reading.counts[f"{signal.table}_{fate}"]
        for (table, reason), count in sorted(reading.rejected.items()):
            if table == signal.table:
                yield REJECTED, {**of_signal, "reason": reason}, count


def _of_requests(counts: Counter[str], labels: Labels) -> Iterator[Sample]:
    for name in sorted(counts):
        if name.startswith(_REFUSED):
            yield REFUSED, {**labels, "status": name.removeprefix(_REFUSED)}, counts[name]


def _known(counts: Iterable[str]) -> set[str]:
    fates = {f"{signal.table}_{fate}" for signal in SIGNALS for fate in (*FATES, "rejected")}
    return fates | COUNTS.keys() | {name for name in counts if name.startswith(_REFUSED)}


def exposition(found: Iterable[Sample], *, openmetrics: bool) -> str:
    """Return samples in Prometheus' text format, or in OpenMetrics 1.0."""
    by_family: dict[Family, list[str]] = {}
    for family, labels, value in found:
        name = PREFIX + family.name + ("_total" if family.kind == "counter" else "")
        pairs = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels.items())
        by_family.setdefault(family, []).append(f"{name}{{{pairs}}} {value}")
    lines: list[str] = []
    for family in _ORDER:
        if family in by_family:
            lines += [*_head(family, openmetrics), *by_family[family]]
    return "\n".join([*lines, "# EOF\n" if openmetrics else ""])


def _head(family: Family, openmetrics: bool) -> list[str]:
    name = PREFIX + family.name
    if openmetrics:
        unit = [f"# UNIT {name} {family.unit}"] if family.unit else []
        return [f"# TYPE {name} {family.kind}", *unit, f"# HELP {name} {family.meaning}."]
    name += "_total" if family.kind == "counter" else ""
    return [f"# HELP {name} {family.meaning}.", f"# TYPE {name} {family.kind}"]


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def health(readings: Mapping[str, Reading]) -> dict[str, object]:
    """Return the status, "ok" or the first of REASONS or "behind" that holds anywhere, and for each
    namespace its lag in seconds, with the reason where it is not ok."""
    found = {reading.trouble for reading in readings.values()}
    status = next((reason for reason in (*REASONS, "behind") if reason in found), "ok")
    namespaces: dict[str, dict[str, object]] = {}
    for name, reading in readings.items():
        namespaces[name] = {"lag_s": round(reading.lag_s, 3)}
        if reading.trouble:
            namespaces[name]["reason"] = reading.trouble
    return {"status": status, "namespaces": namespaces}


def metrics_app(collectors: Mapping[str, Measured], strangers: Counted) -> Application:
    """Return the application: GET /metrics and /health (503 while it is not ok)."""

    def page(path: str, accept: str) -> tuple[int, str, str]:
        readings = {name: read(collector) for name, collector in collectors.items()}
        if path == "/metrics":
            is_open = "application/openmetrics-text" in accept
            body = exposition(samples(readings, strangers.counts()), openmetrics=is_open)
            return 200, _OPENMETRICS if is_open else _TEXT, body
        if path == "/health":
            told = health(readings)
            return 200 if told["status"] == "ok" else 503, "application/json", json.dumps(told)
        return 404, "text/plain", "there are /metrics and /health\n"

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        accept = b",".join(v for name, v in scope["headers"] if name == b"accept").decode("latin-1")
        status, content_type, text = page(scope["path"], accept)
        if scope["method"] not in ("GET", "HEAD"):
            status, content_type, text = 405, "text/plain", "this is read by GET\n"
        body = text.encode()
        length = (b"content-length", b"%d" % len(body))
        headers = [(b"content-type", content_type.encode()), length]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return app
