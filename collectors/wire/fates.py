"""What becomes of each attribute: denied, a column of its own, or a pair; the last of equals wins.

Values of denied keys are blanked in the bytes themselves, in place and as valid protobuf, so that
these bytes may be written to disk.
"""

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from perfledger.collectors.wire import columns as at
from perfledger.collectors.wire.columns import Ints, Shorts
from perfledger.collectors.wire.jit import compiled, part, store8
from perfledger.collectors.wire.keys import (
    IS_CHANGED,
    IS_DENIED,
    KEPT,
    ON_LINK,
    ON_SPAN,
    PHASE,
    PROMOTED,
    find,
    is_entry,
)
from perfledger.collectors.wire.protobuf import LENGTH, Bytes, fill, next_field
from perfledger.collectors.wire.scan import FILLER, NO_ROOM, PRELUDE, leave
from perfledger.collectors.wire.simple_json import write_plain_array
from perfledger.collectors.wire.text import kept_length
from perfledger.schema.tables import SPANS

_TYPES = {column.name: column.type for column in SPANS.columns}
# For each promoted column: bits of an integer column, 0 for text.
_BITS = tuple(_TYPES[name].bit_width if _TYPES[name] != pa.string() else 0 for name in PROMOTED)
_PRELUDE_BYTES = len(PRELUDE)
_STRING_TAG = 0x0A


@compiled
def find_keys(
    data: Bytes,
    attributes: Shorts,
    first: int,
    last: int,
    found: Shorts,
    unknown: Shorts,
    text: int,
    slots: Shorts,
    hashes: NDArray[np.uint64],
    entries: Shorts,
    following: Shorts,
    seed: NDArray[np.uint64],
) -> int:
    """Set `found` to the entries of the attributes in a range; return how many are unknown.

    Their rows are in `unknown`; at most so many are looked for as it has room for.
    """
    base = np.int64(data.ctypes.data)
    missing, before = 0, 0
    for row in range(first, last):
        start, length = base + attributes[at.KEY, row], attributes[at.KEY_LENGTH, row]
        # Spans of a kind have their keys in one order. (Looked at here: a call costs more.)
        entry = following[before]
        if entry < 0 or not is_entry(start, length, text, entries, entry):
            entry = find(start, length, before, text, slots, hashes, entries, following, seed)
        found[row - first] = entry
        if entry >= 0:
            before = entry
            continue
        unknown[missing] = row
        missing += 1
        if missing == unknown.size:
            break
    return missing


@compiled
def decide(
    data: Bytes,
    spans: Shorts,
    attributes: Shorts,
    numbers: Ints,
    extents: Shorts,
    events: Shorts,
    links: Shorts,
    left: Shorts,
    count: Ints,
    keys: Shorts,
    key_entries: Shorts,
    begin: int,
    found: Shorts,
    entries: Shorts,
    codes: Shorts,
    seen: Ints,
    seen_at: Shorts,
    limit: int,
    serial: int,
) -> int:
    """Decide on each attribute from row `begin` on. Returns 0, or NO_ROOM with nothing to keep.

    `found` are their keys' entries, and `codes` the keys' numbers in this batch by entry; `serial`
    tells this call's owners from those of all others.
    """
    base = np.int64(data.ctypes.data)
    for row in range(begin, count[at.ATTRIBUTES]):
        if count[at.LEFT] + 2 > left.shape[1]:
            return NO_ROOM
        if count[at.KEYS] >= key_entries.size:
            return NO_ROOM
        entry, kind = found[row - begin], attributes[at.VALUE_KIND, row]
        if attributes[at.FATE, row] == at.ADDED:
            code = codes[entry]
            keys[row] = code if code >= 0 else _number(entry, codes, key_entries, count)
            continue
        if entries[IS_DENIED, entry]:
            _blank_value(base + extents[0, row], base + extents[1, row])
            attributes[at.FATE, row] = at.GONE
            count[at.DENIED] += 1
            continue
        if kind == at.TEXT:
            size = attributes[at.VALUE_LENGTH, row]
            kept = kept_length(base + attributes[at.VALUE, row], size, limit)
            if kept < 0:
                leave(left, count, at.LEFT_TEXT, row)
            elif kept != size:
                attributes[at.VALUE_LENGTH, row] = kept
                count[at.VALUES_CUT] += 1
                spans[at.CUT, span_of(attributes, events, links, row)] += 1
        elif kind == at.NESTED:
            written, used = -1, count[at.USED]
            if data.size - used > limit:
                first, last = base + extents[0, row], base + extents[1, row]
                written = write_plain_array(first, last, base + used, limit)
            if written < 0:
                leave(left, count, at.LEFT_NESTED, row)
            else:
                attributes[at.VALUE, row], attributes[at.VALUE_LENGTH, row] = used, written
                count[at.USED] += written
        elif kind == at.BYTES and attributes[at.VALUE_LENGTH, row] > limit:
            attributes[at.VALUE_LENGTH, row] = limit
            count[at.VALUES_CUT] += 1
            spans[at.CUT, span_of(attributes, events, links, row)] += 1
        if entries[IS_CHANGED, entry]:
            leave(left, count, at.LEFT_KEY, row)
        # Of equal keys the last one wins.
        kept_entry, owner = entries[KEPT, entry], attributes[at.OWNER, row]
        of = attributes[at.OF, row]
        if seen[owner, kept_entry] == serial + of:
            attributes[at.FATE, seen_at[owner, kept_entry]] = at.GONE
            # What the scan itself adds (a link's tracestate) is no sender's mistake.
            is_added = attributes[at.KEY, row] < _PRELUDE_BYTES and attributes[at.KEY_LENGTH, row]
            count[at.DUPLICATES] += 0 if is_added else 1
        seen[owner, kept_entry] = serial + of
        seen_at[owner, kept_entry] = row
        if owner == at.OF_SPAN:
            column = entries[ON_SPAN, kept_entry]
            if column >= 0 and _fits(kind, numbers[row], _BITS[column]):
                attributes[at.FATE, row] = column
        elif owner == at.OF_LINK and entries[ON_LINK, kept_entry] != at.PAIR:
            is_phase = entries[ON_LINK, kept_entry] == PHASE
            fits = kind == (at.TEXT if is_phase else at.INT)
            links[at.LINK_PHASE if is_phase else at.LINK_TOKENS, of] = row if fits else -1
            attributes[at.FATE, row] = at.GONE if fits else at.PAIR
        if attributes[at.FATE, row] == at.PAIR:
            code = codes[kept_entry]
            keys[row] = code if code >= 0 else _number(kept_entry, codes, key_entries, count)
    return 0


@part
def _number(entry: int, codes: Shorts, key_entries: Shorts, count: Ints) -> int:
    """Number a key that is new in its batch."""
    code = count[at.KEYS]
    codes[entry], key_entries[code] = code, entry
    count[at.KEYS] += 1
    return code


@compiled
def span_of(attributes: Shorts, events: Shorts, links: Shorts, row: int) -> int:
    """Return the span that an attribute is in, itself or through an event or a link."""
    of, owner = attributes[at.OF, row], attributes[at.OWNER, row]
    if owner == at.OF_SPAN:
        return of
    return links[at.LINK_OF, of] if owner == at.OF_LINK else events[at.EVENT_SPAN, of]


@part
def _fits(kind: int, number: int, bits: int) -> bool:
    if bits == 0:
        return kind == at.TEXT
    return kind == at.INT and (bits == 64 or -(1 << (bits - 1)) <= number < (1 << (bits - 1)))


@part
def _blank_value(position: int, end: int) -> None:
    """Overwrite every value of a KeyValue with a text of the same size on the wire."""
    while position < end:
        field, wire, start, position = next_field(position, end)
        if position < 0:
            return
        if field == 2 and wire == LENGTH and position - start >= 2:
            _write_filler(start, position)


@part
def _write_filler(start: int, end: int) -> None:
    """Write an AnyValue that is a text of dashes and fills the bytes exactly."""
    store8(start, _STRING_TAG)
    if end - start < 130:
        store8(start + 1, end - start - 2)
        fill(start + 2, end, FILLER)
        return
    # A length of five bytes, with zeros in front: valid, if not the shortest.
    length = end - start - 6
    for index in range(4):
        store8(start + 1 + index, (length >> (7 * index)) & 0x7F | 0x80)
    store8(start + 5, (length >> 28) & 0x7F)
    fill(start + 6, end, FILLER)
