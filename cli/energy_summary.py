"""Energy on one screen: of each counter what a token and a request took, and how sure that is."""

from typing import TYPE_CHECKING

from perfledger.output import print_table, say

if TYPE_CHECKING:
    from perfledger.analyzers.energy import CounterEnergy, Energy, Joules, Part


def print_energy(energy: "Energy") -> None:
    """Print each counter by itself, within 80 columns; undefined numbers are dashes."""
    for counter in energy.counters:
        _print_counter(counter)
        print()
    for reason in energy.not_measurable:
        say(f"energy: {reason}")


def _print_counter(counter: "CounterEnergy") -> None:
    named = " ".join(filter(None, (counter.device, counter.label, counter.counter)))
    say(f"energy: {named}")
    rows = [_row(part) for part in counter.parts.values() if part.time_ns]
    columns = ("part", "time", "energy", "power", "a token", "lies in")
    print_table("", columns, rows)
    if (told := counter.requests) is not None:
        of_token = "" if told.per_output_token is None else f"; {_lies(told.per_output_token)} an"
        say(
            f"{told.requests:,} requests, every step of them counted: {_lies(told.per_request)} a"
            f" request{of_token}{' output token' if of_token else ''}"
        )
    say("; ".join(_notes(counter)))


def _row(part: "Part") -> tuple[str, ...]:
    per_token = part.per_token
    return (
        part.name.replace("_", " "),
        f"{part.time_ns / 1e9:,.2f} s",
        _joules(part.joules.estimate),
        "–" if part.watts is None else f"{part.watts:,.1f} W",
        "–" if per_token is None else _joules(per_token.estimate),
        "–" if per_token is None else _bounds(per_token),
    )


def _notes(counter: "CounterEnergy") -> list[str]:
    """Return what the numbers rest on."""
    every = f"read every {counter.read_every_ns / 1e6:,.0f} ms"
    rises = f"seen to rise every {counter.rises_every_ns / 1e6:,.0f} ms"
    notes = [f"{every}, {rises}"]
    covered, window = counter.covered_ns / 1e9, counter.window_ns / 1e9
    notes.append(f"{covered:,.2f} of {window:,.2f} s covered")
    if counter.steps_counted < counter.steps:
        left_out = counter.steps - counter.steps_counted
        notes.append(f"{left_out:,} of {counter.steps:,} steps left out")
    if counter.breaks:
        notes.append(f"it fell or began anew {counter.breaks} times")
    if counter.refused:
        notes.append(f"{counter.refused} reads were no amount")
    return [*notes, counter.note] if counter.note else notes


def _lies(joules: "Joules") -> str:
    return f"{_joules(joules.estimate)} ({_bounds(joules)})"


def _joules(value: float) -> str:
    return f"{value:,.0f} J" if value >= 1000 else f"{value:.3g} J"


def _bounds(joules: "Joules") -> str:
    return f"{joules.at_least:.3g} to {joules.at_most:.3g} J"
