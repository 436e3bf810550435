"""Pages are parsed as prometheus_client parses them, and hostile ones cost only themselves."""

import re
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families as text_format
from scraping_pages import PAGES

from perfledger.collectors.scraping.config import ScrapeLimits
from perfledger.collectors.scraping.exposition import (
    BadLine,
    Exposition,
    UnusableScrape,
    parse,
    parse_exemplar,
)

TEXT_PAGE = (PAGES / "registry.txt").read_bytes()
OPENMETRICS_PAGE = (PAGES / "registry.openmetrics.txt").read_bytes()
LIMITS = ScrapeLimits()


def parsed(body: bytes, is_openmetrics: bool = False, **limits: int) -> Exposition:
    return parse(body, ScrapeLimits(**limits), openmetrics=is_openmetrics, known={})


def samples_of(page: Exposition) -> Counter[object]:
    return Counter(
        (sample.series.name, sample.series.labels, repr(sample.value))
        for family in page.families
        for samples in family.samples.values()
        for sample in samples
    )


def oracle_samples(page: str, is_openmetrics: bool) -> Counter[object]:
    """As prometheus_client says it, but counters keep the name they have on the page."""
    renamed = set(re.findall(r"^# TYPE (\S+) counter$", page, re.MULTILINE))
    families = openmetrics(page) if is_openmetrics else text_format(page)
    found: Counter[object] = Counter()
    for sample in (sample for family in families for sample in family.samples):
        bare = sample.name.removesuffix("_total")
        is_renamed = not is_openmetrics and bare in renamed
        labels = tuple(sorted(sample.labels.items()))
        found[(bare if is_renamed else sample.name, labels, repr(float(sample.value)))] += 1
    return found


@pytest.mark.parametrize("is_openmetrics", [False, True])
def test_a_page_of_a_real_registry_is_parsed_as_its_own_library_does(is_openmetrics: bool) -> None:
    body = OPENMETRICS_PAGE if is_openmetrics else TEXT_PAGE
    page = parsed(body, is_openmetrics)
    assert samples_of(page) == oracle_samples(body.decode(), is_openmetrics)
    assert not page.rejected
    (tokens,) = [f.header for f in page.families if f.header.name.startswith("tokens")]
    assert (tokens.type, tokens.help) == ("counter", "Tokens, \\ and\nmore")


def test_real_captures_are_parsed_as_prometheus_client_does(shared_data: Path) -> None:
    captures = sorted((shared_data / "engines").glob("*/*.txt"))
    assert captures
    for capture in captures:
        page = parsed(capture.read_bytes())
        assert not page.rejected
        assert samples_of(page) == oracle_samples(capture.read_text(), False), capture.name


def test_what_was_parsed_of_a_series_serves_the_next_page() -> None:
    first = parsed(TEXT_PAGE)
    second = parse(TEXT_PAGE, LIMITS, openmetrics=False, known=first.series)
    assert second.families == first.families or samples_of(second) == samples_of(first)
    assert all(second.series[text] is series for text, series in first.series.items())


SPELLINGS = {
    "a 1": ("a", (), 1.0),
    "\t a\t 1 \r": ("a", (), 1.0),
    "a{} 1": ("a", (), 1.0),
    'a{b="c"}1': ("a", (("b", "c"),), 1.0),
    'a { x = "1" , b = "c" , } +Inf': ("a", (("b", "c"), ("x", "1")), float("inf")),
    'a{b="}, # \\"x\\" {"} -1e-3': ("a", (("b", '}, # "x" {'),), -0.001),
    'a{b=""} 0': ("a", (("b", ""),), 0.0),
    '{"an.other name",b="c"} 2': ("an.other name", (("b", "c"),), 2.0),
    'a{"b.c"="d"} 2': ("a", (("b.c", "d"),), 2.0),
    "ns:a_b 0x": None,
    "ns:a 1_000": None,
    "a": None,
    "1a 1": None,
    "a 1 2 3": None,
    "a 1 -5": None,
    "a 1 1e300": None,
    'a{b="c} 1': None,
    "a{b=c} 1": None,
    'a{b="c",b="d"} 1': None,
    'a{b="c",,x="d"} 1': None,
    'a{"b"} 1': None,
    'a{""="b"} 1': None,
    "{} 1": None,
    "<html>": None,
    "a \u0661": None,
}


@pytest.mark.parametrize("line", SPELLINGS)
def test_a_line_is_taken_or_rejected_alone(line: str) -> None:
    page = parsed(f"# TYPE ok gauge\nok 1\n{line}\nok2 2\n".encode())
    found = samples_of(page) - Counter({("ok", (), "1.0"): 1, ("ok2", (), "2.0"): 1})
    spelled = SPELLINGS[line]
    if spelled is None:
        assert (found, page.rejected.total()) == (Counter(), 1)
    else:
        name, labels, value = spelled
        assert (found, page.rejected.total()) == (Counter({(name, labels, repr(value)): 1}), 0)


def test_times_are_milliseconds_in_text_and_seconds_in_openmetrics() -> None:
    (text,) = parsed(b"a 1 1796000000250\n").families
    assert text.samples[""][0].time_ns == 1_796_000_000_250_000_000
    (later,) = parsed(b"a 1 1796000000.123456789\n# EOF\n", True).families
    assert later.samples[""][0].time_ns == 1_796_000_000_123_456_789


def test_bad_metadata_is_rejected_and_the_samples_stay() -> None:
    page = parsed(
        b"# TYPE a weird\n# TYPE b counter\n# TYPE b gauge\n# HELP 9 x\n# a comment\n#\n"
        b"# TYPE h histogram\nh 3\na 1\nb 2\n"
    )
    assert page.rejected == {
        "unknown type": 1,
        "contradicting metadata": 1,
        "not metadata": 1,
        "not of its family's type": 1,
    }
    assert [(f.header.name, f.header.type) for f in page.families] == [
        ("a", "unknown"),
        ("b", "counter"),
    ]


def test_a_line_that_is_not_utf8_is_rejected_alone() -> None:
    page = parsed(b'a{b="\xff"} 1\nc 2\n')
    assert (samples_of(page), page.rejected) == ({("c", (), "2.0"): 1}, {"not UTF-8": 1})


def test_labels_beyond_a_limit_lose_their_series() -> None:
    body = b'a{b="c",d="e"} 1\na{b="123456"} 1\na{abcdef="1"} 1\na{b="\xc3\xa4\xc3\xa4"} 1\nc 2\n'
    page = parsed(body, max_labels=1, max_label_name_bytes=5, max_label_value_bytes=3)
    assert samples_of(page) == {("c", (), "2.0"): 1}
    assert page.rejected == {"too many labels": 1, "label too long": 3}


@pytest.mark.parametrize(
    ("body", "is_openmetrics", "reason"),
    [
        (b"a 1\nb 2\nc 3\n", False, "too_many_series"),
        (b"a 1\n" * 3, False, "too_many_series"),
        (b"?\n" * 111, False, "too_many_lines"),
        (b"a 1\n", True, "truncated"),
        (b"<html>\n<p>hello\n", False, "not_metrics"),
        (b"\xff\xfe\n", False, "not_metrics"),
    ],
)
def test_a_page_that_cannot_be_used_says_why(
    body: bytes, is_openmetrics: bool, reason: str
) -> None:
    with pytest.raises(UnusableScrape) as caught:
        parsed(body, is_openmetrics, max_series=2)
    assert caught.value.reason == reason


def test_nothing_counts_after_the_end_of_an_openmetrics_page() -> None:
    page = parsed(b"a 1\n# EOF\nb 2\n", True)
    assert (samples_of(page), page.rejected) == ({("a", (), "1.0"): 1}, {"after the end": 1})


def test_long_hostile_lines_take_time_in_proportion_to_their_length() -> None:
    size = 1_000_000  # with anything quadratic this test would not end
    lines = [
        'a{b="' + '\\"' * size,
        'a{b="' + "\\" * size + '"} 1',
        "a{" + "b" * size,
        "a{" + ",=" * size + "} 1",
        "a" * size,
        "a" + " " * size + "1" + " " * size + "x",
        "# HELP a" + " " * size + "\0",
        "a " + "1" * size,
        'a{b="' + "c" * size + '"} 1',
    ]
    exemplar = "ok 1 # {" + '"' * size
    page = parsed("\n".join([*lines, exemplar]).encode())
    # Help may be as long as it likes, and an exemplar is parsed later.
    assert (samples_of(page), page.rejected.total()) == ({("ok", (), "1.0"): 1}, len(lines) - 1)
    with pytest.raises(BadLine):
        parse_exemplar(exemplar[len("ok 1 # ") :], LIMITS)


def test_exemplars_have_labels_a_value_and_perhaps_a_time() -> None:
    assert parse_exemplar('{b="2",a="}"} 0.5 1.5', LIMITS) == (
        (("a", "}"), ("b", "2")),
        0.5,
        1_500_000_000,
    )
    assert parse_exemplar("{} -1", LIMITS) == ((), -1.0, None)
    for text in ("{a} 1", "{} x", '{a="b"}', '{a="b"} 1 2 3'):
        with pytest.raises(BadLine):
            parse_exemplar(text, LIMITS)


@settings(max_examples=300, deadline=None)
@given(st.data(), st.booleans())
def test_any_bytes_are_parsed_or_refused_as_a_whole(data: st.DataObject, is_om: bool) -> None:
    """Mutations of real pages, and bytes that were never one."""
    page = bytearray(data.draw(st.sampled_from([TEXT_PAGE, OPENMETRICS_PAGE])))
    for _ in range(data.draw(st.integers(0, 6))):
        start = data.draw(st.integers(0, len(page)))
        end = start + data.draw(st.integers(0, 40))
        page[start:end] = data.draw(st.binary(max_size=8) | st.sampled_from([b"\n", b'"', b"{"]))
    body = bytes(page) if data.draw(st.booleans()) else data.draw(st.binary(max_size=200))
    try:
        found = parsed(body, is_om)
    except UnusableScrape:
        return
    assert samples_of(found).total() <= found.samples <= body.count(b"\n") + 1
