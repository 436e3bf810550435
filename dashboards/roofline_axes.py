"""The scales of a roofline plot: both logarithmic, in whole decades, and the roofs' lines in it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from perfledger.analyzers.roofline import COMPUTE, MEMORY, Roof
from perfledger.dashboards.label_placing import Box, Line
from perfledger.dashboards.picture import prefixed, words
from perfledger.dashboards.roofline_marks import Mark


@dataclass(frozen=True)
class Axes:
    """The plot's rectangle, and the decades that it shows."""

    box: Box
    x_low: float
    x_high: float
    y_low: float
    y_high: float

    def x(self, intensity: float) -> float:
        """Return where an intensity (FLOP a byte) is."""
        share = math.log(intensity / self.x_low) / math.log(self.x_high / self.x_low)
        return self.box.left + share * self.box.width

    def y(self, flops_per_s: float) -> float:
        """Return where a rate (FLOP/s) is."""
        share = math.log(flops_per_s / self.y_low) / math.log(self.y_high / self.y_low)
        return self.box.bottom - share * self.box.height


def axes_of(roofs: Sequence[Roof], drawn: Sequence[Mark], box: Box) -> Axes:
    """Choose whole decades that hold every point and every ridge."""
    memory = [roof.value for roof in roofs if roof.kind == MEMORY]
    compute = [roof.value for roof in roofs if roof.kind == COMPUTE]
    xs = [mark.intensity for mark in drawn]
    ys = [mark.flops_per_s for mark in drawn] + compute
    ys += [mark.point.attainable_flops_per_s or mark.flops_per_s for mark in drawn]
    xs += [rate / bandwidth for rate in compute for bandwidth in memory]
    return Axes(box, *_decades(xs or [1.0]), *_decades(ys or [1e9]))


def _decades(values: Sequence[float]) -> tuple[float, float]:
    low = math.floor(math.log10(min(values) / 1.5))
    high = math.ceil(math.log10(max(values) * 1.5))
    return 10.0**low, 10.0**high


def grid(axes: Axes) -> list[str]:
    """Return a line a decade, with its value where values have room."""
    box = axes.box
    shapes = []
    for told, value in _ticks(axes.x_low, axes.x_high, box.width / 44):
        x = axes.x(value)
        shapes.append(_grid_line(x, box.top, x, box.bottom))
        if told:
            at, anchor = (x, "middle") if x < box.right - 1 else (x + 10, "end")
            shapes.append(words(at, box.bottom + 16, _short(value), "quiet", anchor))
    for told, value in _ticks(axes.y_low, axes.y_high, box.height / 24):
        y = axes.y(value)
        shapes.append(_grid_line(box.left, y, box.right, y))
        if told:
            shapes.append(words(box.left - 6, y + 4, _short(value), "quiet", "end"))
    return shapes


def _short(value: float) -> str:
    number, prefix = prefixed(value)
    return f"{number:g} {prefix}".rstrip()


def _ticks(low: float, high: float, most: float) -> list[tuple[bool, float]]:
    """Return the decades, and of each whether it is one of the `most` that get a number."""
    first, last = round(math.log10(low)), round(math.log10(high))
    every = math.ceil((last - first + 1) / max(most, 1))
    return [((at - first) % every == 0, 10.0**at) for at in range(first, last + 1)]


def roof_line(roof: Roof, roofs: Sequence[Roof], axes: Axes) -> Line:
    """Return a roof's line, cut where roofs of the other kind are highest.

    Measured ones are cut by measured ones, so that a datasheet never hides a measurement. A roof
    that is beyond the plot has a line of no length.
    """
    peers = [other for other in roofs if other.kind != roof.kind]
    same = [other for other in peers if other.provenance == roof.provenance] or peers
    other = max((peer.value for peer in same), default=0.0)
    if roof.kind == COMPUTE:
        start = roof.value / other if other else axes.x_low
        start = min(max(start, axes.x_low), axes.x_high)
        return (axes.x(start), axes.y(roof.value)), (axes.box.right, axes.y(roof.value))
    low = max(axes.x_low, axes.y_low / roof.value)
    high = min(axes.x_high, axes.y_high / roof.value)
    high = max(low, min(high, other / roof.value if other else high))
    start_y, end_y = axes.y(low * roof.value), axes.y(high * roof.value)
    return (axes.x(low), start_y), (axes.x(high), end_y)


def _grid_line(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line class="grid" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'
