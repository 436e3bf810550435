"""Where labels go so that none covers another: plain geometry, in the units of the picture."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

Spot = tuple[float, float]  # x to the right, y downwards
Line = tuple[Spot, Spot]

_GAP = 7.0  # from a mark to its label
_GRID_X, _GRID_Y = 10.0, 5.0


@dataclass(frozen=True)
class Box:
    """A rectangle; `top` is smaller than `bottom`."""

    left: float
    top: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """Its right side."""
        return self.left + self.width

    @property
    def bottom(self) -> float:
        """Its lower side."""
        return self.top + self.height

    def overlaps(self, other: "Box") -> bool:
        """Say whether the two share an area; touching is none."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )

    def holds(self, other: "Box") -> bool:
        """Say whether `other` lies inside."""
        return (
            self.left <= other.left
            and other.right <= self.right
            and self.top <= other.top
            and other.bottom <= self.bottom
        )

    def distance(self, x: float, y: float) -> float:
        """Return how far the point is from the rectangle; 0 inside."""
        return math.hypot(
            max(self.left - x, 0.0, x - self.right), max(self.top - y, 0.0, y - self.bottom)
        )


@dataclass(frozen=True)
class Label:
    """A label that wants to be near a point, and its size."""

    x: float
    y: float
    width: float
    height: float


def place(labels: Sequence[Label], bounds: Box, taken: Sequence[Box]) -> list[Box | None]:
    """Return where each label goes: the nearest free place inside `bounds`, in the given order.

    No result overlaps another one or a box of `taken`. None where no place is free at all.
    """
    full = list(taken)
    placed: list[Box | None] = []
    for label in labels:
        box = first_free(_places(label, bounds), bounds, full)
        placed.append(box)
        if box is not None:
            full.append(box)
    return placed


def along(line: Line, width: float, height: float) -> Iterator[Box]:
    """Yield places that touch a rising or level line from above or below, from its upper end."""
    (x1, y1), (x2, y2) = line
    for part in (0.98, 0.8, 0.6, 0.4, 0.2, 0.1, 0.9, 0.7, 0.5, 0.3):
        x, y = x1 + part * (x2 - x1), y1 + part * (y2 - y1)
        yield Box(x - width - 3, y - height - 3, width, height)
        yield Box(x + 3, y + 3, width, height)
        if y1 == y2:
            yield Box(x - width - 3, y + 3, width, height)


def covered_by(line: Line) -> list[Box]:
    """Return small boxes along a line, for labels to keep off it."""
    (x1, y1), (x2, y2) = line
    count = max(1, math.ceil(math.hypot(x2 - x1, y2 - y1) / 3))
    parts = [at / count for at in range(count + 1)]
    return [Box(x1 + p * (x2 - x1) - 1.5, y1 + p * (y2 - y1) - 1.5, 3, 3) for p in parts]


def first_free(places: Iterable[Box], bounds: Box, full: Sequence[Box]) -> Box | None:
    """Return the first place inside `bounds` that overlaps nothing, if any."""
    return next((box for box in places if _free(box, bounds, full)), None)


def _free(box: Box, bounds: Box, full: Sequence[Box]) -> bool:
    return bounds.holds(box) and not any(box.overlaps(other) for other in full)


def _places(label: Label, bounds: Box) -> Iterator[Box]:
    """Yield the eight places beside the point, then a grid of all others, the nearest first."""
    x, y, width, height = label.x, label.y, label.width, label.height
    for left, top in (
        (x + _GAP, y - height / 2),
        (x - _GAP - width, y - height / 2),
        (x + _GAP, y - height - 2),
        (x + _GAP, y + 2),
        (x - _GAP - width, y - height - 2),
        (x - _GAP - width, y + 2),
        (x - width / 2, y - _GAP - height),
        (x - width / 2, y + _GAP),
    ):
        yield Box(left, top, width, height)
    columns = range(int(max(bounds.width - width, 0) / _GRID_X) + 1)
    rows = range(int(max(bounds.height - height, 0) / _GRID_Y) + 1)
    grid = [
        Box(bounds.left + column * _GRID_X, bounds.top + row * _GRID_Y, width, height)
        for column in columns
        for row in rows
    ]
    yield from sorted(grid, key=lambda box: box.distance(x, y))
