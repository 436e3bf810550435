"""The ledger's pictures as people see and hear them, in a real browser, on a page and a phone."""

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from drawn_ledgers import busy, crowded, unknown
from hypothesis import given
from hypothesis import strategies as st
from pictures_in_browser import Seen, contrast, look

from perfledger.analyzers.edges import EdgeLedger
from perfledger.dashboards import hierarchy_svg, roofline_svg
from perfledger.dashboards.picture import NARROW, STRONG, WIDE, Picture, scaled, text_width, wrap
from perfledger.dashboards.report import render_ledger
from perfledger.dashboards.roofline_marks import marks, unplaced

SVG = "{http://www.w3.org/2000/svg}"
PAGE, PHONE = 1000, 360  # CSS pixels


@pytest.fixture(scope="module", params=[PAGE, PHONE])
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    """The busy ledger's page, at the width of a page and of a phone."""
    return look(render_ledger(busy(), None), request.param, tmp_path_factory.mktemp("seen"))


def test_one_picture_of_each_is_shown_and_the_page_does_not_scroll_sideways(seen: Seen) -> None:
    names = [picture.name for picture in seen.pictures]
    assert names == ["Where bytes moved", "Roofline: FLOP/s over FLOPs a byte"]
    assert not seen.overflows


def test_no_label_covers_another_or_leaves_its_picture(seen: Seen) -> None:
    for picture in seen.pictures:
        assert picture.overlapping() == []
        assert picture.outside() == []


def test_letters_are_large_enough_to_read(seen: Seen) -> None:
    sizes = {words.size * shown.scale for shown in seen.pictures for words in shown.words}
    assert min(sizes) >= 10.5


def test_no_text_is_longer_than_was_planned_for_it(seen: Seen) -> None:
    for picture in seen.pictures:
        for words in picture.words:
            planned = text_width(words.text) * (STRONG if words.strong else 1)
            assert words.length <= planned, words.text


@pytest.mark.parametrize("dark", [False, True])
def test_words_and_bars_stand_out_in_both_themes(dark: bool, tmp_path: Path) -> None:
    colours = look(render_ledger(unknown(), None), PAGE, tmp_path, dark=dark).colours
    for ground in (colours["card"], colours["page"]):
        assert contrast(colours["ink"], ground) >= 7
        assert contrast(colours["soft"], ground) >= 4.5
    assert contrast(colours["bar"], colours["line"]) >= 3
    assert (contrast(colours["card"], "#ffffff") > 10) == dark


def test_a_ledger_that_knows_nothing_says_why_and_draws_no_plot(tmp_path: Path) -> None:
    page = render_ledger(unknown(), None)
    seen = look(page, PHONE, tmp_path)
    assert [picture.name for picture in seen.pictures] == ["Where bytes moved"]
    assert (seen.overflows, seen.pictures[0].overlapping()) == (False, [])
    assert "No plot: no step says its bytes and FLOPs." in page
    assert "nan" not in page and "None" not in page and "Infinity" not in page


def test_the_page_asks_for_nothing(tmp_path: Path) -> None:
    assert not re.search(r"""(?:src|href)\s*=|url\(|<script|@import""", render_ledger(busy(), None))


@pytest.mark.parametrize("width", [WIDE, NARROW])
@pytest.mark.parametrize("ledger", [busy(), unknown()], ids=["busy", "unknown"])
def test_every_edge_is_drawn_and_told(ledger: EdgeLedger, width: int) -> None:
    picture = hierarchy_svg.draw(ledger, width)
    root = parsed(picture)
    drawn = " ".join(words.text or "" for words in root.iter(f"{SVG}text"))
    for edge in ledger.edges:
        name = hierarchy_svg.spoken(edge.edge)
        assert name in drawn
        assert f"{name}: " in picture.description
    assert drawn.count("not observable") >= sum(not edge.flows for edge in ledger.edges)


def test_an_edge_says_speed_bytes_per_token_share_of_ceiling_and_who_shares_it() -> None:
    memory = next(edge for edge in busy().edges if edge.edge == "device_memory")
    assert hierarchy_svg.describe(memory) == (
        "device memory: 12.5 GB/s while active, 9.63 MB per token, 492 GB read, 9.00 GB written, "
        "203 steps/s, 1.23 ms each, derived by model shapes and the batch, 64% of 19.5 GB/s, "
        "measured, sharing it: process telemetry-collector (pid 4711) (31% of the time), "
        "rank replica 1, rank 0 (99% of the time) and 1 more."
    )


def test_the_plot_has_a_mark_for_each_step_kind_and_operator_class_with_flops() -> None:
    drawn = marks(crowded())
    kinds, operators = ("decode", "mixed", "prefill"), ("linear", "attention", "moe", "norm")
    names = [mark.name for mark in drawn]
    assert names[:3] == [f"{kind} step" for kind in kinds]
    assert {f"{kind} {operator}" for kind in kinds for operator in operators} <= set(names)
    assert [mark.number for mark in drawn] == list(range(1, 22))
    assert unplaced(crowded()) == ["no FLOPs: decode embedding, mixed embedding, prefill embedding"]


def test_on_a_phone_marks_have_numbers_which_are_explained_below() -> None:
    picture = roofline_svg.draw(crowded(), NARROW)
    texts = [words.text or "" for words in parsed(picture).iter(f"{SVG}text")]
    for mark in marks(crowded()):
        assert " ".join(texts).count(f"{mark.number} {mark.label}") == 1
        assert f"{mark.label}, " in picture.description
    numbers = [text for text in texts if re.fullmatch(r"[0-9]+(,[0-9]+)*", text)]
    shown = sorted(int(number) for text in numbers for number in text.split(","))
    assert set(shown) >= {mark.number for mark in marks(crowded())}


def test_on_a_page_marks_have_names_and_those_that_lie_on_each_other_one_together() -> None:
    picture = roofline_svg.draw(crowded(), WIDE)
    texts = [words.text or "" for words in parsed(picture).iter(f"{SVG}text")]
    for name in (
        "decode step: 60% of its roof, memory bound",
        "mixed step: 60% of its roof, launch bound",
        "prefill step: 60% of its roof, compute bound",
        "linear, moe (prefill)",
        "norm, sampling (decode, mixed, prefill)",
        "19.5 GB/s: read, 256 MiB working set",
        "198 GFLOP/s: AVX2 FMA at 3.1 GHz, two cores",
    ):
        assert texts.count(name) == 1


def test_measured_roofs_are_solid_and_those_of_datasheets_dashed() -> None:
    root = parsed(roofline_svg.draw(crowded(), WIDE))
    dashed = {
        title: line.get("stroke-dasharray") is not None
        for group in root.iter(f"{SVG}g")
        if (line := group.find(f"{SVG}line")) is not None
        and (title := group.findtext(f"{SVG}title", ""))
    }
    assert dashed == {
        "19.5 GB/s: read, 256 MiB working set, measured": False,
        "98.2 GFLOP/s: matmul float32 m=512 k=1024 n=3072, measured": False,
        "76.8 GB/s: DDR5-4800, two channels, datasheet": True,
        "198 GFLOP/s: AVX2 FMA at 3.1 GHz, two cores, datasheet": True,
    }


@given(st.text(max_size=200), st.floats(60, 600), st.integers(1, 4))
def test_wrapped_lines_fit(text: str, width: float, most: int) -> None:
    lines = wrap(text, width, most)
    assert len(lines) <= most
    assert all(text_width(line) <= width for line in lines)
    if not any("…" in line for line in lines):
        assert " ".join(lines) == " ".join(filter(None, text.split(" ")))


def test_quantities_keep_three_digits_over_all_prefixes() -> None:
    told = [scaled(value, "B") for value in (0, 0.5, 999, 999.6, 1e3, 12_345, 999_600, 3.35e12)]
    assert told == [
        "0 B", "0.50 B", "999 B", "1.00 kB", "1.00 kB", "12.3 kB", "1.00 MB", "3.35 TB",
    ]  # fmt: skip


def parsed(picture: Picture) -> ElementTree.Element:
    """Return the picture as XML, which it must be."""
    text = picture.svg().replace("<svg ", '<svg xmlns="http://www.w3.org/2000/svg" ', 1)
    return ElementTree.fromstring(text)
