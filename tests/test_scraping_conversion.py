"""A page becomes rows of `points` through the collector's own decoding: whole, and only once."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from otlp_messages import METRICS, decode
from prometheus_client import CollectorRegistry, Counter, Enum, Gauge, Histogram, Info, Summary
from prometheus_client.exposition import generate_latest as text_page
from prometheus_client.openmetrics.exposition import generate_latest as openmetrics_page
from prometheus_client.parser import text_string_to_metric_families as text_format
from scraping_pages import (
    PAGES,
    STARTED_NS,
    expected_points,
    is_own,
    labels_of,
    points,
    rows_of,
    telemetry,
    value_of,
)

from perfledger.collectors.scraping.target_telemetry import TargetTelemetry

CREATED_NS = 1_796_000_000_250_000_000
NOW_NS = CREATED_NS + 60_000_000_000
LATER_NS = NOW_NS + 15_000_000_000


def scraped(page: str | bytes, time_ns: int = NOW_NS, **limits: int) -> bytes:
    body = page.encode() if isinstance(page, str) else page
    is_openmetrics = body.endswith(b"# EOF\n")
    return telemetry(**limits).scraped(body, is_openmetrics, time_ns, 0.5)


def again(told: TargetTelemetry, page: str, time_ns: int) -> bytes:
    return told.scraped(page.encode(), False, time_ns, 0.5)


def brief(row: dict[str, object]) -> dict[str, object]:
    """Return what a row says that not all rows of these tests say."""
    shared = {
        "service_name": "llm",
        "service_instance_id": "engine:8000",
        "run_id": None,
        "received_ns": 7,
        "min": None,
        "max": None,
    }
    assert {name: row[name] for name in shared} == shared
    resource = json.loads(str(row["resource_attributes"]))
    assert resource == {
        "zone": "a",
        "server.address": "engine",
        "server.port": 8000,
        "url.scheme": "http",
        "url.full": "http://engine:8000/metrics",
    }
    told = {k: v for k, v in row.items() if k not in shared and v is not None}
    del told["resource_attributes"]
    return {**told, "attributes": dict(labels_of(row))}


OWN_ROWS = [
    {"name": "up", "kind": "gauge", "value": 1.0, "time_ns": NOW_NS, "attributes": {}},
    {
        "name": "scrape_duration_seconds",
        "unit": "s",
        "kind": "gauge",
        "value": 0.5,
        "time_ns": NOW_NS,
        "attributes": {},
    },
    {
        "name": "scrape_samples_scraped",
        "kind": "gauge",
        "value": 20.0,
        "time_ns": NOW_NS,
        "attributes": {},
    },
    {
        "name": "perfledger.scrape.resets",
        "kind": "sum",
        "temporality": "cumulative",
        "monotonic": True,
        "value": 0.0,
        "time_ns": NOW_NS,
        "start_ns": STARTED_NS,
        "attributes": {},
    },
]
COUNTED = {"time_ns": NOW_NS, "start_ns": CREATED_NS}
COUNTER = {
    "name": "tokens_total",
    "kind": "sum",
    "temporality": "cumulative",
    "monotonic": True,
    **COUNTED,
}
CELSIUS = {"name": "temperature_celsius", "unit": "Cel", "kind": "gauge", "time_ns": NOW_NS}
STATE = {"kind": "sum", "temporality": "cumulative", "monotonic": False, "time_ns": NOW_NS}
REGISTRY_ROWS = [
    {**COUNTER, "value": 1168.0, "attributes": {"kind": "input", "model": "smol"}},
    {
        **COUNTER,
        "value": 0.5,
        "attributes": {"kind": "output", "model": 'a "quoted" \\ one\nline'},
    },
    {"name": "queue_depth", "kind": "gauge", "value": "NaN", "time_ns": NOW_NS, "attributes": {}},
    {**CELSIUS, "value": -0.0015, "attributes": {"device": "0"}},
    {**CELSIUS, "value": math.inf, "attributes": {"device": "1"}},
    {
        "name": "ttft_seconds",
        "unit": "s",
        "kind": "histogram",
        "temporality": "cumulative",
        "value": 3.15,
        "count": 3,
        "bounds": [0.001, 0.1, 2.5],
        "bucket_counts": [0, 2, 0, 1],
        "attributes": {"model": "smol"},
        **COUNTED,
    },
    {
        "name": "answer_bytes",
        "kind": "summary",
        "value": 12.5,
        "count": 2,
        "attributes": {},
        **COUNTED,
    },
    {
        "name": "build_info",
        "value": 1.0,
        "attributes": {"commit": "abc", "version": "0.32.0"},
        **STATE,
    },
    {"name": "engine", "value": 0.0, "attributes": {"engine": "awake"}, **STATE},
    {"name": "engine", "value": 1.0, "attributes": {"engine": "asleep"}, **STATE},
]


def in_text_format(row: dict[str, object]) -> dict[str, object]:
    """The older format has no units, and no types for what is no number."""
    told = {k: v for k, v in row.items() if k != "unit" or row["name"] == OWN_ROWS[1]["name"]}
    if row["name"] in ("build_info", "engine"):
        del told["temporality"], told["monotonic"]
        told["kind"] = "gauge"
    return told


@pytest.mark.parametrize("is_openmetrics", [False, True])
def test_every_row_of_a_page_that_a_real_registry_wrote(is_openmetrics: bool) -> None:
    page = PAGES / ("registry.openmetrics.txt" if is_openmetrics else "registry.txt")
    rows = [brief(row) for row in rows_of(scraped(page.read_bytes()))]
    for row in rows:
        if row["value"] != row["value"]:
            row["value"] = "NaN"
    expected = REGISTRY_ROWS + OWN_ROWS
    assert rows == (expected if is_openmetrics else [in_text_format(row) for row in expected])


def test_help_type_unit_and_exemplars_are_in_the_message() -> None:
    body = scraped((PAGES / "registry.openmetrics.txt").read_bytes())
    request = ExportMetricsServiceRequest.FromString(body)
    (scoped,) = request.resource_metrics[0].scope_metrics
    assert scoped.scope.name == "perfledger.scrape"
    by_name = {metric.name: metric for metric in scoped.metrics}
    tokens, ttft = by_name["tokens_total"], by_name["ttft_seconds"]
    assert (tokens.description, ttft.unit) == ("Tokens, \\ and\nmore", "s")
    assert [(m.key, m.value.string_value) for m in ttft.metadata] == [
        ("prometheus.type", "histogram")
    ]
    (exemplar,) = tokens.sum.data_points[0].exemplars
    assert exemplar.trace_id.hex() == "0af7651916cd43dd8448eb211c80319c"
    assert exemplar.span_id.hex() == "b7ad6b7169203331"
    assert (exemplar.as_double, exemplar.time_unix_nano) == (1168.0, CREATED_NS)
    assert [(a.key, a.value.string_value) for a in exemplar.filtered_attributes] == [
        ("class", "short")
    ]
    (exemplar,) = ttft.histogram.data_points[0].exemplars
    assert (exemplar.as_double, exemplar.span_id) == (0.05, b"")
    assert decode(METRICS, body, 7).tally.exemplars_dropped == 2


def test_real_captures_become_the_points_that_prometheus_client_finds(shared_data: Path) -> None:
    captures = sorted((shared_data / "engines").glob("*/*.txt"))
    assert captures
    for capture in captures:
        page = capture.read_text()
        found = points(scraped(page))
        assert found == unrenamed(expected_points(text_format(page), NOW_NS), page), capture.name


def unrenamed(expected: dict, page: str) -> dict:
    """prometheus_client adds `_total` to counters that have it not on the page."""
    return {
        (name if name in page else name.removesuffix("_total"), labels): point
        for (name, labels), point in expected.items()
    }


def test_every_row_of_llama_server(shared_data: Path) -> None:
    page = (shared_data / "engines" / "llama_server" / "metrics_during.txt").read_bytes()
    rows = [brief(row) for row in rows_of(scraped(page)) if not is_own(row)]
    counter = {"kind": "sum", "temporality": "cumulative", "monotonic": True, "start_ns": NOW_NS}
    counters = {
        "prompt_tokens_total": 1168.0,
        "prompt_tokens_cached_total": 965.0,
        "prompt_seconds_total": 2.57876,
        "tokens_predicted_total": 201.0,
        "tokens_predicted_seconds_total": 1.28329,
        "n_decode_total": 204.0,
        "n_tokens_max": 564.0,
        "spec_decode_num_draft_tokens_total": 0.0,
        "spec_decode_num_accepted_tokens_total": 0.0,
        "spec_decode_num_drafts_total": 0.0,
    }
    gauges = {
        "prompt_tokens_seconds": 452.931,
        "predicted_tokens_seconds": 148.836,
        "requests_processing": 4.0,
        "requests_deferred": 6.0,
        "n_busy_slots_per_decode": 1.13235,
    }
    said = {"time_ns": NOW_NS, "attributes": {}}
    assert rows == [
        {"name": f"llamacpp:{name}", "value": value, **kind, **said}
        for kind, values in ((counter, counters), ({"kind": "gauge"}, gauges))
        for name, value in values.items()
    ]


def test_a_restart_of_vllm_moves_every_start_and_is_counted(shared_data: Path) -> None:
    folder = shared_data / "engines" / "vllm_0.32"
    told = telemetry()
    before = points(again(told, (folder / "after.txt").read_text(), NOW_NS))
    request = again(told, (folder / "restarted.txt").read_text(), LATER_NS)
    after = {k: p for k, p in points(request).items() if k in before and not is_mark(p)}
    counted = {key for key in after if before[key]["start_ns"]}
    lower = {
        key
        for key in counted
        if (before[key]["count"] or before[key]["value"])
        > (after[key]["count"] or after[key]["value"] or 0)
    }
    created = {key for key in counted if key[0].startswith(("vllm:", "http_"))}
    assert len(lower) > 30 and lower - created  # also counters without a creation time
    for key in counted:
        start_ns = after[key]["start_ns"]
        if key in created:
            assert before[key]["start_ns"] < start_ns <= LATER_NS, key
        else:
            assert start_ns == NOW_NS, key
    resets = [row for row in rows_of(request) if row["name"] == "perfledger.scrape.resets"]
    assert [row["value"] for row in resets] == [len(lower | created)]
    assert told.counts()["scrape_resets"] == len(lower | created)


def is_mark(point: dict[str, object]) -> bool:
    return point["value"] is None and point["count"] is None


def test_llama_server_restarted_without_creation_times(shared_data: Path) -> None:
    folder = shared_data / "engines" / "llama_server"
    told = telemetry()
    again(told, (folder / "metrics_after.txt").read_text(), NOW_NS)
    found = points(again(told, (folder / "metrics_restarted.txt").read_text(), LATER_NS))
    starts = {name.removeprefix("llamacpp:"): p["start_ns"] for (name, _), p in found.items()}
    never_counted = {name for name, start_ns in starts.items() if name.startswith("spec_decode")}
    assert {starts[name] for name in never_counted} == {NOW_NS}
    assert told.counts()["scrape_resets"] == 7
    third = points(again(told, (folder / "metrics_restarted.txt").read_text(), LATER_NS + 1))
    assert {key: point["start_ns"] for key, point in third.items()} == {
        key: point["start_ns"] for key, point in found.items()
    }


def test_starts_and_resets_of_each_kind_of_count() -> None:
    told = telemetry()
    histogram = '# TYPE h histogram\nh_bucket{le="1"} %d\nh_bucket{le="+Inf"} %d\nh_sum 9\n'
    summary = "# TYPE s summary\ns_count %d\ns_sum 9\n"
    page = "# TYPE c counter\nc %s\n" + histogram + summary

    def starts(*values: object, time_ns: int) -> dict[str, object]:
        found = points(again(told, page % values, time_ns))
        return {name: point["start_ns"] for (name, _), point in found.items()}

    assert starts(5, 2, 4, 7, time_ns=10) == {"c": 10, "h": 10, "s": 10}
    assert starts(5, 2, 5, 7, time_ns=20) == {"c": 10, "h": 10, "s": 10}
    # A bucket that shrinks is a reset even where the total grows.
    assert starts("NaN", 1, 6, 7, time_ns=30) == {"c": 10, "h": 20, "s": 10}
    assert starts(4, 1, 6, 3, time_ns=40) == {"c": 10, "h": 20, "s": 30}
    assert starts(3, 1, 6, 3, time_ns=50) == {"c": 40, "h": 20, "s": 30}
    assert told.counts()["scrape_resets"] == 3


def test_a_later_creation_time_is_a_reset_even_where_the_count_is_higher() -> None:
    told = telemetry()
    page = "# TYPE c_total counter\nc_total %d\n# TYPE c_created gauge\nc_created %s\n"

    def start(value: int, created: str, time_ns: int) -> object:
        ((_, point),) = points(again(told, page % (value, created), time_ns)).items()
        return point["start_ns"]

    second = 1_000_000_000
    assert start(5, "1.5", 10 * second) == 1_500_000_000
    assert start(9, "11.25", 20 * second) == 11_250_000_000
    assert told.counts()["scrape_resets"] == 1
    # A creation time from a clock ahead of ours starts no later than the point itself.
    assert start(1, "31", 30 * second) == 30 * second
    # One that is no time is as good as none.
    assert start(2, "-1", 40 * second) == 31 * second
    assert told.counts()["scrape_resets"] == 2


def test_series_that_end_are_marked_once_and_a_target_down_marks_all() -> None:
    told = telemetry()
    again(told, 'g{a="1"} 1\ng{a="2"} 2\n# TYPE c counter\nc 3\n', 10)
    gone = rows_of(again(told, 'g{a="2"} 2\n# TYPE c counter\nc 3\n', 20))
    marks = [row for row in gone if row["value"] is None]
    assert [(r["name"], dict(labels_of(r)), r["kind"]) for r in marks] == [
        ("g", {"a": "1"}, "gauge")
    ]
    marks = [row for row in rows_of(again(told, "g 1\n", 30)) if row["value"] is None]
    assert [(r["name"], dict(labels_of(r))) for r in marks] == [("g", {"a": "2"}), ("c", {})]
    down = rows_of(told.failed("timeout", 40, 10.0))
    assert value_of(down, "up") == 0.0
    assert value_of(down, "scrape_samples_scraped") == 0.0
    assert value_of(down, "perfledger.scrape.failures", **{"error.type": "timeout"}) == 1.0
    assert [row["name"] for row in down if row["value"] is None] == ["g"]
    still = rows_of(told.failed("timeout", 50, 10.0))
    assert [row["name"] for row in still if row["value"] is None] == []
    assert value_of(still, "perfledger.scrape.failures", **{"error.type": "timeout"}) == 2.0
    back = rows_of(again(told, "h 1\n", 60))
    assert [row["name"] for row in back if row["value"] is None] == []


def test_a_counter_keeps_its_start_while_its_target_is_down() -> None:
    told = telemetry()
    again(told, "# TYPE c counter\nc 3\n", 10)
    told.failed("connection", 20, 0.0)
    ((_, point),) = points(again(told, "# TYPE c counter\nc 4\n", 30)).items()
    assert (point["start_ns"], point["value"]) == (10, 4.0)
    told.failed("connection", 40, 0.0)
    ((_, point),) = points(again(told, "# TYPE c counter\nc 1\n", 50)).items()
    assert (point["start_ns"], point["value"]) == (30, 1.0)


def test_what_is_gone_as_a_target_is_marked_with_its_own_metrics() -> None:
    told = telemetry()
    again(told, "g 1\n", 10)
    rows = rows_of(told.gone(20))
    assert [(row["name"], row["value"]) for row in rows] == [
        ("g", None),
        ("up", None),
        ("scrape_duration_seconds", None),
        ("scrape_samples_scraped", None),
    ]


HISTOGRAM = "# TYPE h histogram\n"
REJECTED = {
    HISTOGRAM + 'h_bucket{le="1"} 2\nh_sum 1\n': "a histogram or summary without its count",
    HISTOGRAM + 'h_bucket{le="1"} 2.5\nh_count 3\n': "a count that is no whole number",
    HISTOGRAM + 'h_bucket{le="1"} -1\nh_count 3\n': "a count that is no whole number",
    HISTOGRAM + 'h_bucket{le="+Inf"} NaN\n': "a count that is no whole number",
    HISTOGRAM + 'h_bucket{le="+Inf"} 1e19\n': "a count that is no whole number",
    HISTOGRAM + 'h_bucket{le="1"} 4\nh_count 3\n': "counts of buckets contradict each other",
    HISTOGRAM + 'h_bucket{le="1"} 1\nh_bucket{le="1.0"} 1\nh_count 3\n': (
        "bounds of buckets contradict each other"
    ),
    HISTOGRAM + 'h_bucket{le="-Inf"} 1\nh_count 3\n': "bounds of buckets contradict each other",
    HISTOGRAM + "h_bucket 1\n": "a bucket or quantile without its edge",
    HISTOGRAM + 'h_bucket{le="NaN"} 1\n': "a bucket or quantile without its edge",
    '# TYPE s summary\ns{quantile="x"} 1\n': "a bucket or quantile without its edge",
    "# TYPE s summary\ns_sum 1\n": "a histogram or summary without its count",
    '# TYPE q gaugehistogram\nq_bucket{le="+Inf"} 1\n': "gauge histogram",
    "up 1\n": "reserved name",
    'g{a="1",b="2"} 1\ng{b="2",a="1"} 2\n': "the same series twice",
    "bad\n": "not a sample",
}


@pytest.mark.parametrize("page", REJECTED)
def test_what_makes_no_point_is_rejected_alone_and_said(page: str) -> None:
    rows = rows_of(scraped(page + "ok 1\n"))
    assert value_of(rows, "ok") == 1.0
    assert value_of(rows, "perfledger.scrape.rejected", reason=REJECTED[page]) == 1.0
    assert value_of(rows, "up") == 1.0
    assert not [row for row in rows if str(row["name"])[0] in "hsq" and not is_own(row)]


def test_histograms_without_all_their_lines() -> None:
    found = points(
        scraped(
            HISTOGRAM + 'h_bucket{a="no inf",le="1"} 2\nh_count{a="no inf"} 3\n'
            'h_bucket{a="no count",le="1"} 2\nh_bucket{a="no count",le="+Inf"} 5\n'
            'h_count{a="no buckets"} 7\nh_sum{a="no buckets"} NaN\n'
            'h_bucket{a="unsorted",le="+Inf"} 5\nh_bucket{a="unsorted",le="-2"} 1\n'
        )
    )
    told = {
        dict(labels)["a"]: (p["count"], p["bounds"], p["bucket_counts"], repr(p["value"]))
        for (_, labels), p in found.items()
    }
    assert told == {
        "no inf": (3, [1.0], [2, 1], "None"),
        "no count": (5, [1.0], [2, 3], "None"),
        "no buckets": (7, [], [], "nan"),
        "unsorted": (5, [-2.0], [1, 4], "None"),
    }


def test_a_sum_that_a_summary_does_not_tell_is_not_zero() -> None:
    found = points(scraped('# TYPE s summary\ns{quantile="0.5"} NaN\ns_count 2\n'))
    assert {key[1]: (p["count"], repr(p["value"])) for key, p in found.items()} == {
        frozenset(): (2, "nan"),
        frozenset({("quantile", 0.5)}): (None, "nan"),
    }


def test_target_info_describes_the_resource_and_overrides_nothing() -> None:
    page = '# TYPE target info\ntarget_info{host="h","service.name"="evil"} 1\ng 1\n# EOF\n'
    for row in rows_of(scraped(page)):
        assert row["service_name"] == "llm"
        assert json.loads(str(row["resource_attributes"]))["host"] == "h"
        assert row["name"] != "target_info"


def test_a_time_on_the_page_is_the_time_of_the_point() -> None:
    ((_, point),) = points(scraped("g 1 1796000000250\n")).items()
    assert point["time_ns"] == CREATED_NS


NAMES = st.from_regex(r"[a-z]{1,3}", fullmatch=True)
VALUES = st.floats(allow_nan=False) | st.sampled_from([0.0, math.inf, -math.inf])
AMOUNTS = st.floats(0, 1e15)
TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)


@st.composite
def registries(draw: st.DrawFn) -> CollectorRegistry:
    registry = CollectorRegistry()
    kinds = (Counter, Gauge, Histogram, Summary, Info, Enum)
    for number, kind in enumerate(draw(st.lists(st.sampled_from(kinds), max_size=6))):
        keys = draw(st.lists(NAMES, max_size=2, unique=True))
        name, more = f"m{number}", {}
        keys = [key for key in keys if key not in ("le", name)]
        if kind is Enum:
            more = {"states": draw(st.lists(NAMES, min_size=1, max_size=3, unique=True))}
        elif kind is Histogram:
            bounds = st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=4, unique=True)
            more = {"buckets": sorted({bound + 0.0 for bound in draw(bounds)})}
        metric = kind(name, draw(TEXTS), keys, registry=registry, **more)
        values = st.tuples(*(TEXTS for _ in keys))
        for labels in draw(st.lists(values, max_size=3)) if keys else [()]:
            observe(draw, kind, metric.labels(*labels) if keys else metric)
    return registry


def observe(draw: st.DrawFn, kind: type, metric: object) -> None:
    if kind is Counter:
        metric.inc(draw(AMOUNTS))  # type: ignore[attr-defined]
    elif kind is Gauge:
        metric.set(draw(VALUES))  # type: ignore[attr-defined]
    elif kind is Info:
        metric.info(draw(st.dictionaries(st.just("version"), TEXTS)))  # type: ignore[attr-defined]
    elif kind in (Histogram, Summary):
        values: Sequence[float] = draw(st.lists(AMOUNTS, max_size=5))
        for value in values:
            metric.observe(value)  # type: ignore[attr-defined]


@settings(max_examples=120, deadline=None)
@given(registries(), st.booleans())
def test_what_a_registry_holds_is_what_the_rows_say(
    registry: CollectorRegistry, is_openmetrics: bool
) -> None:
    page = openmetrics_page(registry) if is_openmetrics else text_page(registry)
    found = points(scraped(page, 2**62))
    expected = expected_points(registry.collect(), 2**62)
    if not is_openmetrics:
        for point in expected.values():
            if point["kind"] == "sum" and point["start_ns"] is None:
                point["kind"] = "gauge"
    assert found == expected


@settings(max_examples=150, deadline=None)
@given(st.data(), st.booleans())
def test_any_page_becomes_a_request_of_which_the_collector_rejects_nothing(
    data: st.DataObject, is_openmetrics: bool
) -> None:
    """Mutations of real pages, one after the other from the same target."""
    told = telemetry(max_labels=2)
    for _ in range(2):
        page = bytearray((PAGES / "registry.openmetrics.txt").read_bytes())
        for _ in range(data.draw(st.integers(0, 8))):
            start = data.draw(st.integers(0, len(page)))
            other = data.draw(st.integers(0, len(page)))
            with_part = bytes(page[other : other + data.draw(st.integers(0, 60))])
            new = data.draw(st.binary(max_size=6)) + with_part
            page[start : start + data.draw(st.integers(0, 40))] = new
        rows = rows_of(told.scraped(bytes(page), is_openmetrics, NOW_NS, 0.5))
        assert value_of(rows, "up") in (0.0, 1.0)
        assert all(row["start_ns"] is None or row["start_ns"] <= row["time_ns"] for row in rows)
