"""What commands print fits in 80 columns and says where a number is undefined."""

import argparse
import io
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfledger.output import ms, percent, print_json, print_table, rate
from perfledger.schema.errors import UsageError
from perfledger.selection import TimeRange, add_selection, join_relative_times, time_range

NOW_NS = 1_800_000_000 * 1_000_000_000


def test_a_table_is_aligned() -> None:
    out = io.StringIO()
    print_table(
        "stages", ["stage", "p50", "n"], [["queue", "1.0 ms", 3], ["decode", None, 1200]], out
    )
    assert out.getvalue() == (
        "stages\n"
        "stage      p50      n\n"
        "──────  ──────  ─────\n"
        "queue   1.0 ms      3\n"
        "decode       –  1,200\n"
    )


@given(
    st.lists(st.text(st.characters(codec="ascii", exclude_categories=["C"]), max_size=120)),
    st.integers(0, 10**9),
)
def test_a_table_never_exceeds_80_columns(names: list[str], number: int) -> None:
    out = io.StringIO()
    print_table("", ["name", "value"], [[name, number] for name in names], out)
    assert max(len(line) for line in out.getvalue().splitlines()) <= 80


def test_undefined_is_a_dash_and_not_zero() -> None:
    assert (ms(None), percent(None), rate(None, "x/s")) == ("–", "–", "–")
    assert (ms(1_234_567.0), percent(0.5), rate(1234.56, "x/s")) == (
        "1.2 ms",
        "50.0 %",
        "1,234.6 x/s",
    )


def test_json_holds_hex_and_no_nan() -> None:
    out = io.StringIO()
    print_json({"id": b"\x00\xff", "nan": float("nan")}, out)
    assert json.loads(out.getvalue()) == {"id": "00ff", "nan": None}


def selected(*flags: str) -> TimeRange:
    parser = argparse.ArgumentParser()
    add_selection(parser)
    return time_range(parser.parse_args(join_relative_times(flags)), NOW_NS)


def test_times_are_relative_or_absolute() -> None:
    assert selected("--from", "-15m") == TimeRange(NOW_NS - 900 * 10**9, None)
    assert selected("--from", "2027-01-15T08:00:00Z", "--to", "2027-01-15T10:00:00.5+01:00") == (
        TimeRange(NOW_NS, NOW_NS + 3600 * 10**9 + 500_000_000)
    )
    assert selected() == TimeRange(None, None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--from", "yesterday"], "not a time"),
        (["--from", "-5x"], "not a time"),
        (["--from", "2027-01-15T08:00:00"], "no time zone"),
        (["--from", "-5m", "--to=-10m"], "--from is not before --to"),
    ],
)
def test_a_bad_time_is_refused(flags: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        selected(*flags)
