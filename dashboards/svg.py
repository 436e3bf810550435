"""Small drawings as inline SVG: no script, no font, no request to anywhere.

Colours are custom properties of the page (`--queue`), so that light and dark differ in one place.
"""

from collections.abc import Mapping, Sequence
from html import escape

from perfledger.schema.stages import STAGE_NAMES

WIDTH = 760
ROW = 26
LABEL = 92

# One hue a kind of work: computing is blue and green, waiting is warm, the API's own is grey.
COLOURS: dict[str, str] = {
    "sample": "#0e7490",
    "prefill": "#2563eb",
    "decode": "#16a34a",
    "encode": "#7c3aed",
    "adapter_load": "#a855f7",
    "kv_transfer": "#c026d3",
    "context": "#0891b2",
    "queue": "#ea580c",
    "route": "#94a3b8",
    "template": "#cbd5e1",
    "tokenize": "#64748b",
    "stream": "#eab308",
    "host_gap": "#dc2626",
    "detokenize": "#475569",
    "unattributed": "#d4d4d8",
}


def stacked_bars(rows: Sequence[tuple[str, Mapping[str, float]]], unit: str) -> str:
    """Return one bar a row, split by stage, all on one scale that starts at 0.

    rows: (label, stage -> value in `unit`); a value below 0 or a stage unknown is not drawn.
    """
    longest = max((sum(parts.values()) for _, parts in rows), default=0.0)
    if longest <= 0:
        return "<p>nothing to draw</p>"
    scale = (WIDTH - LABEL - 90) / longest
    shapes = []
    for at, (label, parts) in enumerate(rows):
        y, x = at * ROW, float(LABEL)
        shapes.append(_text(LABEL - 8, y + 17, label, anchor="end"))
        for stage in STAGE_NAMES:
            value = parts.get(stage, 0.0)
            if value <= 0:
                continue
            title = f"{label}, {stage}: {value:,.1f} {unit}"
            shapes.append(_bar(x, y + 4, value * scale, ROW - 8, COLOURS[stage], title))
            x += value * scale
        shapes.append(_text(x + 6, y + 17, f"{sum(parts.values()):,.0f} {unit}"))
    return _svg(shapes, len(rows) * ROW, "time by stage")


def histogram(values: Sequence[float], unit: str, bins: int = 48) -> str:
    """Return counts over equal bins up to the 99th percentile; the last bin holds the rest."""
    if not values:
        return "<p>nothing to draw</p>"
    ordered = sorted(values)
    top = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] or 1.0
    counts = [0] * bins
    for value in ordered:
        counts[min(bins - 1, int(value / top * bins))] += 1
    height, base = 140, 120
    scale = (base - 14) / max(counts)
    step = (WIDTH - 20) / bins
    shapes = [
        _bar(
            10 + at * step,
            base - count * scale,
            step - 1,
            count * scale,
            COLOURS["decode"],
            f"{at * top / bins:,.1f} to {(at + 1) * top / bins:,.1f} {unit}: {count}",
        )
        for at, count in enumerate(counts)
        if count
    ]
    shapes += [
        _text(10, height - 4, "0"),
        _text(WIDTH - 10, height - 4, f"{top:,.1f} {unit} and more", anchor="end"),
    ]
    return _svg(shapes, height, "distribution")


def timeline(rows: Sequence[tuple[str, float, Sequence[tuple[str, float, float]]]]) -> str:
    """Return one line a request: spans (name, start, end) in seconds on a common axis."""
    end_s = max((end for _, _, spans in rows for _, _, end in spans), default=0.0)
    if end_s <= 0:
        return "<p>nothing to draw</p>"
    scale, thick = (WIDTH - 20) / end_s, 9
    shapes = []
    for at, (label, _, spans) in enumerate(rows):
        for name, start, end in spans:
            colour = COLOURS.get(name, COLOURS["unattributed"])
            title = f"{label}, {name}: {(end - start) * 1000:,.1f} ms"
            shapes.append(
                _bar(
                    10 + start * scale, at * thick, (end - start) * scale, thick - 2, colour, title
                )
            )
    height = len(rows) * thick + 18
    shapes += [
        _text(10, height - 4, "0 s"),
        _text(WIDTH - 10, height - 4, f"{end_s:,.1f} s", anchor="end"),
    ]
    return _svg(shapes, height, "requests over time")


def interval_bars(rows: Sequence[tuple[str, float, float, float]]) -> str:
    """Return one line a metric: estimate and interval of a relative change, 0 marked.

    rows: (label, low, estimate, high), as shares (0.1 is +10 %); infinite ends are cut.
    """
    finite = [abs(value) for row in rows for value in row[1:] if abs(value) < 1e3]
    reach = max([0.1, *finite])
    left, span = 260, WIDTH - 270
    centre, scale = left + span / 2, span / (2 * reach)

    def x(value: float) -> float:
        return centre + max(-reach, min(reach, value)) * scale

    shapes = [
        f'<line x1="{centre:.1f}" x2="{centre:.1f}" y1="0" y2="{len(rows) * ROW}" class="axis"/>'
    ]
    for at, (label, low, estimate, high) in enumerate(rows):
        y = at * ROW + ROW / 2
        title = f"{label}: {estimate:+.1%} ({low:+.1%} to {high:+.1%})"
        shapes.append(_text(left - 10, y + 4, label, anchor="end"))
        shapes.append(
            _bar(x(low), y - 2, max(1.0, x(high) - x(low)), 4, COLOURS["tokenize"], title)
        )
        shapes.append(
            f'<circle cx="{x(estimate):.1f}" cy="{y:.1f}" r="5" fill="{COLOURS["prefill"]}">'
            f"<title>{escape(title)}</title></circle>"
        )
    return _svg(shapes, len(rows) * ROW, "change with its interval")


def _svg(shapes: Sequence[str], height: float, label: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'
        f"{''.join(shapes)}</svg>"
    )


def _bar(x: float, y: float, width: float, height: float, colour: str, title: str) -> str:
    return (
        f'<rect x="{x:.2f}" y="{y:.2f}" width="{max(width, 0.3):.2f}" height="{height:.2f}"'
        f' fill="{colour}"><title>{escape(title)}</title></rect>'
    )


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
