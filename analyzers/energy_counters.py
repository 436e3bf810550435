"""The energy counters that a store has points of, and why there are none."""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple, Self

import polars as pl

from perfledger.analyzers.counter_curve import Curve
from perfledger.analyzers.ledger import Selection
from perfledger.schema.attributes import STEP_NAMES

ENERGY_METRIC = "hw.energy"
SOURCE_PRESENT = "perfledger.device.source.present"
BOOT_ID = "perfledger.clock.boot_id"
NO_COUNTER = (
    "not measurable here: no energy counter in this store (no points of hw.energy; most virtual"
    " machines show none)"
)


@dataclass(frozen=True)
class EnergyCounter:
    """One counter of joules: `name` is its hw.id, `device` its hw.type, `label` its hw.name.

    `note` says where its reads come from a replay.
    """

    name: str
    device: str
    label: str
    host: str
    note: str
    curve: Curve


def read_counters(selection: Selection) -> tuple[list[EnergyCounter], list[str]]:
    """Return the energy counters of the store, and what was left out or is not there, in words.

    A counter of another host than the selected engines' is left out, where both tell theirs.
    """
    points = selection.store.collect("points", _points, since_ns=selection.since_ns)
    energy = points.filter(pl.col("name") == ENERGY_METRIC)
    if energy.is_empty():
        return [], [_why_none(points)]
    boots = _boots(selection)
    counters, reasons = [], []
    for (name, device, label, resource), rows in _series(energy):
        odd = rows.filter(~pl.col("usable"))
        if len(odd):
            told = " ".join(str(one) for one in odd.select("unit", "kind", "temporality").row(0))
            reasons.append(f"{name}: {len(odd)} points are no joules: {told}")
        if boots and resource.boot and resource.boot not in boots:
            host = resource.host or resource.boot
            reasons.append(f"{name}: of another host ({host}) than the selected engines")
            continue
        columns = rows.filter("usable").select("time_ns", "value", pl.col("start_ns").fill_null(0))
        curve = Curve.of(*(column.to_numpy() for column in columns))
        counters.append(EnergyCounter(name, device, label, resource.host, resource.note, curve))
    return sorted(counters, key=lambda one: (one.host, one.device, one.name)), reasons


class _Resource(NamedTuple):
    """Which machine the points are of, by their resource attributes; `note` is of a replay."""

    host: str
    boot: str
    note: str

    @classmethod
    def of(cls, text: str) -> Self:
        told = json.loads(text) if text else {}
        told = told if isinstance(told, dict) else {}
        replay = told.get("perfledger.device.replay")
        note = f"replayed: {replay}" if replay else ""
        host, boot = (str(told.get(key, "")) for key in ("host.name", BOOT_ID))
        return cls(host, boot, note)


def _points(points: pl.LazyFrame) -> pl.LazyFrame:
    """Return the points of energy counters, and those that say which sources there are not."""
    usable = (
        pl.col("unit").fill_null("J").is_in(["J", "j"])
        & (pl.col("kind") == "sum")
        & (pl.col("temporality").fill_null("cumulative") == "cumulative")
    )
    absent = (pl.col("name") == SOURCE_PRESENT) & (pl.col("value") == 0)
    return (
        points.filter((pl.col("name") == ENERGY_METRIC) | absent)
        .select(
            *("name", "time_ns", "start_ns", "unit", "kind", "temporality"),
            pl.col("value").fill_null(float("nan")),
            resource=pl.col("resource_attributes").fill_null(""),
            counter=_attribute("hw.id").fill_null("unnamed"),
            device=_attribute("hw.type").fill_null("unknown"),
            label=_attribute("hw.name").fill_null(""),
            source=_attribute("perfledger.device.source"),
            why_not=_attribute("error.type"),
            usable=usable,
        )
        .sort("time_ns")
    )


def _attribute(key: str) -> pl.Expr:
    named = pl.element().struct.field("key") == key
    values = pl.element().struct.field("text").filter(named)
    return pl.col("attributes").list.eval(values).list.first()


def _series(
    energy: pl.DataFrame,
) -> Iterator[tuple[tuple[str, str, str, _Resource], pl.DataFrame]]:
    """Yield the points of each counter. A sampler that was started again goes on with it."""
    texts = energy["resource"].unique().to_list()
    resources = sorted({_Resource.of(text) for text in texts})
    numbers = {text: resources.index(_Resource.of(text)) for text in texts}
    energy = energy.with_columns(pl.col("resource").replace_strict(numbers, return_dtype=pl.Int64))
    keys = ["counter", "device", "label", "resource"]
    for key, rows in energy.partition_by(keys, as_dict=True, maintain_order=True).items():
        name, device, label, resource = key
        yield (str(name), str(device), str(label), resources[int(resource)]), rows


def _why_none(absent: pl.DataFrame) -> str:
    """Return why there is no counter, in the words of a device sampler where one ran."""
    told = absent.filter(pl.col("source").is_in(["nvml", "rapl", "energy_call"]))
    if told.is_empty():
        return NO_COUNTER
    pairs = told.select("source", pl.col("why_not").fill_null("none")).unique().sort("source")
    reasons = "; ".join(f"{source}: {why}" for source, why in pairs.iter_rows())
    return f"not measurable here: the device sampler found no energy counter ({reasons})"


def _boots(selection: Selection) -> set[str]:
    """Return the boot ids of the hosts that the selected steps ran on."""
    steps = pl.col("name").is_in(list(STEP_NAMES)) & selection.of_resource()
    found = selection.spans().filter(steps).select(pl.col("boot_id").unique()).collect()
    return {boot for boot in found["boot_id"] if boot}
