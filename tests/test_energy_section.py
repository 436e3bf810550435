"""What the report says of energy in words and a table."""

import numpy as np
from drawn_ledgers import busy

from perfledger.analyzers.energy import CounterEnergy, Energy, Joules, Part, RequestEnergy
from perfledger.analyzers.latency import distribution
from perfledger.dashboards.energy_section import energy_section
from perfledger.dashboards.report import render_ledger

DECODE = Part(
    "decode",
    Joules(1_234.0, 1_200.0, 1_300.0),
    9_000_000_000,
    137.1,
    5_000,
    Joules(0.2468, 0.24, 0.26),
)
IDLE = Part("idle", Joules(50.0, 40.0, 60.0), 1_000_000_000, None)
COUNTER = CounterEnergy(
    counter="GPU-0f",
    device="gpu",
    label="NVIDIA H200",
    host="host-a",
    note="synthetic reads",
    reads=101,
    read_every_ns=100_000_000,
    rises_every_ns=200_000_000,
    breaks=1,
    refused=0,
    window_ns=10_000_000_000,
    covered_ns=9_900_000_000,
    steps=1_000,
    steps_counted=990,
    parts={"decode": DECODE, "idle": IDLE},
    total=Joules(1_284.0, 1_240.0, 1_360.0),
    requests=RequestEnergy(
        42, 4_900, Joules(30.0, 29.0, 31.0), None, 2.0, 28.0, distribution(np.full(42, 30.0))
    ),
)


def test_each_part_has_its_energy_with_the_bounds_it_lies_in_and_dashes_where_undefined() -> None:
    section = energy_section(Energy((COUNTER,), ()))
    assert [list(row) for row in section.table.rows] == [
        ["gpu NVIDIA H200", "decode", "1.23 kJ", "137.1 W", "5,000", "0.247 J", "0.24 to 0.26 J"],
        ["gpu NVIDIA H200", "idle", "50.0 J", "–", "–", "–", "–"],
    ]
    assert section.notes == [
        (
            "gpu NVIDIA H200",
            "read every 100 ms, rises every 200 ms; covers 9.9 of 10.0 s and 990 of 1,000 steps; "
            "fell or began anew 1 times, 0 reads refused; 30 J a request (29 to 31 J), over 42 "
            "requests of which every step is counted; synthetic reads",
        )
    ]


def test_where_no_counter_exists_the_page_says_so_and_shows_no_table_of_zeros() -> None:
    why = "not measurable here: no counter of energy was read"
    page = render_ledger(busy(), Energy((), (why,)))
    energy = page.split('<section id="energy">')[1]
    assert why in energy
    assert "<table>" not in energy
