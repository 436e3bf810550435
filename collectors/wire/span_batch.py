"""Spans of many requests, collected as columns: each request is scanned once, when it comes."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from perfledger.collectors.attribute_values import AttributeReader, Tally
from perfledger.collectors.content_removal import is_clean_value, remove_content
from perfledger.collectors.lenient_messages import KEY_VALUE, TRACES_REQUEST
from perfledger.collectors.otlp_origin import Origin
from perfledger.collectors.wire import columns as at
from perfledger.collectors.wire.columns import Columns, Shorts
from perfledger.collectors.wire.fates import decide, find_keys, span_of
from perfledger.collectors.wire.keys import KeyCodes, KeyTable, key_at
from perfledger.collectors.wire.origins import Origins, Unreadable, UnsafeOrigin
from perfledger.collectors.wire.scan import (
    LONGEST_MESSAGE_BYTES,
    MALFORMED,
    NO_ROOM,
    PRELUDE,
    scan_request,
)

_UNKNOWN_AT_ONCE = 4096
# A serial number is the upper half of an int64 that is never negative.
_MOST_SERIALS = 2**31
# What a kernel leaves to Python takes up to a fifth of a millisecond each, while others wait.
_MOST_LEFT_TO_PYTHON = 50_000
_TOO_COSTLY = f"over {_MOST_LEFT_TO_PYTHON} maps, repaired texts or new keys; send smaller batches"
_BYTES_A_KEY = 128  # what a key of a batch takes as Python's text
_MOST_REMEMBERED = 4096
_LONGEST_REMEMBERED_BYTES = 1024
# What of a span or event a text to be repaired is: table, offset, length.
_TEXT_OF = {
    at.LEFT_NAME: ("spans", at.NAME, at.NAME_LENGTH),
    at.LEFT_STATE: ("spans", at.STATE, at.STATE_LENGTH),
    at.LEFT_MESSAGE: ("spans", at.MESSAGE, at.MESSAGE_LENGTH),
    at.LEFT_EVENT_NAME: ("events", at.EVENT_NAME, at.EVENT_NAME_LENGTH),
}


class Malformed(Exception):
    """Bytes that are no ExportTraceServiceRequest, or one that would take far too long: `why`."""

    def __init__(self, why: str = "") -> None:
        super().__init__(why)
        self.why = why


class _Unsafe(Exception):
    """The request holds what cannot be blanked in place."""


@dataclass(frozen=True)
class Mark:
    """How much a batch held at some time."""

    count: tuple[int, ...]
    used_bytes: int
    groups: int


@dataclass
class SpanReader:
    """What is remembered from one request to the next, whatever batch it is for."""

    limit_bytes: int
    serial: int = 0
    nested: dict[bytes, tuple[bytes, Tally]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.keys = KeyTable(self.limit_bytes)
        self.origins = Origins(self.limit_bytes)

    def read_nested(self, attribute: bytes) -> tuple[bytes, Tally]:
        """Return the JSON of a KeyValue that holds an array or a map. Raises _Unsafe."""
        known = self.nested.get(attribute)
        if known is not None:
            return known
        try:
            message: Any = KEY_VALUE.FromString(attribute)
        except DecodeError:
            raise _Unsafe from None
        if not is_clean_value(message):
            raise _Unsafe
        reader = AttributeReader(self.limit_bytes)
        key = reader.key(message.key)
        reader.tally = Tally()
        read = str(reader.value(message, key)).encode(), reader.tally
        if len(attribute) <= _LONGEST_REMEMBERED_BYTES:
            if len(self.nested) >= _MOST_REMEMBERED:
                self.nested.clear()
            self.nested[attribute] = read
        return read


class SpanBatch:
    """`add` requests; assemble.py then makes one table of all of them. One thread at a time."""

    def __init__(
        self,
        reader: SpanReader,
        data_bytes: int = 2**20,
        spans: int = 4096,
        columns: Columns | None = None,
    ) -> None:
        """Make an empty batch, with new columns or in those of a batch that is done with."""
        self.reader = reader
        if columns is None:
            columns = Columns.with_room(data_bytes + len(PRELUDE), spans)
        columns.counts[:] = 0
        self.columns = columns
        self.columns.data[: len(PRELUDE)] = np.frombuffer(PRELUDE, np.uint8)
        self.used_bytes = len(PRELUDE)
        # By group of spans: who sent it, and when it was received.
        self.origins: list[Origin] = []
        self.received_ns: list[int] = []
        # By a key's number in this batch. A key may have several, if the table was emptied.
        self.key_names: list[str] = []
        self._codes = KeyCodes()

    @property
    def rows(self) -> int:
        """Return how many spans there are."""
        return int(self.columns.counts[at.SPANS])

    @property
    def held_bytes(self) -> int:
        """Return how much of the columns' memory is in use."""
        columns, count = self.columns, self.columns.counts
        rows = (
            (columns.spans, at.SPANS),
            (columns.times, at.SPANS),
            (columns.attributes, at.ATTRIBUTES),
            (columns.numbers, at.ATTRIBUTES),
            (columns.extents, at.ATTRIBUTES),
            (columns.keys, at.ATTRIBUTES),
            (columns.events, at.EVENTS),
            (columns.event_times, at.EVENTS),
            (columns.links, at.LINKS),
        )
        widths = ((array.nbytes // array.shape[-1], int(count[of])) for array, of in rows)
        held_bytes = self.used_bytes + _BYTES_A_KEY * len(self.key_names)
        return held_bytes + int(sum(width * filled for width, filled in widths))

    def mark(self) -> Mark:
        """Return where the batch ends now, for `take_back`."""
        return Mark(tuple(self.columns.counts.tolist()), self.used_bytes, len(self.origins))

    def take_back(self, mark: Mark) -> None:
        """Forget what was added since a mark."""
        self._codes.forget(
            self.columns.key_entries[mark.count[at.KEYS] : self.columns.counts[at.KEYS]]
        )
        self.columns.counts[:] = mark.count
        self.used_bytes = mark.used_bytes
        del self.origins[mark.groups :], self.received_ns[mark.groups :]
        del self.key_names[mark.count[at.KEYS] :]

    def add(self, body: bytes, received_ns: int) -> tuple[memoryview, Tally]:
        """Add a request's spans; return its bytes without content, and what was found.

        The bytes are part of the batch and valid until the next call. Raises Malformed, and then
        nothing has been added.
        """
        mark = self.mark()
        try:
            return self._add(body, received_ns, mark)
        except _Unsafe:
            # Without the spans that were rejected.
            scanned = self.columns.data[mark.used_bytes : mark.used_bytes + len(body)].tobytes()
            rejected = self._rejected()
            self.take_back(mark)
        except Malformed:
            self.take_back(mark)
            raise
        try:
            message = TRACES_REQUEST.FromString(scanned)
        except DecodeError:
            raise Malformed from None
        denied = remove_content(message)
        try:
            kept, tally = self._add(message.SerializeToString(), received_ns, mark)
        except (_Unsafe, Malformed):
            self.take_back(mark)
            raise Malformed from None
        tally.denied += denied
        tally.items += rejected.total()
        tally.rejected += rejected
        return kept, tally

    def _add(self, body: bytes, received_ns: int, mark: Mark) -> tuple[memoryview, Tally]:
        while True:
            self.take_back(mark)
            end = self._copy(body)
            if self._scan(mark, end) and self._decide(mark):
                break
            self.columns = self.columns.grown()
        if self.columns.counts[at.UNSAFE]:
            raise _Unsafe
        tally = Tally()
        self._name_groups(mark, received_ns, tally)
        self._finish_texts(tally)
        self._tally(tally)
        return self.columns.data[mark.used_bytes : end].data, tally

    def _copy(self, body: bytes) -> int:
        start = self._append(body)
        return start + len(body)

    def _append(self, text: bytes) -> int:
        """Put bytes behind all others and return where they are."""
        start, end = self.used_bytes, self.used_bytes + len(text)
        data = self.columns.data
        if end > data.size:
            larger = np.empty(max(2 * data.size, end), np.uint8)
            larger[:start] = data[:start]
            self.columns = self.columns._replace(data=larger)
        self.columns.data[start:end] = np.frombuffer(text, np.uint8)
        self.used_bytes = end
        return start

    def _scan(self, mark: Mark, end: int) -> bool:
        """Scan the bytes behind the mark; return whether there was room for what they hold."""
        count = self.columns.counts
        count[[at.PIECES, at.LEFT]] = 0
        count[at.ITEMS :] = 0
        done = int(
            scan_request(*self.columns.scanned(), mark.used_bytes, end, self.reader.limit_bytes)
        )
        if done == MALFORMED:
            raise Malformed
        return done != NO_ROOM

    def _decide(self, mark: Mark) -> bool:
        """Decide what becomes of each attribute; return whether there was room to note it."""
        keys, first = self.reader.keys, mark.count[at.ATTRIBUTES]
        keys.forget_if_large()
        columns, last = self.columns, int(self.columns.counts[at.ATTRIBUTES])
        found = np.empty(last - first, np.int32)
        unknown = np.empty(_UNKNOWN_AT_ONCE, np.int32)
        start, what, learned = first, (columns.data, columns.attributes), 0
        while missing := find_keys(
            *what, start, last, found[start - first :], unknown, *keys.arrays.for_kernels()
        ):
            learned += missing
            if learned > _MOST_LEFT_TO_PYTHON:
                raise Malformed(_TOO_COSTLY)
            for row in unknown[:missing].tolist():
                keys.entry_of(key_at(columns, row))
            start = int(unknown[0])
        self.reader.serial = (self.reader.serial + 1) % _MOST_SERIALS
        if self.reader.serial == 0:
            keys.seen[:] = -1
        columns.counts[at.USED] = self.used_bytes
        done = decide(
            *(columns.data, columns.spans, columns.attributes, columns.numbers, columns.extents),
            *(columns.events, columns.links, columns.left, columns.counts),
            *(columns.keys, columns.key_entries, first, found),
            *(keys.arrays.entries, self._codes.of(keys), keys.seen, keys.seen_at),
            self.reader.limit_bytes,
            self.reader.serial << 32,
        )
        self.used_bytes = int(columns.counts[at.USED])
        if done == NO_ROOM:
            return False
        new = columns.key_entries[len(self.key_names) : columns.counts[at.KEYS]]
        self.key_names += [keys.text_of(entry) for entry in new.tolist()]
        return True

    def _name_groups(self, mark: Mark, received_ns: int, tally: Tally) -> None:
        """Read who sent each group of spans."""
        columns, first = self.columns, mark.groups
        resources: dict[int, bytes] = {}
        scopes: dict[int, bytes] = {}
        pieces = columns.pieces[:, : columns.counts[at.PIECES]].T.tolist()
        for kind, of, start, length in pieces:
            texts = resources if kind == at.PIECE_OF_RESOURCE else scopes
            piece = columns.data[start : start + length].tobytes()
            texts[of] = texts.get(of, b"") + piece
        of_groups = columns.groups[at.GROUP_RESOURCE, first : columns.counts[at.GROUPS]].tolist()
        for group, resource in enumerate(of_groups, first):
            origin, found = self._read_origin(resources.get(resource, b""), scopes.get(group, b""))
            self.origins.append(origin)
            self.received_ns.append(received_ns)
            _add_tally(tally, found)
        # A resource without spans makes no row, but its bytes are kept with the others.
        for resource in resources.keys() - set(of_groups):
            self._read_origin(resources[resource], b"")

    def _read_origin(self, resource: bytes, scope: bytes) -> tuple[Origin, Tally]:
        try:
            return self.reader.origins.read((resource, scope))
        except Unreadable:
            raise Malformed from None
        except UnsafeOrigin:
            raise _Unsafe from None

    def _finish_texts(self, tally: Tally) -> None:
        """Do what the kernels left: repair texts, and write arrays and maps as JSON."""
        if self.columns.counts[at.LEFT] > _MOST_LEFT_TO_PYTHON:
            raise Malformed(_TOO_COSTLY)
        left = self.columns.left[:, : self.columns.counts[at.LEFT]].T.tolist()
        for what, row in left:
            cut_before = tally.cut
            if what == at.LEFT_NESTED:
                span = self._finish_nested(row, tally)
            elif what in _TEXT_OF:
                table, start, length = _TEXT_OF[what]
                limit = LONGEST_MESSAGE_BYTES if what == at.LEFT_MESSAGE else None
                self._repair(table, start, length, row, tally, limit)
                span = row if table == "spans" else int(self.columns.events[at.EVENT_SPAN, row])
            else:
                is_key = what == at.LEFT_KEY
                start, length = (at.KEY, at.KEY_LENGTH) if is_key else (at.VALUE, at.VALUE_LENGTH)
                self._repair("attributes", start, length, row, tally)
                span = self._span_of(row)
            self.columns.spans[at.CUT, span] += tally.cut - cut_before

    def _finish_nested(self, row: int, tally: Tally) -> int:
        first, last = self.columns.extents[:, row].tolist()
        text, found = self.reader.read_nested(self.columns.data[first:last].tobytes())
        start = self._append(text)
        self.columns.attributes[at.VALUE, row] = start
        self.columns.attributes[at.VALUE_LENGTH, row] = len(text)
        _add_tally(tally, found)
        return self._span_of(row)

    def _span_of(self, row: int) -> int:
        columns = self.columns
        return int(span_of(columns.attributes, columns.events, columns.links, row))

    def _repair(
        self, table: str, start: int, length: int, row: int, tally: Tally, limit: int | None = None
    ) -> None:
        """Put a text that is UTF-8 and not too long in the place of one that is not."""
        array: Shorts = getattr(self.columns, table)
        reader = AttributeReader(self.reader.limit_bytes)
        first = int(array[start, row])
        text = self.columns.data[first : first + int(array[length, row])].tobytes()
        kept = reader.text(text, limit).encode()
        array[start, row], array[length, row] = self._append(kept), len(kept)
        _add_tally(tally, reader.tally)

    def _tally(self, tally: Tally) -> None:
        count = self.columns.counts.tolist()
        tally.items += count[at.ITEMS]
        tally.rejected += self._rejected()
        tally.cut += count[at.VALUES_CUT]
        tally.denied += count[at.DENIED]
        tally.duplicate_keys += count[at.DUPLICATES]

    def _rejected(self) -> Counter[str]:
        counts = self.columns.counts[at.FIRST_REASON :].tolist()
        found = zip(at.REASONS, counts, strict=True)
        return Counter({reason: count for reason, count in found if count})


def _add_tally(to: Tally, found: Tally) -> None:
    to.cut += found.cut
    to.denied += found.denied
    to.repaired += found.repaired
    to.duplicate_keys += found.duplicate_keys
