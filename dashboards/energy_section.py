"""The energy's part of the report: joules by part of the time, with the bounds they lie in."""

from dataclasses import dataclass

from perfledger.analyzers.energy import DEFINITIONS, CounterEnergy, Energy, Joules, Part
from perfledger.dashboards.page_table import UNDEFINED, Table
from perfledger.dashboards.picture import scaled


@dataclass(frozen=True)
class EnergySection:
    """What the template draws: a table, or only the reasons why there is none."""

    table: Table
    notes: list[tuple[str, str]]
    why: tuple[str, ...]
    definitions: list[tuple[str, str]]


def energy_section(energy: Energy) -> EnergySection:
    """Return the section; counters are told apart and never added up."""
    columns = [
        "counter",
        "part",
        "energy",
        "mean power",
        "tokens",
        "per token",
        "per token lies in",
    ]
    rows = [
        _part_row(counter, part) for counter in energy.counters for part in counter.parts.values()
    ]
    return EnergySection(
        Table(columns, rows),
        [(_name(counter), _note(counter)) for counter in energy.counters],
        energy.not_measurable,
        [(name.replace("_", " "), text) for name, text in DEFINITIONS.items()],
    )


def _part_row(counter: CounterEnergy, part: Part) -> list[str]:
    per_token = part.per_token
    return [
        _name(counter),
        part.name.replace("_", " "),
        scaled(part.joules.estimate, "J"),
        UNDEFINED if part.watts is None else f"{part.watts:,.1f} W",
        UNDEFINED if part.tokens is None else f"{part.tokens:,}",
        UNDEFINED if per_token is None else f"{per_token.estimate:.3g} J",
        UNDEFINED if per_token is None else _bounds(per_token),
    ]


def _name(counter: CounterEnergy) -> str:
    return f"{counter.device} {counter.label or counter.counter}"


def _bounds(joules: Joules) -> str:
    return f"{joules.at_least:.3g} to {joules.at_most:.3g} J"


def _note(counter: CounterEnergy) -> str:
    """Return what the numbers rest on, and the requests' own where they are counted whole."""
    texts = [
        f"read every {counter.read_every_ns / 1e6:,.0f} ms, "
        f"rises every {counter.rises_every_ns / 1e6:,.0f} ms",
        f"covers {counter.covered_ns / 1e9:,.1f} of {counter.window_ns / 1e9:,.1f} s "
        f"and {counter.steps_counted:,} of {counter.steps:,} steps",
    ]
    if counter.breaks or counter.refused:
        texts.append(f"fell or began anew {counter.breaks} times, {counter.refused} reads refused")
    if (told := counter.requests) is not None:
        texts.append(
            f"{told.per_request.estimate:.3g} J a request ({_bounds(told.per_request)}), "
            f"over {told.requests:,} requests of which every step is counted"
        )
    return "; ".join([*texts, *([counter.note] if counter.note else [])])
