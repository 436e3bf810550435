"""Which measured ceilings a selection is held against, and what share of one a flow reached."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import polars as pl

from perfledger.analyzers.ledger import Selection
from perfledger.schema.ceilings import DATASHEET, KIND, MEASURED, Ceilings, choose, host_differences
from perfledger.schema.clocks import read_boot_id
from perfledger.schema.errors import PartialInputError, UsageError
from perfledger.schema.hardware_peaks import Peak, peak_of
from perfledger.schema.host_facts import device_facts, host_facts
from perfledger.schema.manifest import Manifest, Value

_OF_RUNS = ("run_id", "kind", "created_ns", "manifest")  # the samples may be large
_LARGEST_MANIFESTS = 1_000  # runs whose manifests are looked at for the host


@dataclass(frozen=True)
class ChosenCeilings:
    """The ceilings of a selection's host. `measured` is null where there are none, or datasheets
    were asked for; `peak` is null for a device that no datasheet here knows. `is_certain_host` is
    false where nobody said on which machine the selection ran. `topology` has the fields topology.*
    of that machine's newest manifest that tells them."""

    measured: Ceilings | None
    peak: Peak | None
    is_certain_host: bool
    note: str
    topology: Mapping[str, Value] = field(default_factory=dict)


def choose_ceilings(
    selection: Selection, hosts: list[str], asked: str = MEASURED, devices: Sequence[str] = ()
) -> ChosenCeilings:
    """Return the ceilings for a selection that ran on `hosts` (boot ids) with `devices` (names).

    `asked` is measured, datasheet, or the run id of one measurement. Raises NotComparableError
    where all that there are were measured on another machine, UsageError for an unknown id.
    """
    stored = selection.store.scan("runs").filter(pl.col("kind") == KIND).collect().to_dicts()
    runs = selection.store.scan("runs").sort("created_ns").select(_OF_RUNS).collect()
    rows = sorted(filter(_is_readable, stored), key=lambda row: row["created_ns"])
    host = _host_of(selection, runs.filter(pl.col("kind") != KIND), rows, hosts)
    chosen = choose(rows, host, asked)
    told = (host or (chosen.host.values if chosen else {})).get("device.names")
    names = told if isinstance(told, list) and told else list(devices)
    peak = peak_of(names[0]) if len(set(names)) == 1 else None
    return ChosenCeilings(
        chosen,
        peak,
        host is not None,
        "; ".join(
            filter(None, [_note(chosen, host, asked, peak), _damage(len(stored) - len(rows))])
        ),
        _topology(runs.tail(_LARGEST_MANIFESTS), hosts),
    )


def _host_of(
    selection: Selection, runs: pl.DataFrame, ceilings: list[dict[str, object]], hosts: list[str]
) -> dict[str, Value] | None:
    """Return the facts of the machine that the selection ran on, or None where nobody told them.

    Ceilings measured since the same boot are of the same machine, whatever else a manifest says.
    """
    told = [_values(row["manifest"]) for row in reversed(ceilings)]
    same_boot = [values for values in told if values.get("host.boot_id") in hosts]
    if same_boot:
        return same_boot[0]
    ours = runs.filter(pl.col("run_id") == selection.run) if selection.run else runs
    recorded = [_values(text) for text in ours["manifest"].drop_nulls().tail(_LARGEST_MANIFESTS)]
    for values in reversed(recorded):
        if values.get("host.boot_id") in hosts or (selection.run and _tells_host(values)):
            return values
    if hosts == [read_boot_id()]:
        return {**host_facts(), **device_facts()}
    return None


def _is_readable(row: Mapping[str, object]) -> bool:
    try:
        Ceilings.from_row(row)
    except PartialInputError:
        return False
    return True


def _damage(rows: int) -> str:
    return f"{rows} rows of ceilings cannot be read, or are of another version" if rows else ""


def _topology(runs: pl.DataFrame, hosts: list[str]) -> dict[str, Value]:
    for text in reversed(runs["manifest"].to_list()):
        values = _values(text)
        told = {name: value for name, value in values.items() if name.startswith("topology.")}
        if values.get("host.boot_id") in hosts and any(v is not None for v in told.values()):
            return told
    return {}


def _values(manifest: object) -> dict[str, Value]:
    """Return a stored manifest's values; of one of another version, or none, nothing."""
    try:
        return dict(Manifest.from_json(str(manifest)).values)
    except UsageError:
        return {}


def _tells_host(values: dict[str, Value]) -> bool:
    return values.get("host.cpu_model") is not None


def _note(
    chosen: Ceilings | None, host: dict[str, Value] | None, asked: str, peak: Peak | None
) -> str:
    if chosen is not None:
        if host is None:
            return "nobody said which host the selection ran on: these are the newest ceilings"
        changed = ", ".join(d.field for d in host_differences(chosen.host.values, host))
        return f"measured on the same host, but {changed} changed since" if changed else ""
    sheet = f"datasheet of {peak.name}: {peak.source}" if peak else ""
    if asked == DATASHEET:
        return sheet or "no datasheet for this device: no peak is invented"
    missing = "no ceilings measured here: run `perfledger ceilings` on this host"
    return f"{missing}; {sheet}" if sheet else missing
