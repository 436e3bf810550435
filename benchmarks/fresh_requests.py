"""Endless different requests out of one: new ids and times, written into its bytes.

A load client cannot make a request from nothing as fast as a collector takes it. So it makes a
few with a generator and then writes other ids, times and request names over those in the bytes;
all of these have a fixed length, so that nothing else moves. The ids follow from a seed and the
number of the request alone: whoever knows these two can say which spans were in it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
Index = NDArray[np.intp]

# Attributes that name one request: the last 16 digits of the value, hexadecimal, are replaced.
NAMING_KEYS = frozenset({b"app.request.id", b"perfledger.session", b"gen_ai.response.id"})
DIGITS = 16
IDS_A_REQUEST = 1 << 14  # more than any request holds
_HEX = np.frombuffer(b"0123456789abcdef", np.uint8)


@dataclass
class _Places:
    """Where values of one width lie; equal values are replaced by equal ones."""

    width: int
    starts: list[int] = field(default_factory=list)
    which: list[int] = field(default_factory=list)
    known: dict[bytes, int] = field(default_factory=dict)

    def add(self, body: bytes, start: int) -> None:
        self.starts.append(start)
        value = body[start : start + self.width]
        self.which.append(self.known.setdefault(value, len(self.known)))

    def in_words(self, first: int) -> tuple[Index, Index]:
        """Return where words of 8 bytes go, and which of the new words, from `first` on."""
        words = np.arange(self.width // 8)
        places = np.array(self.starts, np.intp).reshape(-1, 1) + 8 * words
        which = np.array(self.which, np.intp).reshape(-1, 1) * len(words) + words
        return places.ravel(), which.ravel() + first

    @property
    def words(self) -> int:
        return len(self.known) * self.width // 8


@dataclass(frozen=True)
class FreshRequests:
    """A request of which `make` gives any number of copies that differ in ids and times."""

    body: bytes
    seed: int
    spans: int
    traces: int
    ids: int  # words of them: spans' and traces'
    names: int
    places: Index  # of the words to replace, in bytes
    which: Index  # the new word of each: of span ids, trace ids, names, times
    times_ns: NDArray[np.int64]  # after the newest time in the body

    @classmethod
    def of(cls, body: bytes, seed: int = 0) -> Self:
        """Find what to replace in a valid ExportTraceServiceRequest; takes some 50 ms."""
        spans, traces, names, times = _Places(8), _Places(16), _Places(DIGITS), _Places(8)
        found = list(_spans(body))
        for start, end in found:  # the spans' own ids come first, in their order
            spans.add(body, next(at for number, at, _ in _fields(body, start, end) if number == 2))
        for start, end in found:
            _visit(body, start, end, traces, spans, names, times)
        parts, first = [], 0
        for kind in (spans, traces, names, times):
            parts.append(kind.in_words(first))
            first += kind.words
        places, which = (np.concatenate(part) for part in zip(*parts, strict=True))
        order = np.argsort(places)  # memory is faster in its own order
        times_ns = np.frombuffer(b"".join(times.known), np.int64)
        return cls(
            body,
            seed,
            len(found),
            len(traces.known),
            spans.words + traces.words,
            len(names.known),
            places[order],
            which[order],
            times_ns - times_ns.max(),
        )

    def make(self, number: int, now_ns: int) -> bytearray:
        """Return request `number`, whose newest span ends at `now_ns` (wall clock)."""
        body = bytearray(self.body)
        random = _words(self.seed, number, self.ids + self.names)
        names = random[self.ids :].view(np.uint8)
        digits = np.stack([_HEX[names >> 4], _HEX[names & 15]], axis=1).ravel().view(np.uint64)
        times = (self.times_ns + now_ns).view(np.uint64)
        new = np.concatenate([random[: self.ids], digits, times])
        _words_at_each_byte(body)[self.places] = new[self.which]
        return body

    def span_ids(self, number: int) -> Words:
        """Return the ids of the spans of request `number`, the 8 bytes of each as one word."""
        return span_ids(self.seed, number, self.spans)

    def trace_ids(self, number: int) -> list[bytes]:
        """Return the trace ids in request `number`."""
        words = _words(self.seed, number, self.ids)[self.ids - 2 * self.traces :]
        return [row.tobytes() for row in words.reshape(-1, 2)]


def _words_at_each_byte(body: bytearray) -> Words:
    """View bytes as the words of 8 that begin at each of them: one store writes a whole field."""
    return np.ndarray((len(body) - 7,), np.uint64, body, strides=(1,))


def span_ids(seed: int, number: int, spans: int) -> Words:
    """Return the ids of the spans of a request: all different over numbers and seeds."""
    return _words(seed, number, spans)


def _words(seed: int, number: int, count: int) -> Words:
    """Mix counters into words that look random; a bijection, so no two counters give the same."""
    if not (0 <= seed < 1 << 16 and 0 <= number < 1 << 32 and count <= IDS_A_REQUEST):
        raise ValueError(f"seed {seed}, request {number}, {count} ids: too large")
    first = (seed << 48) + (number * IDS_A_REQUEST)
    mixed = np.arange(count, dtype=np.uint64) + np.uint64(first)
    mixed *= np.uint64(0x9E3779B97F4A7C15)
    mixed ^= np.uint64(0xD1B54A32D192ED03)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


# --- Protobuf's wire format: field numbers of ExportTraceServiceRequest ---------------------------


def _spans(body: bytes) -> Iterator[tuple[int, int]]:
    for _, group, group_end in _numbered(body, 0, len(body), 1):
        for _, scope, scope_end in _numbered(body, group, group_end, 2):
            for _, span, span_end in _numbered(body, scope, scope_end, 2):
                yield span, span_end


def _visit(
    body: bytes,
    start: int,
    end: int,
    traces: _Places,
    spans: _Places,
    names: _Places,
    times: _Places,
) -> None:
    """Note what there is to replace in a span, its events and its links; not its own id."""
    for number, at, until in _fields(body, start, end):
        if number == 1:
            traces.add(body, at)
        elif number == 4 and until > at:
            spans.add(body, at)
        elif number in (7, 8):
            times.add(body, at)
        elif number == 9:
            names_value(body, at, until, names)
        elif number == 11:
            for _, place, _ in _numbered(body, at, until, 1):
                times.add(body, place)
        elif number == 13:
            for _, place, _ in _numbered(body, at, until, 1):
                traces.add(body, place)
            for _, place, _ in _numbered(body, at, until, 2):
                spans.add(body, place)


def names_value(body: bytes, start: int, end: int, names: _Places) -> None:
    """Note the end of the text of an attribute that names a request."""
    ((_, key, key_end),) = _numbered(body, start, end, 1)
    if body[key:key_end] in NAMING_KEYS:
        ((_, _, value_end),) = _numbered(body, start, end, 2)
        names.add(body, value_end - DIGITS)


def _numbered(body: bytes, start: int, end: int, wanted: int) -> Iterator[tuple[int, int, int]]:
    return (found for found in _fields(body, start, end) if found[0] == wanted)


def _fields(body: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yield number, start and end of the value of each field of a message."""
    at = start
    while at < end:
        tag, at = _varint(body, at)
        wire = tag & 7
        if wire == 0:
            _, until = _varint(body, at)
        elif wire == 2:
            length, at = _varint(body, at)
            until = at + length
        else:
            until = at + {1: 8, 5: 4}[wire]
        yield tag >> 3, at, until
        at = until


def _varint(body: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = body[at]
        at += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, at
        shift += 7


def fresh_of(bodies: Sequence[bytes], seed: int = 0) -> list[FreshRequests]:
    """Return one for each body; number `n` of the load is to be made from `n % len(bodies)`."""
    return [FreshRequests.of(body, seed) for body in bodies]
