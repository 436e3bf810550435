"""What a real browser makes of a page at some width: where its pictures' words are, and how large.

The page is put in a frame as it is (its policy allows no script), and a script beside it looks in.
"""

import html
import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

_LOOK = """
addEventListener("load", () => {
  const page = document.querySelector("iframe").contentDocument;
  const seen = [...page.querySelectorAll("svg.picture")].filter(s => s.getClientRects().length);
  const style = getComputedStyle(page.documentElement);
  const colour = name => style.getPropertyValue("--" + name).trim();
  const box = item => {
    const r = item.getBoundingClientRect();
    return [r.left, r.top, r.right, r.bottom];
  };
  const words = item => ({
    text: item.textContent, box: box(item), size: parseFloat(getComputedStyle(item).fontSize),
    length: item.getComputedTextLength(), strong: item.classList.contains("strong"),
  });
  const told = {
    overflows: page.documentElement.scrollWidth > page.documentElement.clientWidth,
    colours: Object.fromEntries(
      ["ink", "soft", "card", "page", "bar", "line"].map(name => [name, colour(name)])),
    pictures: seen.map(svg => ({
      name: svg.querySelector("title").textContent, box: box(svg),
      scale: svg.getBoundingClientRect().width / svg.viewBox.baseVal.width,
      words: [...svg.querySelectorAll("text")].map(words),
    })),
  };
  const out = document.createElement("pre");
  out.id = "told";
  out.textContent = JSON.stringify(told);
  document.body.append(out);
});
"""
Rectangle = tuple[float, float, float, float]  # left, top, right, bottom; CSS pixels


@dataclass(frozen=True)
class Words:
    """A line of text in a picture: its rectangle on the screen; sizes are the picture's own."""

    text: str
    box: Rectangle
    size: float
    length: float
    strong: bool


@dataclass(frozen=True)
class Shown:
    """A picture that is shown, and how many CSS pixels one of its units takes."""

    name: str
    box: Rectangle
    scale: float
    words: tuple[Words, ...]

    def overlapping(self) -> list[tuple[str, str]]:
        """Return the pairs of texts that share more than the hair between two lines."""
        return [
            (one.text, other.text)
            for at, one in enumerate(self.words)
            for other in self.words[at + 1 :]
            if _share(one.box, other.box, slack=2.5 * self.scale)
        ]

    def outside(self) -> list[str]:
        """Return the texts that leave the picture."""
        left, top, right, bottom = self.box
        return [
            words.text
            for words in self.words
            if words.box[0] < left - 1
            or words.box[1] < top - 1
            or words.box[2] > right + 1
            or words.box[3] > bottom + 1
        ]


@dataclass(frozen=True)
class Seen:
    """A page as it was shown."""

    overflows: bool  # sideways, as a whole
    colours: dict[str, str]
    pictures: tuple[Shown, ...]


def look(page: str, width: int, folder: Path, *, dark: bool = False) -> Seen:
    """Return what chromium shows of the page, `width` CSS pixels wide."""
    browser = shutil.which("chromium")
    if browser is None:
        assert os.environ.get("CI") != "true", "chromium is missing; .ci/run installs it"
        pytest.skip("no chromium here")
    frame = f'<iframe width="{width}" height="3000" srcdoc="{html.escape(page)}"></iframe>'
    file = folder / f"looked-at-{width}-{dark}.html"
    file.write_text(f'<!doctype html><meta charset="utf-8"><script>{_LOOK}</script>{frame}')
    command = [
        browser,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--window-size=1400,3200",
        f"--user-data-dir={folder}/browser-{width}-{dark}",
        "--dump-dom",
        file.as_uri(),
    ]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    told = json.loads(html.unescape(dom.split('<pre id="told">')[1].split("</pre>")[0]))
    pictures = tuple(
        Shown(
            shown["name"],
            tuple(shown["box"]),
            shown["scale"],
            tuple(Words(**{**words, "box": tuple(words["box"])}) for words in shown["words"]),
        )
        for shown in told["pictures"]
    )
    return Seen(told["overflows"], told["colours"], pictures)


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours #rrggbb (WCAG 2.2, 1.4.3)."""
    high, low = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    ]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _share(one: Rectangle, other: Rectangle, slack: float) -> bool:
    return (
        min(one[2], other[2]) - max(one[0], other[0]) > slack
        and min(one[3], other[3]) - max(one[1], other[1]) > slack
    )
