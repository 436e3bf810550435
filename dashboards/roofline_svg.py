"""The roofline plot: FLOP/s over FLOPs a byte, both logarithmic, under the roofs of this host.

A whole step has a time, so its mark is where it was (filled), with a line up to where its roofs
would let it be. An operator class has none: its mark is where it could be at best (hollow).
"""

from collections.abc import Sequence
from string import ascii_uppercase

from perfledger.analyzers.roofline import Roof, Roofline
from perfledger.dashboards.label_placing import Box, Line, Spot
from perfledger.dashboards.picture import (
    LINE,
    WIDE,
    Picture,
    for_page_and_phone,
    text_width,
    titled,
    words,
    wrap,
)
from perfledger.dashboards.roofline_axes import axes_of, grid, roof_line
from perfledger.dashboards.roofline_labels import Named, NamedLine, alike, labels, together
from perfledger.dashboards.roofline_marks import (
    Mark,
    marks,
    names_together,
    roof_name,
    roofs_together,
)

# Okabe and Ito's colours, told apart by the colour-blind too; the labels say it again.
_COLOURS = {
    "linear": "#0072b2",
    "attention": "#d55e00",
    "moe": "#cc79a7",
    "norm": "#009e73",
    "elementwise": "#e69f00",
    "embedding": "#56b4e9",
    "sampling": "#8a8a8a",
}
_OTHER = "#8a8a8a"
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 24, 40
_MARK = 5.5
_KEY = (
    ("circle", "decode"),
    ("square", "prefill"),
    ("triangle", "mixed"),
    ("filled", "reached"),
    ("hollow", "at best"),
    ("solid", "measured roof"),
    ("dashed", "datasheet roof"),
)


def roofline(found: Roofline) -> str:
    """Return the plot for a page whose style holds `picture.STYLE`, at both widths."""
    return for_page_and_phone(lambda width: draw(found, width))


def draw(found: Roofline, width: int) -> Picture:
    """Return the plot `width` units wide; labels are names where there is room, else numbers."""
    drawn, wide = marks(found), width >= WIDE
    height = 420.0 if wide else 300.0
    box = Box(_LEFT, _TOP, width - _LEFT - _RIGHT, height - _TOP - _BOTTOM)
    axes = axes_of(found.roofs, drawn, box)
    spots = [(axes.x(mark.intensity), axes.y(mark.flops_per_s)) for mark in drawn]
    lines = [roof_line(roof, found.roofs, axes) for roof in found.roofs]
    shapes = [*grid(axes), words(0, 12, "FLOP/s", "quiet")]
    middle = box.left + box.width / 2
    shapes.append(words(middle, height - 4, "FLOP a byte moved", "quiet", "middle"))
    shapes += [_roof(roof, line) for roof, line in zip(found.roofs, lines, strict=True)]
    for mark, (x, y) in zip(drawn, spots, strict=True):
        best = mark.point.attainable_flops_per_s
        if mark.whole and best:
            shapes.append(_line("leader", ((x, y), (x, axes.y(best)))))
    shapes += [_mark(mark, spot) for mark, spot in zip(drawn, spots, strict=True)]
    named = _named_marks(drawn, spots, wide)
    shapes += labels(_named_roofs(found.roofs, lines, wide), named, spots, box)
    key, y = ([], height + 6) if wide else _explained(found.roofs, drawn, width, height + 14)
    signs, y = _key(width, y)
    title = "Roofline: FLOP/s over FLOPs a byte"
    return Picture("roofline", width, y, title, describe(found), [*shapes, *key, *signs])


def describe(found: Roofline) -> str:
    """Return the plot in sentences, for those who hear it."""
    roofs = "; ".join(f"{one.provenance} {one.kind} roof {roof_name(one)}" for one in found.roofs)
    points = "; ".join(f"{mark.label}, {mark.place}" for mark in marks(found))
    return f"Roofs: {roofs or 'none'}. Points: {points or 'none'}."


def _named_marks(drawn: Sequence[Mark], spots: Sequence[Spot], wide: bool) -> list[Named]:
    """Name whole steps one by one, and operator classes that lie on each other together."""
    named = []
    for whole in (True, False):
        some = [at for at, mark in enumerate(drawn) if mark.whole == whole]
        for places in together([spots[at] for at in some]):
            group = [drawn[some[at]] for at in places]
            spot = spots[some[places[0]]]
            if not wide:
                named.append(Named(",".join(str(mark.number) for mark in group), spot))
            elif whole:
                named += [Named(mark.label, spot) for mark in group]
            else:
                named.append(Named(names_together(group), spot))
    return named


def _named_roofs(roofs: Sequence[Roof], lines: Sequence[Line], wide: bool) -> list[NamedLine]:
    named = []
    for places in alike(lines):
        text = roofs_together([roofs[at] for at in places])
        if not wide:
            text = ",".join(_letter(at) for at in places)
        named.append(NamedLine(text, lines[places[0]]))
    return named


def _letter(at: int) -> str:
    return ascii_uppercase[at % len(ascii_uppercase)]


def _explained(
    roofs: Sequence[Roof], drawn: Sequence[Mark], width: int, y: float
) -> tuple[list[str], float]:
    """Return what the letters and numbers of the narrow plot stand for, and where it ends."""
    told = [f"{_letter(at)}  {roof_name(roof)}" for at, roof in enumerate(roofs)]
    told += [f"{mark.number}  {mark.label}" for mark in drawn]
    lines = [line for text in told for line in wrap(text, width - 8, 3)]
    shapes = [words(4, y + at * LINE, line) for at, line in enumerate(lines)]
    return shapes, y + len(lines) * LINE


def _roof(roof: Roof, line: Line) -> str:
    dashes = "" if roof.provenance == "measured" else ' stroke-dasharray="7 5"'
    return titled(_line("way", line, dashes), f"{roof_name(roof)}, {roof.provenance}")


def _mark(mark: Mark, spot: Spot) -> str:
    """Return the point's mark: its shape is the step kind, its colour the operator class."""
    style = 'class="tip"'
    if not mark.whole:
        colour = _COLOURS.get(mark.point.operator, _OTHER)
        style = f'fill="var(--card)" stroke="{colour}" stroke-width="2.5"'
    title = f"{mark.name}: {mark.place}; bound: {mark.point.bound}. {mark.point.why}"
    return titled(_shape(mark.point.step_kind, *spot, style), title)


def _shape(step_kind: str, x: float, y: float, style: str) -> str:
    size = _MARK
    if step_kind == "decode":
        return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{size}" {style}/>'
    if step_kind == "prefill":
        side = 2 * size - 1
        left, top = x - side / 2, y - side / 2
        return f'<rect x="{left:.1f}" y="{top:.1f}" width="{side}" height="{side}" {style}/>'
    edge, start = size + 1, f"M{x:.1f} {y - size - 1:.1f}"
    if step_kind == "mixed":
        return f'<path d="{start}l{edge} {2 * size}h{-2 * edge}z" {style}/>'
    return f'<path d="{start}l{edge} {edge}l{-edge} {edge}l{-edge} {-edge}z" {style}/>'


def _key(width: int, y: float) -> tuple[list[str], float]:
    """Say what shapes and dashes mean, in as many rows as the width needs; and where it ends."""
    shapes, x = [], 4.0
    for sign, text in _KEY:
        needed = 34 + text_width(text)
        if x + needed > width:
            x, y = 4.0, y + LINE + 4
        shapes.append(_sign(sign, x + 8, y + 6))
        shapes.append(words(x + 22, y + 10, text, "quiet"))
        x += needed
    return shapes, y + LINE + 4


def _sign(sign: str, x: float, y: float) -> str:
    if sign in ("solid", "dashed"):
        dashes = ' stroke-dasharray="5 3"' if sign == "dashed" else ""
        return _line("way", ((x - 9, y), (x + 9, y)), dashes)
    kind = {"square": "prefill", "triangle": "mixed"}.get(sign, "decode")
    style = 'class="tip"' if sign == "filled" else 'fill="none" stroke="var(--ink)"'
    return _shape(kind, x, y, style)


def _line(style: str, line: Line, more: str = "") -> str:
    (x1, y1), (x2, y2) = line
    ends = f'x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"'
    return f'<line class="{style}" {ends}{more}/>'
