"""Which points of a roofline have a place in its plot, their numbers and their names."""

from collections.abc import Sequence
from dataclasses import dataclass

from perfledger.analyzers.roofline import ALL, MEMORY, UNDECIDED, Point, Roof, Roofline
from perfledger.dashboards.picture import scaled


@dataclass(frozen=True)
class Mark:
    """A point that has a place in the plot."""

    number: int
    point: Point
    intensity: float
    flops_per_s: float

    @property
    def whole(self) -> bool:
        """Say whether it is a step's own, with a time; else it is where it could be at best."""
        return self.point.flops_per_s is not None

    @property
    def name(self) -> str:
        """The step kind and what of it."""
        return point_name(self.point)

    @property
    def label(self) -> str:
        """The name, and of a whole step how near its roof it is and what binds it."""
        point, best = self.point, self.point.attainable_flops_per_s
        told = [f"{self.flops_per_s / best:.0%} of its roof"] if self.whole and best else []
        told += [f"{point.bound} bound"] if point.bound != UNDECIDED else []
        return f"{self.name}: {', '.join(told)}" if told else self.name

    @property
    def place(self) -> str:
        """Where it is, in words."""
        reached = "reached" if self.whole else "at best"
        speed = scaled(self.flops_per_s, "FLOP/s")
        return f"{self.intensity:.3g} FLOP a byte, {speed} {reached}"


def marks(found: Roofline) -> list[Mark]:
    """Return the points that have a place, numbered from 1, whole steps first.

    Step kinds together (`all`) have none where kinds are told apart: they would be drawn twice.
    """
    apart = any(point.step_kind != ALL for point in found.points)
    placed = [
        (point, point.intensity, value)
        for point in sorted(found.points, key=lambda point: point.operator != ALL)
        if (point.step_kind != ALL) == apart
        and point.intensity
        and (value := point.flops_per_s or point.attainable_flops_per_s)
    ]
    return [Mark(at, *rest) for at, rest in enumerate(placed, start=1)]


def unplaced(found: Roofline) -> list[str]:
    """Return the names of points that have no place, by the reason."""
    shown = {mark.name for mark in marks(found)}
    reasons: dict[str, list[str]] = {}
    for point in found.points:
        name = point_name(point)
        if name in shown or (point.step_kind == ALL and shown):
            continue
        why = "no FLOPs" if not point.flops else "no bytes" if not point.intensity else "no roof"
        reasons.setdefault(why, []).append(name)
    return [f"{why}: {', '.join(names)}" for why, names in reasons.items()]


def point_name(point: Point) -> str:
    """Return the step kind and what of it: `decode step`, `decode linear`."""
    return f"{point.step_kind} {'step' if point.operator == ALL else point.operator}"


def names_together(group: Sequence[Mark]) -> str:
    """Return one name for marks that lie on each other: `norm, sampling (decode, mixed)`."""
    if len(group) == 1:
        return group[0].label
    operators = dict.fromkeys(mark.point.operator for mark in group)
    kinds = dict.fromkeys(mark.point.step_kind for mark in group)
    if len(operators) * len(kinds) == len(group):
        return f"{', '.join(operators)} ({', '.join(kinds)})"
    return ", ".join(mark.name for mark in group)


def roof_name(roof: Roof) -> str:
    """Return a roof's value with its name."""
    return f"{scaled(roof.value, roof_unit(roof))}: {roof.name}"


def roofs_together(group: Sequence[Roof]) -> str:
    """Return one name for roofs that lie on each other."""
    values = [scaled(roof.value, roof_unit(roof)) for roof in sorted(group, key=_value)]
    told = values[0] if values[0] == values[-1] else f"{values[0]} to {values[-1]}"
    return f"{told}: {' / '.join(roof.name for roof in group)}"


def roof_unit(roof: Roof) -> str:
    """Return the unit of a roof's value."""
    return "B/s" if roof.kind == MEMORY else "FLOP/s"


def _value(roof: Roof) -> float:
    return roof.value
