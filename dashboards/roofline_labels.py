"""The names in a roofline plot: roofs beside their lines, marks near their points, none covered.

Marks that lie on each other get one name together, and so do roofs.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from perfledger.dashboards.label_placing import (
    Box,
    Label,
    Line,
    Spot,
    along,
    covered_by,
    first_free,
    place,
)
from perfledger.dashboards.picture import LINE, text_width, words, wrap

_MARK = 14.0  # the square that a mark keeps free
_TOGETHER = 9.0  # marks (and _ALIKE: roofs) nearer than this lie on each other
_ALIKE = 5.0
_OF_ROOF = 0.45  # of the plot's width, at most
_FAR = 12.0  # from its label on, a mark gets a line to it


@dataclass(frozen=True)
class Named:
    """Something at a spot, or along a line, and what to write there."""

    name: str
    at: Spot


@dataclass(frozen=True)
class NamedLine:
    """A line and what to write along it."""

    name: str
    line: Line


def labels(
    roofs: Sequence[NamedLine], marks: Sequence[Named], spots: Sequence[Spot], bounds: Box
) -> list[str]:
    """Return the words of a plot with lines to what is far; `spots` are kept free too.

    What finds no place is left out: the table has it as well.
    """
    kept_free = [Box(x - _MARK / 2, y - _MARK / 2, _MARK, _MARK) for x, y in spots]
    lines = [box for roof in roofs if _drawn(roof) for box in covered_by(roof.line)]
    shapes: list[str] = []
    for roof in sorted(filter(_drawn, roofs), key=_length):  # a short line has few places
        text, width = _fitting(roof.name, bounds.width * _OF_ROOF)
        places = list(along(roof.line, width, LINE))
        box = first_free(places, bounds, [*kept_free, *lines])
        box = box or first_free(places, bounds, kept_free)  # across a line rather than not at all
        if box is not None:
            kept_free.append(box)
            shapes.append(_words(box, text, "halo roof"))
    wanted = [(mark, *_fitting(mark.name, bounds.width - 8)) for mark in marks]
    asked = [Label(*mark.at, width, LINE) for mark, _, width in wanted]
    for (_, text, _), label, box in zip(
        wanted, asked, place(asked, bounds, [*kept_free, *lines]), strict=True
    ):
        if box is not None:
            shapes.append(_words(box, text, "halo"))
            if box.distance(label.x, label.y) > _FAR:
                shapes.insert(0, _leader(label, box))
    return shapes


def together(spots: Sequence[Spot]) -> list[list[int]]:
    """Return the indices of spots in groups that lie on each other's first one."""
    groups: list[list[int]] = []
    for at, spot in enumerate(spots):
        near = (group for group in groups if math.dist(spots[group[0]], spot) < _TOGETHER)
        group = next(near, None)
        if group is None:
            groups.append([at])
        else:
            group.append(at)
    return groups


def alike(lines: Sequence[Line]) -> list[list[int]]:
    """Return the indices of lines in groups that the eye does not tell apart."""
    groups: list[list[int]] = []
    for at, line in enumerate(lines):
        near = (group for group in groups if _gap(lines[group[0]], line) < _ALIKE)
        group = next(near, None)
        if group is None:
            groups.append([at])
        else:
            group.append(at)
    return groups


def _gap(one: Line, other: Line) -> float:
    """Return the larger distance between the ends of two lines."""
    return max(math.dist(one[0], other[0]), math.dist(one[1], other[1]))


def _drawn(roof: NamedLine) -> bool:
    return roof.line[0] != roof.line[1]


def _length(roof: NamedLine) -> float:
    return math.dist(*roof.line)


def _fitting(text: str, most: float) -> tuple[str, float]:
    fitting = wrap(text, most, 1)[0]
    return fitting, text_width(fitting) + 4


def _words(box: Box, text: str, style: str) -> str:
    return words(box.left + 2, box.top + 12, text, style)


def _leader(label: Label, box: Box) -> str:
    x = min(max(label.x, box.left), box.right)
    y = min(max(label.y, box.top), box.bottom)
    return f'<line class="leader" x1="{label.x:.1f}" y1="{label.y:.1f}" x2="{x:.1f}" y2="{y:.1f}"/>'
