"""The arrays that a scan fills: spans, attributes, events, links and groups, as numbers.

Text and bytes are (offset, length) pairs into the buffer that was scanned. One attribute table
holds those of spans, events and links in the order in which they stand on the wire; `OWNER` tells
them apart. Ranges are half-open.
"""

from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from perfledger.collectors.wire.protobuf import Bytes

Ints = NDArray[np.int64]
Shorts = NDArray[np.int32]

# Rows of `Columns.spans`.
(
    TRACE,
    SPAN,
    PARENT,
    NAME,
    NAME_LENGTH,
    STATE,
    STATE_LENGTH,
    MESSAGE,
    MESSAGE_LENGTH,
    KIND,
    STATUS,
    FLAGS,
    GROUP,
    FIRST_ATTRIBUTE,
    LAST_ATTRIBUTE,
    FIRST_EVENT,
    LAST_EVENT,
    FIRST_LINK,
    LAST_LINK,
    REPAIRED_TIME,
    CUT,
    BODY,
    BODY_LENGTH,
) = range(23)
SPAN_FIELDS = 23
# Rows of `Columns.times`.
START_NS, END_NS = range(2)

# Rows of `Columns.attributes`. A key is KEY_LENGTH bytes at KEY; VALUE and VALUE_LENGTH are for
# text, bytes and JSON. OF is the span, event or link that it belongs to. FATE says where it goes.
KEY, KEY_LENGTH, OWNER, OF, VALUE_KIND, VALUE, VALUE_LENGTH, FATE = range(8)
ATTRIBUTE_FIELDS = 8
OF_SPAN, OF_EVENT, OF_LINK = range(3)
EMPTY, TEXT, INT, DOUBLE, BOOL, BYTES, NESTED = range(7)
# FATE: a promoted column's number from 0 on, or one of these.
PAIR, GONE, ADDED = -1, -2, -3

# Rows of `Columns.events` and `Columns.links`.
EVENT_NAME, EVENT_NAME_LENGTH, EVENT_FIRST, EVENT_LAST, EVENT_SPAN = range(5)
EVENT_FIELDS = 5
LINK_TRACE, LINK_SPAN, LINK_FIRST, LINK_LAST, LINK_PHASE, LINK_TOKENS, LINK_OF = range(7)
LINK_FIELDS = 7

# `Columns.counts`: how much there is of each, then what the request's scan found. USED is up to
# where the buffer is filled.
SPANS, ATTRIBUTES, EVENTS, LINKS, GROUPS, KEYS, PIECES, LEFT = range(8)
ITEMS, VALUES_CUT, DENIED, DUPLICATES, UNSAFE, ELEMENTS, USED = range(8, 15)
FIRST_REASON = 15
REASONS = (
    "trace_id is not 16 bytes, or all zero",
    "span_id is not 8 bytes, or all zero",
    "parent_span_id is not 8 bytes",
    "start_time_unix_nano is after the year 2262",
    "the span is not valid protobuf",
    "the request has too many spans, attributes, events and links",
)
COUNTS = FIRST_REASON + len(REASONS)

# `Columns.pieces`: which bytes of the envelope say what group of spans this is.
PIECE_OF_RESOURCE, PIECE_OF_SCOPE = range(2)
PIECE_KIND, PIECE_OF, PIECE_START, PIECE_LENGTH = range(4)
# `Columns.groups`: the ResourceSpans of a group, by its number in the request.
GROUP_RESOURCE = 0

# `Columns.left`: what a kernel leaves to Python: (what, row).
LEFT_WHAT, LEFT_ROW = range(2)
LEFT_NAME, LEFT_STATE, LEFT_MESSAGE, LEFT_EVENT_NAME, LEFT_TEXT, LEFT_NESTED, LEFT_KEY = range(7)


class Columns(NamedTuple):
    """Arrays with room for more than they hold; `counts` says how much of each is filled.

    Kernels take them one by one (`kernel(*columns, …)`): a kernel that is handed a tuple of arrays
    counts references to each of them on every call of a part of it.
    """

    data: Bytes
    spans: Shorts
    times: Ints
    attributes: Shorts
    numbers: Ints
    extents: Shorts
    events: Shorts
    event_times: Ints
    links: Shorts
    groups: Shorts
    pieces: Shorts
    left: Shorts
    counts: Ints
    # By attribute: the number of its key in this batch; and by such a number: its entry in the
    # table of keys (keys.py), as of when it came.
    keys: Shorts
    key_entries: Shorts

    def scanned(self) -> tuple[object, ...]:
        """Return the arrays that a scan fills, in the order in which it takes them."""
        return self[:-2]

    @classmethod
    def with_room(cls, data_bytes: int, spans: int) -> Self:
        """Return empty columns with room for so many bytes and about so many spans."""
        return cls(
            data=np.empty(data_bytes, np.uint8),
            spans=_rows(SPAN_FIELDS, spans, np.int32),
            times=_rows(2, spans, np.int64),
            attributes=_rows(ATTRIBUTE_FIELDS, 16 * spans, np.int32),
            numbers=np.empty(16 * spans, np.int64),
            extents=_rows(2, 16 * spans, np.int32),
            events=_rows(EVENT_FIELDS, 2 * spans, np.int32),
            event_times=np.empty(2 * spans, np.int64),
            links=_rows(LINK_FIELDS, spans, np.int32),
            groups=_rows(1, 1024, np.int32),
            pieces=_rows(4, 4096, np.int32),
            left=_rows(2, 4096, np.int32),
            counts=np.zeros(COUNTS, np.int64),
            keys=np.empty(16 * spans, np.int32),
            key_entries=np.empty(1024, np.int32),
        )

    def grown(self) -> Self:
        """Return the same content, with twice the room for what fills more than half of its own."""
        filled = dict(zip(_TABLES, self.counts.tolist(), strict=False))
        wider: dict[str, Any] = {
            name: _wider(getattr(self, name), filled[table])
            for table, names in _TABLES.items()
            for name in names
        }
        return self._replace(**wider)


def _rows(fields: int, rows: int, kind: type[np.integer[Any]]) -> Any:
    """Return an array whose rows are whole in memory: one field of many would share few places of
    the cache, as its rows lie powers of two apart."""
    return np.empty((fields, rows), kind, order="F")


# The arrays of each count.
_TABLES = {
    SPANS: ("spans", "times"),
    ATTRIBUTES: ("attributes", "numbers", "extents", "keys"),
    EVENTS: ("events", "event_times"),
    LINKS: ("links",),
    GROUPS: ("groups",),
    KEYS: ("key_entries",),
    PIECES: ("pieces",),
    LEFT: ("left",),
}


def _wider(array: NDArray[np.generic], filled: int) -> NDArray[np.generic]:
    if 2 * filled <= array.shape[-1]:
        return array
    wider = np.empty((*array.shape[:-1], 2 * array.shape[-1]), array.dtype, order="F")
    wider[..., :filled] = array[..., :filled]
    return wider
