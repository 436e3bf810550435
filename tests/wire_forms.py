"""Export requests of spans in every form that protobuf's wire format allows, from a seed.

Fields in any order, singular ones sent several times, messages in pieces, varints with zeros in
front, fields that OTLP does not have, known ones with another wire type, groups. What is written
is what the official parser reads, but for ids, times and texts that are wrong in themselves.
"""

import struct
from random import Random

VARINT, FIXED64, LENGTH, GROUP, GROUP_END, FIXED32 = range(6)
_WIRES = (VARINT, FIXED64, LENGTH, GROUP, FIXED32)
# Field number -> what it is: a message (upper case) or a scalar; those with + are repeated.
SCHEMA: dict[str, dict[int, str]] = {
    "REQUEST": {1: "RESOURCE_SPANS+"},
    "RESOURCE_SPANS": {1: "RESOURCE", 2: "SCOPE_SPANS+", 3: "text"},
    "RESOURCE": {1: "ATTRIBUTE+", 2: "varint"},
    "SCOPE_SPANS": {1: "SCOPE", 2: "SPAN+", 3: "text"},
    "SCOPE": {1: "text", 2: "text", 3: "ATTRIBUTE+", 4: "varint"},
    "SPAN": {
        **{1: "trace_id", 2: "span_id", 3: "text", 4: "parent_id", 5: "text", 6: "small"},
        **{7: "time", 8: "time", 9: "ATTRIBUTE+", 10: "varint", 11: "EVENT+", 12: "varint"},
        **{13: "LINK+", 14: "varint", 15: "STATUS", 16: "fixed32"},
    },
    "EVENT": {1: "time", 2: "event_name", 3: "ATTRIBUTE+", 4: "varint"},
    "LINK": {
        **{1: "trace_id", 2: "span_id", 3: "text", 4: "ATTRIBUTE+", 5: "varint", 6: "fixed32"},
    },
    "STATUS": {2: "text", 3: "small"},
    "ATTRIBUTE": {1: "key", 2: "VALUE", 3: "varint"},
    "VALUE": {},
    "LIST": {1: "VALUE+"},
    "MAP": {1: "ATTRIBUTE+"},
}
_OF_VALUE = {1: "text", 2: "varint", 3: "varint", 4: "fixed64", 5: "LIST", 6: "MAP", 7: "bytes"}
_OF_VALUE[8] = "varint"
_WIRE_OF = {"varint": VARINT, "small": VARINT, "time": FIXED64, "fixed64": FIXED64}
_WIRE_OF["fixed32"] = FIXED32
KEYS = (
    *("gen_ai.usage.input_tokens", "gen_ai.request.model", "perfledger.rank", "perfledger.phase"),
    *("perfledger.tokens", "gen_ai.prompt", "gen_ai.prompt.0.content", "messages", "service.name"),
    *("w3c.tracestate", "otel.dropped_links_count", "http.request.body.size", "", "a", "ab", "abc"),
)
CONTENT = ("gen_ai.prompt", "gen_ai.prompt.0.content", "messages")
TEXTS = (
    "",
    "x",
    "chat",
    "exception",
    "naïve",
    "日本語",
    "\U0001f600",
    'quote"\\\n',
    "\x7f",
    "z" * 70,
)
BAD_TEXTS = (b"\xff", b"ok\xc3", b"\xed\xa0\x80", b"\xc0\x80", b"a\xf4\x90\x80\x80b", b"\xe2\x82")


class Writer:
    """Writes one request; `oddity` (0 to 1) is how often something unusual is chosen.

    Without `content` little in it takes the slow way, through message objects.
    """

    def __init__(
        self, seed: int, oddity: float = 0.15, bad_texts: float = 0.0, *, content: bool = True
    ) -> None:
        self._random = Random(seed)
        self._oddity = oddity
        self._bad_texts = bad_texts
        self._keys = KEYS if content else tuple(k for k in KEYS if k not in CONTENT)
        self._wires = _WIRES if content else tuple(w for w in _WIRES if w != GROUP)
        self._left = 120

    def request(self) -> bytes:
        return self._message("REQUEST", 0)

    def _odd(self) -> bool:
        return self._random.random() < self._oddity

    def varint(self, value: int, longest: int = 10) -> bytes:
        """Write a number, sometimes with zeros in front."""
        found = bytearray()
        while value > 0x7F:
            found.append(value & 0x7F | 0x80)
            value >>= 7
        found.append(value)
        if self._odd() and len(found) < longest:
            found[-1] |= 0x80
            found += b"\x80" * self._random.randrange(longest - len(found)) + b"\0"
        return bytes(found)

    def _field(self, number: int, wire: int, payload: bytes) -> bytes:
        size = self.varint(len(payload), 5) if wire == LENGTH else b""
        return self.varint(number << 3 | wire, 5) + size + payload

    def _message(self, name: str, depth: int) -> bytes:
        fields = _OF_VALUE if name == "VALUE" else SCHEMA[name]
        parts = []
        for number, kind in self._chosen(name, fields):
            self._left -= 1
            wire = _WIRE_OF.get(kind, LENGTH)
            parts.append(self._field(number, wire, self._payload(kind.rstrip("+"), depth + 1)))
        while self._odd():
            parts.append(self._unknown(fields))
        if self._odd():
            self._random.shuffle(parts)
        return b"".join(parts)

    def _chosen(self, name: str, fields: dict[int, str]) -> list[tuple[int, str]]:
        choose = self._random
        if name == "VALUE":
            count = 2 if self._odd() else choose.choice((0, 1, 1, 1, 1, 1))
            numbers = [choose.choice((1, 1, 2, 3, 4, 5, 6, 7, 8)) for _ in range(count)]
            return [(number, fields[number]) for number in numbers]
        found = []
        for number, kind in fields.items():
            is_needed = kind in ("trace_id", "span_id", "key", "time") or name == "REQUEST"
            count = 1 if is_needed or choose.random() < 0.6 else 0
            if kind.endswith("+") and self._left > 0:
                count = choose.choice((0, 1, 1, 2, 3))
            if self._odd():
                count = choose.choice((0, 2, 3))
            found += [(number, kind)] * count
        return found

    def _payload(self, kind: str, depth: int) -> bytes:
        if kind.isupper():
            if kind in ("LIST", "MAP") and depth > 10:
                return b""
            if kind == "LIST" and self._odd() and self._odd():
                return self._deep(self._random.choice((29, 31, 32, 33, 40)))
            return self._message(kind, depth)
        return self._scalar(kind)

    def _deep(self, levels: int) -> bytes:
        """Return an ArrayValue with so many more inside, one in another."""
        found = b""
        for _ in range(levels):
            found = self._field(1, LENGTH, self._field(5, LENGTH, found))
        return found

    def _scalar(self, kind: str) -> bytes:
        choose = self._random
        match kind:
            case "varint":
                edges = (0, 1, 300, 2**31, 2**32 - 1, 2**32 + 1, 2**63 - 1, 2**63, 2**64 - 1)
                return self.varint(choose.choice(edges))
            case "small":
                return self.varint(choose.choice((0, 1, 2, 3, 5, 6, 2**32 + 2, 2**64 - 1)))
            case "fixed32":
                return struct.pack("<I", choose.choice((0, 1, 2**31, 2**32 - 1)))
            case "fixed64":
                return choose.choice((bytes(8), b"\0" * 6 + b"\xf0\x7f", choose.randbytes(8)))
            case "time":
                return struct.pack("<Q", choose.choice((0, 1, 100, 200, 2**63 - 1, 2**63)))
            case "trace_id" | "span_id" | "parent_id":
                size = 16 if kind == "trace_id" else 8
                return choose.choice((b"\7", bytes(size), b"")) if self._odd() else b"i" * size
            case "key":
                return self._text(choose.choice(self._keys))
            case "event_name":
                return self._text(choose.choice(TEXTS))
            case "bytes":
                return choose.randbytes(choose.choice((0, 1, 20, 70)))
        return self._text(choose.choice(TEXTS))

    def _text(self, text: str) -> bytes:
        if self._random.random() < self._bad_texts:
            return text.encode()[:4] + self._random.choice(BAD_TEXTS) * self._random.choice((1, 9))
        return text.encode()

    def _unknown(self, known: dict[int, str]) -> bytes:
        """Return a field that OTLP does not have, or has with another wire type."""
        wire = self._random.choice(self._wires)
        number = self._random.choice((17, 100, 2**29 - 1))
        others = [n for n, kind in known.items() if _WIRE_OF.get(kind, LENGTH) != wire]
        if others and self._random.random() < 0.5:
            number = self._random.choice(others)
        return self._any_field(number, wire, 0)

    def _any_field(self, number: int, wire: int, depth: int) -> bytes:
        if wire != GROUP:
            kind = {VARINT: "varint", FIXED64: "fixed64", FIXED32: "fixed32"}.get(wire, "bytes")
            return self._field(number, wire, self._scalar(kind))
        count = self._random.randrange(3) if depth < 5 else 0
        inner = [
            self._any_field(self._random.choice((1, 2, 19)), self._random.choice(_WIRES), depth + 1)
            for _ in range(count)
        ]
        return b"".join(
            (self.varint(number << 3 | GROUP, 5), *inner, self.varint(number << 3 | GROUP_END, 5))
        )
