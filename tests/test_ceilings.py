"""Ceilings as nouns: kept and read again, chosen for a host and refused for another."""

import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfledger.schema.ceilings import (
    DATASHEET,
    Absent,
    AttentionShape,
    Ceiling,
    Ceilings,
    MatmulShape,
    choose,
    host_differences,
    same_host,
    size_text,
    text_size,
)
from perfledger.schema.curves import between, surface
from perfledger.schema.errors import NotComparableError, PartialInputError, UsageError
from perfledger.schema.host_facts import device_facts, host_facts
from perfledger.schema.manifest import Manifest, Value
from perfledger.schema.store import Store
from perfledger.schema.tables import RUNS

HERE: dict[str, Value] = {
    "host.cpu_model": "some CPU",
    "host.cores": 2,
    "host.affinity": "0-1",
    "host.load": "0.1",
    "device.names": [],
    "runtime.threads": 2,
    "runtime.device": "cpu",
}
ITEMS = (
    Ceiling.best("device_memory", "read", "4MiB", "bytes/s", [40e9, 50e9, 30e9]),
    Ceiling.best("device_memory", "read", "256MiB", "bytes/s", [9e9, 12e9, 10e9]),
    Ceiling.best("device_memory", "latency", "256MiB", "ns", [110.0, 90.5, 100.0], "a chase"),
    Ceiling.best("scale_up", "all_reduce busbw", "ranks=2 size=1MiB", "bytes/s", [2e9]),
    Ceiling.best("scale_up", "all_reduce busbw", "ranks=2 size=4KiB", "bytes/s", [1e9]),
    Ceiling.best("host", "launch", "operator", "ns", [2100.0, 1900.0]),
)
ABSENT = (Absent("host_device", "h2d", "the engine computes on the CPU here"),)


def ceilings(run_id: str = "c1", created_ns: int = 1, **changed: Value) -> Ceilings:
    values = {**HERE, **{name.replace("__", "."): value for name, value in changed.items()}}
    return Ceilings(run_id, Manifest.of(values), created_ns, ITEMS, ABSENT)


def rows(*kept: Ceilings) -> list[dict[str, Any]]:
    return [one.to_row() for one in kept]


def test_what_is_kept_in_a_store_is_read_again(tmp_path: Path) -> None:
    store, kept = Store.at(str(tmp_path)), ceilings()
    store.write("runs", RUNS.from_rows([{**kept.to_row(), "received_ns": 7}]))
    (row,) = store.scan("runs").collect().to_dicts()
    assert Ceilings.from_row(row) == kept
    assert (row["kind"], row["manifest_hash"], row["verdict"]) == (
        "ceilings",
        kept.host.hash(),
        None,
    )
    assert (kept.threads, kept.device) == (2, "cpu")


@pytest.mark.parametrize(
    "samples",
    [
        "",
        "[]",
        "[" * 100_000,
        '{"version":2,"items":[],"absent":[]}',
        '{"version":1,"items":[],"absent":[{"edge":"network"}]}',
        '{"version":1,"absent":[],"items":[{"edge":"moon","operation":"read","variant":"1B",'
        '"unit":"bytes/s","value":1.0,"samples":[1.0],"note":""}]}',
        '{"version":1,"absent":[],"items":[{"edge":"network","operation":"read","variant":"1B",'
        '"unit":"bytes/s","value":0,"samples":[0],"note":""}]}',
        " " * 5_000_000,
    ],
)
def test_a_row_that_holds_no_ceilings_is_partial_input(samples: str) -> None:
    with pytest.raises(PartialInputError, match="c1"):
        Ceilings.from_row({**ceilings().to_row(), "samples": samples})


def test_a_row_with_the_manifest_of_something_else_is_partial_input() -> None:
    with pytest.raises(PartialInputError, match="manifest"):
        Ceilings.from_row({**ceilings().to_row(), "manifest": "{}"})


def test_the_best_sample_is_the_ceiling_and_the_median_is_typical() -> None:
    rate, chase = ITEMS[1], ITEMS[2]
    assert (rate.value, rate.typical) == (12e9, 10e9)
    assert (chase.value, chase.typical) == (90.5, 100.0)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf])
def test_a_ceiling_is_a_positive_number(value: float) -> None:
    with pytest.raises(ValueError, match="positive"):
        Ceiling.best("network", "read", "1MiB", "bytes/s", [value])


@pytest.mark.parametrize(("edge", "unit"), [("the moon", "bytes/s"), ("network", "GB/s")])
def test_edges_and_units_are_the_declared_ones(edge: str, unit: str) -> None:
    with pytest.raises(ValueError, match="no (edge|unit)"):
        Ceiling.best(edge, "read", "1MiB", unit, [1.0])


def test_an_edge_is_held_against_its_largest_working_set_or_its_best_rate() -> None:
    found = ceilings()
    assert found.ceiling("device_memory") == ITEMS[1]
    assert found.ceiling("scale_up") == ITEMS[3]
    assert found.ceiling("storage_local") is None
    assert found.ceiling("host_device") is None
    assert found.reason("host_device") == ABSENT[0].reason
    assert found.reason("storage_local") is None


def test_bandwidth_follows_the_working_set_between_the_measured_sizes() -> None:
    found, mib = ceilings(), 1 << 20
    assert found.bandwidth("read", 4 * mib) == 50e9
    assert found.bandwidth("read", 1) == 50e9
    assert found.bandwidth("read", 1 << 40) == 12e9
    middle = found.bandwidth("read", 32 * mib)  # the geometric mean of both sizes
    assert middle == pytest.approx(math.sqrt(50e9 * 12e9))
    assert found.bandwidth("read", 32 * mib, typical=True) == pytest.approx(math.sqrt(400e18))
    assert found.bandwidth("copy", mib) is None


def test_the_newest_ceilings_of_the_same_host_are_chosen() -> None:
    kept = rows(ceilings("old", 1), ceilings("new", 3, host__load="9"), ceilings("mid", 2))
    chosen = choose(kept, HERE)
    assert chosen is not None and chosen.run_id == "new"
    by_id = choose(kept, HERE, "old")
    assert by_id is not None and by_id.run_id == "old"


def test_ceilings_of_another_host_are_refused_and_the_facts_named() -> None:
    kept = rows(ceilings("there", 1, host__cores=64, host__governor="powersave"))
    with pytest.raises(NotComparableError) as refused:
        choose(kept, HERE)
    assert refused.value.exit_code == 5
    assert "host.cores: 64 -> 2" in str(refused.value)
    assert "host.governor: powersave -> unknown" in str(refused.value)
    assert "--ceilings datasheet" in str(refused.value)
    with pytest.raises(NotComparableError):
        choose(kept, HERE, "there")
    assert choose(kept, HERE, DATASHEET) is None


def test_ceilings_of_here_win_over_newer_ones_of_elsewhere() -> None:
    kept = rows(ceilings("here", 1), ceilings("there", 2, host__cores=64))
    chosen = choose(kept, HERE)
    assert chosen is not None and chosen.run_id == "here"
    unknown = choose(kept, None)
    assert unknown is not None and unknown.run_id == "there"


def test_no_ceilings_are_none_and_an_unknown_id_is_a_usage_error() -> None:
    assert choose([], HERE) is None
    assert choose(rows(ceilings()), HERE, DATASHEET) is None
    with pytest.raises(UsageError, match="no ceilings 'c9'"):
        choose(rows(ceilings()), HERE, "c9")


def test_this_host_is_itself_whatever_its_load_is() -> None:
    here = {**host_facts(), **device_facts()}
    assert same_host(here, {**here, "host.load": "99", "runtime.threads": 1})
    (difference,) = host_differences(here, {**here, "host.cores": 4096})
    assert (difference.field, difference.b) == ("host.cores", 4096)


@given(st.integers(1, 1 << 50))
def test_sizes_are_read_as_they_are_written(size: int) -> None:
    assert text_size(size_text(size)) == size


@pytest.mark.parametrize(
    ("size", "text"), [(1 << 22, "4MiB"), (3 << 30, "3GiB"), (1500, "1500B"), (1 << 18, "256KiB")]
)
def test_sizes_are_written_in_the_largest_unit_that_divides_them(size: int, text: str) -> None:
    assert size_text(size) == text


@given(
    st.sampled_from(["float32", "bfloat16", "int8"]),
    st.tuples(*[st.integers(1, 1 << 20)] * 5),
)
def test_shapes_are_read_as_they_are_written(dtype: str, sizes: tuple[int, ...]) -> None:
    product = MatmulShape(dtype, *sizes[:4])
    assert MatmulShape.parse(str(product)) == product
    assert product.flops == 2 * product.m * product.k * product.n
    attention = AttentionShape(dtype, *sizes)
    assert AttentionShape.parse(str(attention)) == attention


@pytest.mark.parametrize("text", ["float32", "float32 m=1 k=2 n=3", "f m=1 k=2 n=3 set=big", "x y"])
def test_other_texts_are_no_shapes(text: str) -> None:
    for kind in (MatmulShape, AttentionShape):
        with pytest.raises(ValueError):
            kind.parse(text)  # type: ignore[attr-defined]


points = st.dictionaries(st.integers(1, 1 << 40), st.floats(1e-3, 1e15), min_size=1, max_size=8)


@given(points, st.floats(1, 1e13))
def test_between_points_is_between_their_values(known: dict[int, float], at: float) -> None:
    slack = 1e-9
    value = between(known, at)
    assert min(known.values()) * (1 - slack) <= value <= max(known.values()) * (1 + slack)
    for size, exact in known.items():
        assert between(known, size) == pytest.approx(exact)


@given(points, points, st.integers(1, 1 << 40), st.integers(1, 1 << 40))
def test_a_surface_at_a_measured_line_is_the_curve_along_it(
    low: dict[int, float], high: dict[int, float], row: int, at: int
) -> None:
    lines = {row: low, row + 1: high}
    known = {(line, size): v for line, curve in lines.items() for size, v in curve.items()}
    assert surface(known, (row, at)) == pytest.approx(between(low, at))
    assert surface(known, (row + 1, at)) == pytest.approx(between(high, at))


def test_nothing_is_made_of_no_points() -> None:
    with pytest.raises(ValueError, match="no points"):
        between({}, 1)
    with pytest.raises(ValueError, match="no points"):
        surface({}, (1, 2))
