"""What the report says of a ledger in words and tables."""

from dataclasses import replace

from drawn_ledgers import busy, crowded, unknown

from perfledger.analyzers.roofline import Roofline
from perfledger.dashboards.ledger_section import (
    edges_table,
    headline,
    ledger_section,
    points_table,
    warnings,
)


def test_the_headline_names_the_edge_nearest_its_ceiling_and_what_that_rests_on() -> None:
    assert headline(busy()) == (
        "The edge nearest its ceiling is device memory: 64% "
        "(likely: derived bytes, measured ceiling)."
    )
    assert headline(unknown()) == (
        "No edge has both a speed and a ceiling, so none can be called the nearest to it: "
        "run `perfledger ceilings`."
    )


def test_losses_and_steps_without_work_are_warned_of() -> None:
    assert warnings(busy()) == (
        "3 spans were dropped on the way",
        "24 of 8,124 steps have no bytes or FLOPs here",
    )
    assert warnings(unknown()) == ()


def test_an_edge_has_its_numbers_or_dashes_and_says_where_they_are_from() -> None:
    rows = {row[0]: list(row[1:]) for row in edges_table(busy()).rows}
    assert rows == {
        "registers and SRAM": ["not observable", *["–"] * 6],
        "device memory, derived": [
            "12.5 GB/s", "64% of 19.5 GB/s", "9.63 MB", "492 GB read", "9.00 GB written", "203 /s",
            "1.23 ms",
        ],
        "host to device, measured": [
            "75.0 MB/s", "–", "57.7 kB", "3.00 GB to device", "0 B to host", "203 /s", "1.23 ms",
        ],
        "scale up, measured": [
            "4.05 GB/s", "4.2% of 450 GB/s", "3.12 MB", "81.0 GB sent", "81.0 GB received",
            "203 /s", "1.23 ms",
        ],
        "network, measured": [
            "309 kB/s", "– of 1.25 GB/s", "237 B", "12.3 MB sent", "1.23 kB received", "203 /s",
            "1.23 ms",
        ],
        "local storage, measured": [
            "18.4 MB/s", "118% of 520 MB/s", "14.1 kB", "0 B read", "734 MB written", "203 /s",
            "1.23 ms",
        ],
        "object storage": ["not observable", *["–"] * 6],
    }  # fmt: skip


def test_a_flow_that_is_told_one_way_only_has_a_dash_for_the_other() -> None:
    ledger = busy()
    edges = [
        replace(edge, flows=tuple(replace(flow, backward_bytes=None) for flow in edge.flows))
        for edge in ledger.edges
    ]
    rows = edges_table(replace(ledger, edges=tuple(edges))).rows
    assert {row[5] for row in rows} == {"–"}


def test_notes_hold_what_the_table_has_no_column_for() -> None:
    notes = dict(ledger_section(busy()).edge_notes)
    assert notes["registers and SRAM"] == (
        "nobody tells of it here: between registers, SRAM and caches"
    )
    assert notes["device memory"] == (
        "of it linear 501 GB; one access takes 96 ns here, measured; NUMA node 0; 2 of 2 cores; "
        "with it: process telemetry-collector (pid 4711), 31% of the time; with it: rank replica "
        "1, rank 0, 99% of the time; with it: service another seen, not measured"
    )
    assert "no device was there when the ceilings were measured" in notes["host to device"]


def test_points_have_the_number_that_the_picture_gives_them() -> None:
    rows = points_table(crowded()).rows
    assert list(rows[0]) == [
        "decode", "all", "1", "memory", "0.48", "5.62 GFLOP/s", "9.36 GFLOP/s", "1.00 GB",
        "480 MFLOP", "8,100",
    ]  # fmt: skip
    numbers = [row[2] for row in rows if row[2] != "–"]
    assert sorted(map(int, numbers)) == list(range(1, len(numbers) + 1))


def test_why_bounds_are_undecided_and_what_is_not_drawn_is_said() -> None:
    section = ledger_section(busy())
    assert [name for name, _ in section.point_notes][-1] == "not drawn"
    assert any(why == "its own time is not observed" for _, why in section.point_notes)


def test_a_roofline_without_points_says_why() -> None:
    section = ledger_section(replace(busy(), roofline=Roofline((), (), "no steps at all")))
    assert (section.roofline_svg, section.roofline_note) == (None, "No plot: no steps at all.")
    assert section.points_table.rows == []


def test_a_plot_without_a_roof_says_so() -> None:
    bare = replace(crowded(), roofs=())
    assert ledger_section(replace(busy(), roofline=bare)).roofline_note == (
        "No roof to draw: measured 2 hours before."
    )
    assert ledger_section(busy()).roofline_note == ""
