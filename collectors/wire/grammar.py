"""OTLP's messages on the way to a span: which fields there are, and what to do with each.

As data, so that the scanner is one loop: opentelemetry-proto 1.11, trace.proto and common.proto.
"""

import numpy as np
from numpy.typing import NDArray

from perfledger.collectors.wire import columns as at
from perfledger.collectors.wire.protobuf import FIXED32, FIXED64, LENGTH, VARINT

# Messages, and the one that each is in; an attribute is in a span, an event or a link.
REQUEST, RESOURCE, SCOPE, SPAN, EVENT, LINK, STATUS, ATTRIBUTE, VALUE, LIST = range(10)
INSIDE = (-1, REQUEST, RESOURCE, SCOPE, SPAN, SPAN, SPAN, -1, ATTRIBUTE, VALUE)
MESSAGES = len(INSIDE)

# What to do with a field: go into a message (its number), or one of these.
UNKNOWN, IGNORE, PIECE, OFFSETS, IDENTITY, TIME, KIND, DROPPED, FLAGS = range(16, 25)
STATUS_CODE, STATUS_MESSAGE, EVENT_NAME, EVENT_TIME, LINK_ID, LINK_STATE = range(25, 31)
KEY, SET_VALUE, ELEMENT = range(31, 34)

MOST_FIELDS = 17
_MEANING = {
    (REQUEST, 1, LENGTH): (RESOURCE, 0),
    (RESOURCE, 1, LENGTH): (PIECE, at.PIECE_OF_RESOURCE),
    (RESOURCE, 2, LENGTH): (SCOPE, 0),
    (RESOURCE, 3, LENGTH): (PIECE, at.PIECE_OF_RESOURCE),
    (SCOPE, 1, LENGTH): (PIECE, at.PIECE_OF_SCOPE),
    (SCOPE, 2, LENGTH): (SPAN, 0),
    (SCOPE, 3, LENGTH): (PIECE, at.PIECE_OF_SCOPE),
    (SPAN, 1, LENGTH): (IDENTITY, at.TRACE),
    (SPAN, 2, LENGTH): (IDENTITY, at.SPAN),
    (SPAN, 3, LENGTH): (OFFSETS, at.STATE),
    (SPAN, 4, LENGTH): (IDENTITY, at.PARENT),
    (SPAN, 5, LENGTH): (OFFSETS, at.NAME),
    (SPAN, 6, VARINT): (KIND, 0),
    (SPAN, 7, FIXED64): (TIME, at.START_NS),
    (SPAN, 8, FIXED64): (TIME, at.END_NS),
    (SPAN, 9, LENGTH): (ATTRIBUTE, 0),
    (SPAN, 10, VARINT): (DROPPED, 0),
    (SPAN, 11, LENGTH): (EVENT, 0),
    (SPAN, 12, VARINT): (DROPPED, 1),
    (SPAN, 13, LENGTH): (LINK, 0),
    (SPAN, 14, VARINT): (DROPPED, 2),
    (SPAN, 15, LENGTH): (STATUS, 0),
    (SPAN, 16, FIXED32): (FLAGS, 0),
    (EVENT, 1, FIXED64): (EVENT_TIME, 0),
    (EVENT, 2, LENGTH): (EVENT_NAME, 0),
    (EVENT, 3, LENGTH): (ATTRIBUTE, 0),
    (EVENT, 4, VARINT): (IGNORE, 0),
    (LINK, 1, LENGTH): (LINK_ID, at.LINK_TRACE),
    (LINK, 2, LENGTH): (LINK_ID, at.LINK_SPAN),
    (LINK, 3, LENGTH): (LINK_STATE, 0),
    (LINK, 4, LENGTH): (ATTRIBUTE, 0),
    (LINK, 5, VARINT): (IGNORE, 0),
    (LINK, 6, FIXED32): (IGNORE, 0),
    (STATUS, 2, LENGTH): (STATUS_MESSAGE, 0),
    (STATUS, 3, VARINT): (STATUS_CODE, 0),
    (ATTRIBUTE, 1, LENGTH): (KEY, 0),
    (ATTRIBUTE, 2, LENGTH): (VALUE, 0),
    (ATTRIBUTE, 3, VARINT): (IGNORE, 0),
    (VALUE, 1, LENGTH): (SET_VALUE, at.TEXT),
    (VALUE, 2, VARINT): (SET_VALUE, at.BOOL),
    (VALUE, 3, VARINT): (SET_VALUE, at.INT),
    (VALUE, 4, FIXED64): (SET_VALUE, at.DOUBLE),
    (VALUE, 5, LENGTH): (SET_VALUE, at.NESTED),
    (VALUE, 6, LENGTH): (SET_VALUE, at.NESTED),
    (VALUE, 7, LENGTH): (SET_VALUE, at.BYTES),
    (VALUE, 8, VARINT): (SET_VALUE, at.EMPTY),
    (LIST, 1, LENGTH): (ELEMENT, 0),
}


def _actions() -> NDArray[np.int16]:
    """Return action and argument by message, field number and wire type, packed to stay in L1."""
    table = np.full((MESSAGES, MOST_FIELDS, 8), UNKNOWN << 8, np.int16)
    for (message, field, wire), (action, argument) in _MEANING.items():
        table[message, field, wire] = action << 8 | argument
    return table


ACTIONS = _actions()
