"""One pass over an export request: what it holds goes into `Columns` as numbers.

grammar.py says what a field of a message means; the kernel is one loop over fields, with the
messages that it is inside of on a small stack. (One loop, and not a function for each message:
arrays handed to a function cost more than reading a field does.)

A span that is wrong in itself is taken back, blanked and counted, and the others stay. What OTLP
does not know is blanked as well: the bytes go to disk, and nobody has looked at what is in them.
More than `MOST_GROUPS` groups of spans are no request: each costs Python a look.
"""

import numpy as np

from perfledger.collectors.wire import columns as at
from perfledger.collectors.wire import grammar as otlp
from perfledger.collectors.wire.columns import Ints, Shorts
from perfledger.collectors.wire.jit import compiled, load8, part, store8
from perfledger.collectors.wire.plain_attributes import read_plain
from perfledger.collectors.wire.protobuf import (
    FIXED32,
    FIXED64,
    GROUP,
    LENGTH,
    VARINT,
    Bytes,
    fill,
    next_field,
)
from perfledger.collectors.wire.text import kept_length

MALFORMED, NO_ROOM = -1, -2
MOST_ELEMENTS = 2_000_000
_ELEMENTS_A_SPAN = 8  # what its row takes, beside those of an attribute
MOST_GROUPS = 8192
LONGEST_MESSAGE_BYTES = 256
FILLER = 0x2D  # a dash, where a text was
_UNKNOWN_TAG = 15 << 3 | LENGTH

NO_TRACE, NO_SPAN, BAD_PARENT, TOO_LATE, BROKEN, TOO_MANY = range(len(at.REASONS))

# Names that a scan adds itself stand at the start of the buffer.
DROPPED_NAMES = (
    b"otel.dropped_attributes_count",
    b"otel.dropped_events_count",
    b"otel.dropped_links_count",
)
TRACE_STATE = b"w3c.tracestate"
PRELUDE = b"".join(DROPPED_NAMES) + TRACE_STATE
_DROPPED_LENGTHS = tuple(map(len, DROPPED_NAMES))
_DROPPED_AT = (0, _DROPPED_LENGTHS[0], sum(_DROPPED_LENGTHS[:2]))
_AT_STATE, _STATE_LENGTH = len(PRELUDE) - len(TRACE_STATE), len(TRACE_STATE)
_EXCEPTION = np.frombuffer(b"exception", np.uint8)


@compiled
def scan_request(
    data: Bytes,
    spans: Shorts,
    times: Ints,
    attributes: Shorts,
    numbers: Ints,
    extents: Shorts,
    events: Shorts,
    event_times: Ints,
    links: Shorts,
    groups: Shorts,
    pieces: Shorts,
    left: Shorts,
    count: Ints,
    first: int,
    last: int,
    limit: int,
) -> int:
    """Scan an ExportTraceServiceRequest at `data[first:last]`; texts are kept up to `limit` bytes.

    Returns the end, MALFORMED, or NO_ROOM: then the columns are to be grown and it is scanned
    again. `count` is what it was, but for rows added and for what was found.
    """
    base = np.int64(data.ctypes.data)
    position = base + first
    ends = np.empty(otlp.MESSAGES, np.int64)
    ends[otlp.REQUEST] = base + last
    saved, dropped = count.copy(), np.zeros(3, np.int64)
    message, holder, resource, span_tag = otlp.REQUEST, otlp.SPAN, np.int64(-1), np.int64(0)
    most_groups = count[at.GROUPS] + MOST_GROUPS
    span, attribute, event, link = np.int64(0), np.int64(0), np.int64(0), np.int64(0)
    owner, of, has_exception = np.int64(0), np.int64(0), False
    state, state_length = np.int64(0), np.int64(0)
    while True:
        fault = -1
        if position >= ends[message]:
            # Leave a message.
            if message == otlp.REQUEST:
                return last
            if message == otlp.SPAN:
                if count[at.LEFT] + 3 > left.shape[1] or count[at.ATTRIBUTES] + 3 > numbers.size:
                    return NO_ROOM
                if has_exception and spans[at.MESSAGE_LENGTH, span]:
                    begun = base + spans[at.MESSAGE, span]
                    fill(begun, begun + spans[at.MESSAGE_LENGTH, span], FILLER)
                    spans[at.MESSAGE_LENGTH, span] = 0
                    count[at.DENIED] += 1
                _check(base, spans, at.NAME, span, limit, left, count, at.LEFT_NAME)
                _check(base, spans, at.STATE, span, limit, left, count, at.LEFT_STATE)
                longest = LONGEST_MESSAGE_BYTES
                _check(base, spans, at.MESSAGE, span, longest, left, count, at.LEFT_MESSAGE)
                for index in range(3):
                    if dropped[index]:
                        row = count[at.ATTRIBUTES]
                        _begin_attribute(attributes, numbers, count, at.OF_SPAN, span)
                        attributes[at.KEY, row] = _DROPPED_AT[index]
                        attributes[at.KEY_LENGTH, row] = _DROPPED_LENGTHS[index]
                        attributes[at.VALUE_KIND, row] = at.INT
                        attributes[at.FATE, row] = at.ADDED
                        numbers[row] = dropped[index]
                spans[at.LAST_ATTRIBUTE, span] = count[at.ATTRIBUTES]
                spans[at.LAST_EVENT, span] = count[at.EVENTS]
                spans[at.LAST_LINK, span] = count[at.LINKS]
                fault = _fault(spans, times, span, count[at.ELEMENTS])
                if fault < 0:
                    spans[at.CUT, span] = count[at.VALUES_CUT] - saved[at.VALUES_CUT]
                    count[at.SPANS] += 1
                    count[at.ITEMS] += 1
            elif message == otlp.EVENT:
                if count[at.LEFT] >= left.shape[1]:
                    return NO_ROOM
                events[at.EVENT_LAST, event] = count[at.ATTRIBUTES]
                has_exception |= _is_exception(
                    base + events[at.EVENT_NAME, event], events[at.EVENT_NAME_LENGTH, event]
                )
                _check(base, events, at.EVENT_NAME, event, limit, left, count, at.LEFT_EVENT_NAME)
            elif message == otlp.LINK:
                if state_length:
                    row = count[at.ATTRIBUTES]
                    if row >= numbers.size:
                        return NO_ROOM
                    _begin_attribute(attributes, numbers, count, at.OF_LINK, link)
                    attributes[at.KEY, row] = _AT_STATE
                    attributes[at.KEY_LENGTH, row] = _STATE_LENGTH
                    attributes[at.VALUE_KIND, row] = at.TEXT
                    attributes[at.VALUE, row] = state
                    attributes[at.VALUE_LENGTH, row] = state_length
                links[at.LINK_LAST, link] = count[at.ATTRIBUTES]
            if fault < 0:
                message = holder if message == otlp.ATTRIBUTE else otlp.INSIDE[message]
                continue
        if fault < 0:
            begun = position
            field, wire, value, position = next_field(position, ends[message])
            if position < 0:
                if message <= otlp.SCOPE:
                    return MALFORMED
                fault = BROKEN
            elif count[at.ELEMENTS] > MOST_ELEMENTS:
                fault = TOO_MANY
        if fault >= 0:
            # Take back the span that this is in, and go on behind it.
            kept_items = count[at.ITEMS]
            for index in range(count.size):
                count[index] = saved[index]
            count[at.ITEMS] = kept_items + 1
            count[at.FIRST_REASON + fault] += 1
            position = ends[otlp.SPAN]
            _disown(span_tag, base + spans[at.BODY, span], position)
            message = otlp.SCOPE
            continue
        action, argument = np.int64(otlp.UNKNOWN), np.int64(0)
        if field < otlp.MOST_FIELDS:
            packed = np.int64(otlp.ACTIONS[message, field, wire])
            action, argument = packed >> 8, packed & 0xFF
        if action == otlp.SET_VALUE:
            # Another value after an array or a map: what it replaces may hold content.
            count[at.UNSAFE] += attributes[at.VALUE_KIND, attribute] == at.NESTED
            attributes[at.VALUE_KIND, attribute] = argument
            if argument == at.NESTED:
                ends[otlp.LIST], position, message = position, value, otlp.LIST
            elif wire == LENGTH:
                attributes[at.VALUE, attribute] = value - base
                attributes[at.VALUE_LENGTH, attribute] = position - value
            else:
                numbers[attribute] = value
        elif action == otlp.KEY:
            attributes[at.KEY, attribute] = value - base
            attributes[at.KEY_LENGTH, attribute] = position - value
        elif action == otlp.ELEMENT:
            count[at.ELEMENTS] += 1
        elif action == otlp.VALUE:
            ends[otlp.VALUE], position, message = position, value, otlp.VALUE
        elif action == otlp.ATTRIBUTE:
            attribute = count[at.ATTRIBUTES]
            if attribute >= numbers.size:
                return NO_ROOM
            owner = (
                at.OF_SPAN
                if message == otlp.SPAN
                else at.OF_EVENT
                if message == otlp.EVENT
                else at.OF_LINK
            )
            of = span if message == otlp.SPAN else event if message == otlp.EVENT else link
            _begin_attribute(attributes, numbers, count, owner, of)
            extents[0, attribute], extents[1, attribute] = value - base, position - base
            kind, key_length, start, number = read_plain(value, position)
            if kind >= 0:
                attributes[at.KEY, attribute] = value + 2 - base
                attributes[at.KEY_LENGTH, attribute] = key_length
                attributes[at.VALUE_KIND, attribute] = kind
                numbers[attribute] = number
                if kind == at.TEXT:
                    attributes[at.VALUE, attribute] = start - base
                    attributes[at.VALUE_LENGTH, attribute] = position - start
            else:
                holder = message
                ends[otlp.ATTRIBUTE], position, message = position, value, otlp.ATTRIBUTE
        elif action == otlp.IDENTITY:
            size = 16 if argument == at.TRACE else 8
            found = _id_at(base, value, position - value, size)
            if argument == at.PARENT and position != value and position - value != size:
                found = -2
            spans[argument, span] = found
        elif action == otlp.OFFSETS:
            spans[argument, span], spans[argument + 1, span] = value - base, position - value
        elif action == otlp.TIME:
            times[argument, span] = value
        elif action == otlp.KIND:
            kind = np.int32(value)
            spans[at.KIND, span] = kind if 0 <= kind <= 5 else 0
        elif action == otlp.EVENT:
            event = count[at.EVENTS]
            if event >= events.shape[1]:
                return NO_ROOM
            count[at.EVENTS] += 1
            count[at.ELEMENTS] += 1
            events[at.EVENT_NAME, event], events[at.EVENT_NAME_LENGTH, event] = 0, 0
            events[at.EVENT_FIRST, event] = count[at.ATTRIBUTES]
            events[at.EVENT_SPAN, event] = span
            event_times[event] = 0
            ends[otlp.EVENT], position, message = position, value, otlp.EVENT
        elif action == otlp.EVENT_TIME:
            event_times[event] = value
        elif action == otlp.EVENT_NAME:
            events[at.EVENT_NAME, event] = value - base
            events[at.EVENT_NAME_LENGTH, event] = position - value
        elif action == otlp.LINK:
            link = count[at.LINKS]
            if link >= links.shape[1]:
                return NO_ROOM
            count[at.LINKS] += 1
            count[at.ELEMENTS] += 1
            for index in range(at.LINK_FIELDS):
                links[index, link] = -1
            links[at.LINK_FIRST, link] = count[at.ATTRIBUTES]
            links[at.LINK_OF, link] = span
            state_length = 0
            ends[otlp.LINK], position, message = position, value, otlp.LINK
        elif action == otlp.LINK_ID:
            size = 16 if argument == at.LINK_TRACE else 8
            links[argument, link] = _id_at(base, value, position - value, size)
        elif action == otlp.LINK_STATE:
            state, state_length = value - base, position - value
        elif action == otlp.STATUS:
            ends[otlp.STATUS], position, message = position, value, otlp.STATUS
        elif action == otlp.STATUS_CODE:
            code = np.int32(value)
            spans[at.STATUS, span] = code if 0 <= code <= 2 else 0
        elif action == otlp.STATUS_MESSAGE:
            # A message that another one replaces is read by nobody.
            begun = base + spans[at.MESSAGE, span]
            fill(begun, begun + spans[at.MESSAGE_LENGTH, span], FILLER)
            spans[at.MESSAGE, span], spans[at.MESSAGE_LENGTH, span] = value - base, position - value
        elif action == otlp.DROPPED:
            dropped[argument] = value & 0xFFFFFFFF
        elif action == otlp.FLAGS:
            spans[at.FLAGS, span] = np.int32(np.uint32(value))
        elif action == otlp.SPAN:
            span = count[at.SPANS]
            if span >= spans.shape[1]:
                return NO_ROOM
            for index in range(count.size):
                saved[index] = count[index]
            _begin_span(spans, times, count, span)
            count[at.ELEMENTS] += _ELEMENTS_A_SPAN
            spans[at.BODY, span], spans[at.BODY_LENGTH, span] = value - base, position - value
            dropped[0], dropped[1], dropped[2] = 0, 0, 0
            has_exception, span_tag = False, begun
            ends[otlp.SPAN], position, message = position, value, otlp.SPAN
        elif action == otlp.PIECE:
            row = count[at.PIECES]
            if row >= 4 * MOST_GROUPS:
                return MALFORMED
            if row >= pieces.shape[1]:
                return NO_ROOM
            pieces[at.PIECE_KIND, row] = argument
            pieces[at.PIECE_OF, row] = (
                resource if argument == at.PIECE_OF_RESOURCE else count[at.GROUPS] - 1
            )
            pieces[at.PIECE_START, row] = begun - base
            pieces[at.PIECE_LENGTH, row] = position - begun
            count[at.PIECES] += 1
        elif action == otlp.SCOPE:
            if count[at.GROUPS] >= most_groups:
                return MALFORMED
            if count[at.GROUPS] >= groups.shape[1]:
                return NO_ROOM
            groups[at.GROUP_RESOURCE, count[at.GROUPS]] = resource
            count[at.GROUPS] += 1
            ends[otlp.SCOPE], position, message = position, value, otlp.SCOPE
        elif action == otlp.RESOURCE:
            resource += 1
            ends[otlp.RESOURCE], position, message = position, value, otlp.RESOURCE
        elif action == otlp.UNKNOWN:
            if wire == LENGTH:
                fill(value, position, 0)
            else:
                _blank_number(begun, position, wire)
            count[at.UNSAFE] += wire == GROUP


@part
def _disown(tag: int, start: int, end: int) -> None:
    """Make a span zeros in a field that nobody knows: what is forwarded stays valid protobuf."""
    store8(tag, _UNKNOWN_TAG | load8(tag) & 0x80)
    fill(start, end, 0)


@part
def _blank_number(start: int, end: int, wire: int) -> None:
    """Set a number behind its tag to 0, at the size that it has."""
    if wire != VARINT:
        fill(end - (8 if wire == FIXED64 else 4 if wire == FIXED32 else 0), end, 0)
        return
    position = end - 1
    store8(position, 0)
    while position - 1 > start and load8(position - 1) & 0x80:
        position -= 1
        store8(position, 0x80)


@part
def _begin_span(spans: Shorts, times: Ints, count: Ints, span: int) -> None:
    for index in range(at.SPAN_FIELDS):
        spans[index, span] = 0
    spans[at.TRACE, span] = -1
    spans[at.SPAN, span] = -1
    spans[at.PARENT, span] = -1
    times[at.START_NS, span] = 0
    times[at.END_NS, span] = 0
    spans[at.GROUP, span] = count[at.GROUPS] - 1
    spans[at.FIRST_ATTRIBUTE, span] = count[at.ATTRIBUTES]
    spans[at.FIRST_EVENT, span] = count[at.EVENTS]
    spans[at.FIRST_LINK, span] = count[at.LINKS]


@part
def _begin_attribute(attributes: Shorts, numbers: Ints, count: Ints, owner: int, of: int) -> None:
    row = count[at.ATTRIBUTES]
    attributes[at.KEY, row] = 0
    attributes[at.KEY_LENGTH, row] = 0
    attributes[at.OWNER, row] = owner
    attributes[at.OF, row] = of
    attributes[at.VALUE_KIND, row] = at.EMPTY
    attributes[at.VALUE, row] = 0
    attributes[at.VALUE_LENGTH, row] = 0
    attributes[at.FATE, row] = at.PAIR
    numbers[row] = 0
    count[at.ATTRIBUTES] += 1
    count[at.ELEMENTS] += 1


@part
def _fault(spans: Shorts, times: Ints, span: int, elements: int) -> int:
    """Return why a span can never be stored, or -1; repair its times."""
    if spans[at.TRACE, span] < 0:
        return NO_TRACE
    if spans[at.SPAN, span] < 0:
        return NO_SPAN
    if spans[at.PARENT, span] == -2:
        return BAD_PARENT
    # Unsigned on the wire: what is negative here is after the year 2262.
    start_ns, end_ns = times[at.START_NS, span], times[at.END_NS, span]
    if start_ns < 0:
        return TOO_LATE
    if start_ns == 0 and end_ns >= 0:
        times[at.START_NS, span] = end_ns
        spans[at.REPAIRED_TIME, span] = 1
    elif end_ns < start_ns:
        times[at.END_NS, span] = start_ns
        spans[at.REPAIRED_TIME, span] = 1
    return TOO_MANY if elements > MOST_ELEMENTS else -1


@part
def _id_at(base: int, start: int, length: int, expected: int) -> int:
    """Return where an id stands, or -1 where it has another length or is all zero."""
    seen = 0
    if length == expected:
        for position in range(start, start + length):
            seen |= load8(position)
    return start - base if seen else -1


@part
def _is_exception(start: int, length: int) -> bool:
    if length != _EXCEPTION.size:
        return False
    different = 0
    for index in range(length):
        different |= load8(start + index) ^ _EXCEPTION[index]
    return different == 0


@part
def leave(left: Shorts, count: Ints, what: int, row: int) -> None:
    """Note what Python has to do; the caller has made sure of room."""
    left[at.LEFT_WHAT, count[at.LEFT]] = what
    left[at.LEFT_ROW, count[at.LEFT]] = row
    count[at.LEFT] += 1


@part
def _check(
    base: int,
    table: Shorts,
    begin: int,
    row: int,
    limit: int,
    left: Shorts,
    count: Ints,
    what: int,
) -> None:
    """Cut a text, whose length stands behind its offset, or leave one that is not UTF-8."""
    kept = kept_length(base + table[begin, row], table[begin + 1, row], limit)
    if kept < 0:
        leave(left, count, what, row)
    elif kept != table[begin + 1, row]:
        table[begin + 1, row] = kept
        count[at.VALUES_CUT] += 1
