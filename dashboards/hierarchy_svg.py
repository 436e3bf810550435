"""The hierarchy of data movement as a ladder: places are boxes, and between them what moved.

From the arithmetic at the top to the farthest storage at the bottom. The right column (on a phone:
below the text) holds the gauges: of a place how full it is, of a way its share of the ceiling.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from perfledger.analyzers.contention import Contender
from perfledger.analyzers.edges import (
    DERIVED,
    MEASURED,
    NOT_OBSERVABLE,
    CeilingShare,
    EdgeLedger,
    EdgeLine,
    Flow,
    NodeLine,
)
from perfledger.dashboards.picture import (
    LINE,
    STRONG,
    WIDE,
    Picture,
    for_page_and_phone,
    scaled,
    text_width,
    titled,
    unbroken,
    words,
    wrap,
)

_TRUNK = ("compute", "device_memory", "host_memory")  # everything else hangs on one of these
_TRUNK_X, _BRANCH_X, _BRANCH_BOX_X = 16, 56, 40
_GAUGE, _GAP, _PAD = 216, 14, 8
_DASHES = {MEASURED: "", DERIVED: "8 4", NOT_OBSERVABLE: "2 5"}
_SPOKEN = {
    "registers_sram": "registers and SRAM",
    "host_device": "host to device",
    "storage_local": "local storage",
    "storage_object": "object storage",
}

Lines = Sequence[tuple[str, str]]  # text and its style


def hierarchy(ledger: EdgeLedger) -> str:
    """Return the picture for a page whose style holds `picture.STYLE`, at both widths."""
    return for_page_and_phone(lambda width: draw(ledger, width))


def draw(ledger: EdgeLedger, width: int) -> Picture:
    """Return the picture `width` units wide; what has no line in the ledger is not drawn."""
    ladder = _Ladder(width, ledger.nearest.edge if ledger.nearest else "")
    nodes = {node.node: node for node in ledger.nodes}
    trunk = [name for name in _TRUNK if name in nodes]
    for at, name in enumerate(trunk):
        own = [edge for edge in ledger.edges if name in (edge.source, edge.target)]
        ladder.box(nodes[name], 0, [edge for edge in own if edge.source == edge.target])
        leaves = [(edge, _far(edge, name)) for edge in own if _far(edge, name) not in _TRUNK]
        for edge, leaf in leaves:
            ladder.way(edge, _BRANCH_X, forward_is_up=edge.source == leaf)
            if leaf in nodes:
                ladder.box(nodes[leaf], _BRANCH_BOX_X, [])
        following = trunk[at + 1] if at + 1 < len(trunk) else None
        ladder.trunk_passes(bool(leaves), following is not None)
        for edge in own:
            if following is not None and _far(edge, name) == following:
                ladder.way(edge, _TRUNK_X, forward_is_up=edge.source == following)
    ladder.key()
    return Picture(
        "hierarchy",
        width,
        ladder.y,
        "Where bytes moved",
        " ".join(describe(edge) for edge in ledger.edges),
        ladder.shapes,
    )


def describe(edge: EdgeLine) -> str:
    """Return the edge as a sentence, for those who hear the picture."""
    name = spoken(edge.edge)
    if not edge.flows:
        return f"{name}: not observable, {edge.why}."
    flow = edge.flows[0]
    parts = [_speed(flow), *_moved(edge, flow), f"{flow.provenance} by {flow.told_by}"]
    if edge.ceiling and edge.ceiling.share is not None:
        parts.append(f"{_reached(edge.ceiling)}, {edge.ceiling.provenance}")
    return f"{name}: {', '.join(parts)}, {_contended(edge)}."


def spoken(name: str) -> str:
    """Return a name of the schema as words."""
    return _SPOKEN.get(name, name.replace("_", " "))


@dataclass
class _Ladder:
    """The drawing so far, from the top down to `y`."""

    width: int
    nearest: str
    y: float = 4
    shapes: list[str] = field(default_factory=list)
    _bus_from: float = 0  # where the last box of the trunk ended

    @property
    def _beside(self) -> bool:
        return self.width >= WIDE  # gauges have a column of their own

    def box(self, node: NodeLine, x: int, inner: Sequence[EdgeLine]) -> None:
        """Draw a place: its name, what it holds, and ways that do not leave it."""
        room = self.width - x - 2 * _PAD - (_GAUGE + _GAP if self._beside else 0)
        lines: list[tuple[str, str]] = [(spoken(node.node), "strong")]
        lines += [(text, "quiet") for text in wrap(_holds(node), room)]
        for edge in inner:
            lines += _way_lines(edge, room, False)
        limit, total = node.limit_bytes, sum(held.bytes for held in node.held)
        gauge = bool(limit)
        below = gauge and not self._beside
        height = len(lines) * LINE + 10 + (LINE + 18 if below else 0)
        height = max(height, 44 if gauge else 0)
        shape = (
            f'<rect class="box" x="{x + 1}" y="{self.y:.1f}" width="{self.width - x - 2}"'
            f' height="{height:.1f}" rx="6"/>'
        )
        self.shapes.append(titled(shape, node.meaning))
        self._write(lines, x + _PAD)
        if limit:
            gauge_x = self.width - _GAUGE - _PAD if self._beside else x + _PAD
            gauge_y = self.y + 4 + (len(lines) * LINE + 4 if below else 0)
            text = f"{total / limit:.0%} of {scaled(limit, 'B')} held"
            self._gauge(gauge_x, gauge_y, room if below else _GAUGE, total / limit, text)
        self.y += height
        if x == 0:
            self._bus_from = self.y

    def way(self, edge: EdgeLine, x: int, *, forward_is_up: bool) -> None:
        """Draw a way from the box above to the one that will stand below."""
        text_x = x + 18
        room = self.width - text_x - (_GAUGE + _GAP if self._beside else 0) - _PAD
        lines = _way_lines(edge, room, edge.edge == self.nearest)
        self.y += 6
        top = self.y
        self._write(lines, text_x)
        used = float(len(lines) * LINE)
        if edge.flows:
            gauge_x = self.width - _GAUGE - _PAD if self._beside else text_x
            gauge_y = top if self._beside else top + used + 2
            height = self._share(edge, gauge_x, gauge_y, _GAUGE if self._beside else room)
            used = max(used, height) if self._beside else used + height + 2
        self.y = top + used + 10
        self._line(edge, x, top - 6, forward_is_up)

    def trunk_passes(self, leaves: bool, goes_on: bool) -> None:
        """Draw the thin line that leads past (or to) the branches."""
        if leaves and goes_on:
            self.shapes.append(_bus(_TRUNK_X, self._bus_from, self.y))

    def key(self) -> None:
        """Say what the dashes mean."""
        self.y += 12
        x = 0.0
        for provenance, dashes in _DASHES.items():
            self.shapes.append(
                f'<line class="way" x1="{x:.0f}" x2="{x + 22:.0f}" y1="{self.y + 8:.1f}"'
                f' y2="{self.y + 8:.1f}" stroke-dasharray="{dashes}"/>'
            )
            self.shapes.append(words(x + 26, self.y + 12, provenance, "quiet"))
            x += 34 + text_width(provenance)
        self.y += LINE + 6

    def _write(self, lines: Lines, x: float) -> None:
        for at, (text, style) in enumerate(lines):
            self.shapes.append(words(x, self.y + 16 + at * LINE, text, style))

    def _line(self, edge: EdgeLine, x: int, top: float, forward_is_up: bool) -> None:
        """Draw the way itself, with a tip at each end that bytes arrived at."""
        dashes = _DASHES.get(edge.provenance, "")
        path = f"M{x} {top:.1f}V{self.y:.1f}"
        if x == _BRANCH_X:
            self.shapes.append(_bus(_TRUNK_X, self._bus_from, top + 3))
            path = f"M{_TRUNK_X} {top + 3:.1f}H{x}V{self.y:.1f}"
        drawn = f'<path class="way" d="{path}" stroke-dasharray="{dashes}"/>'
        flow = edge.flows[0] if edge.flows else None
        forward, backward = (flow.forward_bytes, flow.backward_bytes) if flow else (0, 0)
        up, down = (forward, backward) if forward_is_up else (backward, forward)
        if up and x == _TRUNK_X:
            drawn += _tip(x, top, -1)
        elif up:
            drawn += _tip_left(_TRUNK_X, top + 3)
        if down:
            drawn += _tip(x, self.y, 1)
        self.shapes.append(titled(drawn, describe(edge)))

    def _share(self, edge: EdgeLine, x: float, y: float, room: float) -> float:
        """Draw the share of the ceiling (or say why none) and return the height that it takes."""
        ceiling = edge.ceiling
        if ceiling is None:
            lines = wrap(f"no ceiling: {edge.no_ceiling}", room, 3)
            self.shapes += [
                words(x, y + 14 + at * LINE, text, "quiet") for at, text in enumerate(lines)
            ]
            return float(len(lines) * LINE)
        against = f"{ceiling.operation} {ceiling.variant}, {ceiling.provenance}"
        notes = wrap(against, room) + (wrap(ceiling.note, room) if ceiling.note else [])
        self._gauge(x, y, room, ceiling.share, _reached(ceiling))
        for at, text in enumerate(notes):
            self.shapes.append(words(x, y + 46 + at * LINE, text, "quiet"))
        return 34.0 + len(notes) * LINE

    def _gauge(self, x: float, y: float, room: float, share: float | None, text: str) -> None:
        """Draw a bar of `share` under its text, 34 units high; null has no bar."""
        self.shapes.append(words(x, y + 14, text))
        track = f'x="{x:.1f}" y="{y + 21:.1f}" height="8" rx="2"'
        shape = f'<rect class="track" {track} width="{room:.1f}"/>'
        if share is not None:
            filled = max(1.5, min(share, 1.0) * room)
            shape += f'<rect class="fill" {track} width="{filled:.1f}"/>'
        self.shapes.append(titled(shape, text))


def _far(edge: EdgeLine, near: str) -> str:
    return edge.target if edge.source == near else edge.source


def _holds(node: NodeLine) -> str:
    if not node.held:
        return f"contents {node.provenance}: {node.why}" if node.why else node.meaning
    parts = ", ".join(f"{held.name} {scaled(held.bytes, 'B')}" for held in node.held)
    return f"holds {parts} ({node.provenance})"


def _way_lines(edge: EdgeLine, room: float, nearest: bool) -> Lines:
    """Return what is said of a way, its speed first."""
    name = spoken(edge.edge)
    if not edge.flows:
        lines = [(text, "") for text in wrap(f"{name}: not observable", room)]
        return lines + [(text, "quiet") for text in wrap(edge.why, room, 4)]
    flow, *others = edge.flows
    bold = room / STRONG
    lines = [(text, "strong") for text in wrap(f"{name}: {_speed(flow)}", bold)]
    if nearest:
        lines += [(text, "strong") for text in wrap("▲ nearest its ceiling", bold)]
    moved = " · ".join(unbroken(part) for part in _moved(edge, flow))
    lines += [(text, "") for text in wrap(moved, room, 3)]
    lines += [(text, "quiet") for text in wrap(f"{flow.provenance}: {flow.told_by}", room)]
    for other in others[:2]:
        text = f"{other.provenance}: {other.told_by}, {_speed(other)}"
        lines += [(part, "quiet") for part in wrap(text, room)]
    return lines + [(text, "quiet") for text in wrap(_contended(edge), room)]


def _speed(flow: Flow) -> str:
    if flow.bytes_per_s is None:
        return "no time to divide by"
    return f"{scaled(flow.bytes_per_s, 'B/s')} while active"


def _moved(edge: EdgeLine, flow: Flow) -> list[str]:
    parts = []
    if flow.bytes_per_token is not None:
        parts.append(f"{scaled(flow.bytes_per_token, 'B')} per token")
    for word, moved in ((edge.forward, flow.forward_bytes), (edge.backward, flow.backward_bytes)):
        parts.append(f"{word} unknown" if moved is None else f"{scaled(moved, 'B')} {word}")
    if flow.transfers_per_s is not None:
        per = "steps/s" if edge.edge == "device_memory" else "transfers/s"
        parts.append(scaled(flow.transfers_per_s, per))
    if flow.latency_ns is not None:
        parts.append(f"{scaled(flow.latency_ns / 1e6, 'ms')} each")
    return parts


def _reached(ceiling: CeilingShare) -> str:
    limit = scaled(ceiling.bytes_per_s, "B/s")
    if ceiling.share is None:
        return f"ceiling {limit}, share undecided"
    return f"{percent(ceiling.share)} of {limit}"


def percent(share: float) -> str:
    """Return a share in percent; a small one keeps a digit."""
    return f"{share:.1%}" if 0 < share < 0.0995 else f"{share:.0%}"


def _contended(edge: EdgeLine) -> str:
    if not edge.contenders:
        return edge.contention or "nobody else seen on it"
    shown = ", ".join(_contender(other) for other in edge.contenders[:2])
    rest = len(edge.contenders) - 2
    return f"sharing it: {shown}" + (f" and {rest} more" if rest > 0 else "")


def _contender(other: Contender) -> str:
    if other.share is not None:
        return f"{other.kind} {other.name} ({percent(other.share)} of the time)"
    if other.bytes is not None:
        return f"{other.kind} {other.name} ({scaled(other.bytes, 'B')})"
    return f"{other.kind} {other.name}"


def _bus(x: float, top: float, bottom: float) -> str:
    return f'<line class="leader" x1="{x}" x2="{x}" y1="{top:.1f}" y2="{bottom:.1f}"/>'


def _tip(x: float, y: float, down: int) -> str:
    return f'<path class="tip" d="M{x} {y:.1f}l-5 {-9 * down}h10z"/>'


def _tip_left(x: float, y: float) -> str:
    return f'<path class="tip" d="M{x} {y:.1f}l9 -5v10z"/>'
