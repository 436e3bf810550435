"""What the ledger's pictures share: text that fits, both themes, a frame that can be read aloud.

A picture is drawn twice, for a page and for a phone, and the page's style shows one of the two.
Meaning is never in a colour alone: lines differ in their dashes, marks in their shapes.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

# Widths in user units. A phone shows the narrow one at about its size, so 12 units stay legible.
WIDE, NARROW = 760, 300
LINE = 16  # from one line of text to the next
STRONG = 1.16  # how much wider bold letters are

# Said once in the page, and inside a picture that stands alone.
STYLE = """
.picture { width: 100%; height: auto; display: block; font: 12px system-ui, sans-serif; }
.picture text { font: 12px system-ui, sans-serif; fill: var(--ink); }
.picture .strong { font-weight: 600; } .picture .quiet { fill: var(--soft); }
.picture .roof { font-style: italic; fill: var(--soft); }
.picture .halo { paint-order: stroke; stroke: var(--card); stroke-width: 4px; }
.picture .box { fill: var(--page); stroke: var(--soft); stroke-width: 1; }
.picture .way { fill: none; stroke: var(--ink); stroke-width: 2; }
.picture .grid { stroke: var(--line); }
.picture .leader { stroke: var(--soft); stroke-width: 0.75; }
.picture .tip { fill: var(--ink); }
.picture .track { fill: var(--line); } .picture .fill { fill: var(--bar); }
.narrow { display: none; max-width: 480px; margin: 0 auto; }
@media (max-width: 600px) { .wide { display: none; } .narrow { display: block; } }
"""

# Widths of letters in em, rounded up from DejaVu Sans, the widest of the common sans fonts.
_LETTERS = {
    0.35: "ijlI .,:;'|/\N{MIDDLE DOT}\N{NO-BREAK SPACE}",
    0.42: "frt()[]!-",
    0.61: "ckszvxy",
    0.64: "abdeghnopquLF0123456789",
    0.71: "ABCEJKPRSTUXYZ",
    0.79: "DGHNOQ",
}
_WIDTH = {letter: width for width, letters in _LETTERS.items() for letter in letters}
_OTHER = 1.0


@dataclass(frozen=True)
class Picture:
    """One drawing: its size in user units, what it is and says in words, its shapes."""

    name: str  # of its ids; one word
    width: int
    height: float
    title: str
    description: str
    shapes: Sequence[str]

    def svg(self) -> str:
        """Return it for a page that has STYLE."""
        ids = f"{self.name}-{self.width}"
        return (
            f'<svg class="picture" viewBox="0 0 {self.width} {self.height:.0f}" role="img"'
            f' aria-labelledby="{ids}-title {ids}-desc">'
            f'<title id="{ids}-title">{escape(self.title)}</title>'
            f'<desc id="{ids}-desc">{escape(self.description)}</desc>'
            f"{''.join(self.shapes)}</svg>"
        )


def for_page_and_phone(draw: Callable[[int], Picture]) -> str:
    """Return the picture at both widths; the page's style shows the one that fits."""
    return (
        f'<div class="wide">{draw(WIDE).svg()}</div><div class="narrow">{draw(NARROW).svg()}</div>'
    )


def text_width(text: str, size: float = 12.0) -> float:
    """Return a width that the text does not exceed in common sans fonts (DejaVu is the widest)."""
    return size * sum(_WIDTH.get(letter, _OTHER) for letter in text)


def wrap(text: str, width: float, most_lines: int = 2) -> list[str]:
    """Return the text as lines that fit; what is beyond the last one is cut and marked.

    Lines break at spaces, and not at no-break spaces.
    """
    lines: list[str] = []
    for word in filter(None, text.split(" ")):
        if lines and text_width(f"{lines[-1]} {word}") <= width:
            lines[-1] += f" {word}"
        elif len(lines) < most_lines:
            lines.append(_cut(word, width))
        else:
            lines[-1] = _cut(f"{lines[-1]} …", width)
            break
    return lines


def _cut(text: str, width: float) -> str:
    if text_width(text) <= width:
        return text
    while text and text_width(f"{text}…") > width:
        text = text[:-1]
    return f"{text.rstrip(' …')}…"


def unbroken(text: str) -> str:
    """Return the text with spaces at which no line breaks."""
    return text.replace(" ", "\N{NO-BREAK SPACE}")


def words(x: float, y: float, text: str, style: str = "", anchor: str = "start") -> str:
    """Return one line of text with its base line at `y`."""
    kind = f' class="{style}"' if style else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{kind}>{escape(text)}</text>'


def titled(shape: str, title: str) -> str:
    """Return the shapes as a group with a tooltip."""
    return f"<g><title>{escape(title)}</title>{shape}</g>"


def scaled(value: float, unit: str) -> str:
    """Return a quantity with a decimal prefix and three digits: `12.3 GB/s`."""
    number, prefix = prefixed(value)
    return f"{_three(number)} {prefix}{unit}"


def prefixed(value: float) -> tuple[float, str]:
    """Return the number before a decimal prefix, and the prefix."""
    for factor, prefix in (
        (1e18, "E"),
        (1e15, "P"),
        (1e12, "T"),
        (1e9, "G"),
        (1e6, "M"),
        (1e3, "k"),
    ):
        if abs(value) >= factor * 0.9995:
            return value / factor, prefix
    return value, ""


def _three(value: float) -> str:
    digits = 0 if value == 0 or abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:.{digits}f}"
