"""The collector's own /metrics and /health, read by the parsers of Prometheus' own client."""

import json
import subprocess
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from conftest import free_port
from debian_packages import program
from otlp_client import post, span, traces, wait_until
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from serving_in_thread import serving

from perfledger.collectors.collecting import CollectLimits
from perfledger.collectors.transport.collector_metrics import (
    BEHIND_S,
    PREFIX,
    Reading,
    exposition,
    health,
    read,
    samples,
)

Start = Callable[..., AbstractContextManager[object]]
OPENMETRICS = {"Accept": "application/openmetrics-text;version=1.0.0,text/plain;q=0.5"}

AWKWARD = 'a "quoted" \\ reason\nof two lines'


@dataclass
class Told:
    """A collector as it will be: it knows its reasons and its lag."""

    names: Counter[str]
    reasons: Counter[tuple[str, str]] = field(default_factory=Counter)
    lag: float = 0.0
    reason: str = ""

    def counts(self) -> Counter[str]:
        return self.names

    def rejected_by_reason(self) -> Counter[tuple[str, str]]:
        return self.reasons

    def lag_s(self) -> float:
        return self.lag

    def refusing(self) -> str:
        return self.reason


PROD = Told(
    Counter(
        spans_received=10,
        spans_accepted=7,
        spans_rejected=3,
        spans_written=5,
        spans_waiting=2,
        logs_received=1,
        values_cut=4,
        requests_refused_503=6,
        requests_derived=9,
        log_bytes=2**30,
    ),
    Counter({("spans", AWKWARD): 2, ("spans", "bad id"): 1}),
    1.5,
)


def value(families: Iterable[Metric], name: str, **labels: str) -> float | None:
    """Return the one sample of a name that has these labels."""
    found = [
        sample.value
        for family in families
        for sample in family.samples
        if sample.name == PREFIX + name and labels.items() <= sample.labels.items()
    ]
    assert len(found) <= 1
    return found[0] if found else None


@pytest.mark.parametrize("openmetrics", [False, True])
def test_every_count_has_a_family_that_parsers_read(openmetrics: bool) -> None:
    readings = {"prod": read(PROD), "staging": read(Told(Counter()))}
    strangers = Counter(requests_refused_401=8)
    text = exposition(samples(readings, strangers), openmetrics=openmetrics)
    families = list((parse_openmetrics if openmetrics else parse_text)(text))
    spans = {"namespace": "prod", "signal": "traces"}
    assert value(families, "items_received_total", **spans) == 10
    assert value(families, "items_accepted_total", **spans) == 7
    assert value(families, "items_written_total", **spans) == 5
    assert value(families, "items_waiting", **spans) == 2
    assert value(families, "items_rejected_total", **spans, reason=AWKWARD) == 2
    assert value(families, "items_rejected_total", **spans, reason="bad id") == 1
    assert value(families, "items_received_total", namespace="prod", signal="logs") == 1
    assert value(families, "values_cut_total", namespace="prod") == 4
    assert value(families, "requests_refused_total", namespace="prod", status="503") == 6
    assert value(families, "requests_refused_total", namespace="", status="401") == 8
    assert value(families, "events_total", namespace="prod", event="requests_derived") == 9
    assert value(families, "lag_seconds", namespace="prod") == 1.5
    assert value(families, "log_bytes", namespace="prod") == 2**30
    # Counters start at 0, so that the first increase is seen.
    staging = {"namespace": "staging", "signal": "metrics"}
    assert value(families, "items_received_total", **staging) == 0
    assert value(families, "lag_seconds", namespace="staging") == 0


def test_names_say_what_they_are() -> None:
    text = exposition(samples({"prod": read(PROD)}, Counter()), openmetrics=True)
    for family in parse_openmetrics(text):
        assert family.name.startswith(PREFIX) and family.documentation.endswith(".")
        assert family.type in ("counter", "gauge")
        assert family.unit == (family.name.rpartition("_")[2] if family.unit else "")
    assert text.endswith("# EOF\n")


def test_no_count_is_left_out_or_told_twice() -> None:
    names = [sample[0].name for sample in samples({"prod": read(PROD)}, Counter())]
    told = Counter(names)
    assert told["items_received"] == told["items_waiting"] == 3
    assert told["items_rejected"] == 2 and told["values_cut"] == 1
    assert told["events"] == 1  # requests_derived; rejected is told by reason


def test_what_belongs_to_no_namespace_is_told_too() -> None:
    others = Counter(requests_refused_401=2, forward_dropped_full=3)
    told = {(family.name, *labels.items()): value for family, labels, value in samples({}, others)}
    assert told == {
        ("requests_refused", ("namespace", ""), ("status", "401")): 2,
        ("events", ("namespace", ""), ("event", "forward_dropped_full")): 3,
    }


def test_health_is_progress() -> None:
    fine, stuck = (Reading(Counter(), {}, lag) for lag in (0.25, BEHIND_S + 1))
    assert health({"a": fine}) == {"status": "ok", "namespaces": {"a": {"lag_s": 0.25}}}
    assert health({"a": fine, "b": stuck}) == {
        "status": "behind",
        "namespaces": {"a": {"lag_s": 0.25}, "b": {"lag_s": BEHIND_S + 1, "reason": "behind"}},
    }
    full = read(Told(Counter(), lag=BEHIND_S + 1, reason="memory full"))
    low = read(Told(Counter(), reason="disk low"))
    assert health({"a": fine, "b": stuck, "c": full})["status"] == "memory full"
    assert health({"a": low, "b": full}) == {
        "status": "disk low",
        "namespaces": {
            "a": {"lag_s": 0.0, "reason": "disk low"},
            "b": {"lag_s": BEHIND_S + 1, "reason": "memory full"},
        },
    }


@pytest.mark.parametrize(
    ("limits", "reason", "said"),
    [
        (CollectLimits(low_water_bytes=2**62), "disk low", "the collector's log's disk is full"),
        (CollectLimits(buffer_bytes=0), "memory full", "the collector's buffer is full"),
    ],
)
def test_health_is_not_ok_while_every_request_is_refused(
    tmp_path: Path, limits: CollectLimits, reason: str, said: str
) -> None:
    with serving(tmp_path, limits) as bound:
        status, _, refusal = post(bound.http.port, traces(span(1)))
        assert status == 503 and said.encode() in refusal
        status, _, content = post(bound.metrics.port, b"", {}, "/health", "GET")
        found = json.loads(content)
        assert (status, found["status"]) == (503, reason)
        assert found["namespaces"]["default"]["reason"] == reason
        text = post(bound.metrics.port, b"", {}, "/metrics", "GET")[2].decode()
    families = list(parse_text(text))
    for one in ("disk low", "memory full"):
        wanted = {"namespace": "default", "reason": one}
        assert value(families, "refusing", **wanted) == (one == reason)


def test_a_running_collector_shows_what_it_did(tmp_path: Path, start_collector: Start) -> None:
    port = free_port()
    with start_collector(tmp_path, "--metrics", f"127.0.0.1:{port}") as collector:
        assert post(collector.http_port, traces(span(1), span(0)))[0] == 200
        assert post(collector.http_port, b"\xff" * 9)[0] == 400
        families: list[Metric] = []

        def all_written() -> bool:
            status, headers, content = post(port, b"", OPENMETRICS, "/metrics", "GET")
            assert status == 200
            assert headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
            families[:] = parse_openmetrics(content.decode())
            return value(families, "items_written_total", signal="traces") == 1

        wait_until(all_written)
        assert value(families, "items_received_total", signal="traces") == 2
        assert value(families, "requests_refused_total", status="400") == 1
        status, headers, content = post(port, b"", {}, "/health", "GET")
    assert (status, headers["content-type"]) == (200, "application/json")
    assert json.loads(content)["status"] == "ok"


def test_other_paths_and_methods_are_refused(tmp_path: Path) -> None:
    with serving(tmp_path) as bound:
        port = bound.metrics.port
        assert post(port, b"", {}, "/", "GET")[0] == 404
        assert post(port, b"x", {}, "/metrics", "POST")[0] == 405
        status, headers, content = post(port, b"", {}, "/metrics", "HEAD")
        assert (status, content) == (200, b"") and int(headers["content-length"]) > 100
        text = post(port, b"", {}, "/metrics", "GET")[2].decode()
    assert len(list(parse_text(text))) > 10


def test_promtool_finds_nothing_to_say() -> None:
    text = exposition(samples({"prod": read(PROD)}, Counter()), openmetrics=False)
    done = subprocess.run(
        [program("promtool"), "check", "metrics"], input=text, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
