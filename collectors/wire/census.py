"""How many messages a request holds, counted on its bytes before any parser makes objects of them.

An object takes a hundred bytes and some microseconds, and on the wire only two: a small request
could otherwise cost minutes and gigabytes.
"""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from perfledger.collectors.wire.jit import compiled
from perfledger.collectors.wire.protobuf import LENGTH, Bytes, next_field

MOST_MESSAGES = 1_000_000
_MOST_FIELDS = 32
_DEEPEST = 24
# What a field leads to, beside the number of a message: nothing, or bytes that count as one.
_NOTHING, _ELEMENT = -1, -2
_TYPE_MESSAGE, _TYPE_BYTES = 11, 12  # FieldDescriptor


def has_too_many_messages(body: bytes, request: Any) -> bool:
    """Return whether a request of this class of lenient_messages has over `MOST_MESSAGES`."""
    data = np.frombuffer(body or b"\0", np.uint8)
    counted: int = _count(data, len(body), _children(request), MOST_MESSAGES)
    return counted > MOST_MESSAGES


@lru_cache
def _children(request: Any) -> NDArray[np.int16]:
    """Return by message and field what is inside; message 0 is the request."""
    kinds = [request.DESCRIPTOR]
    for kind in kinds:  # which grows while it is gone through
        inside = (field.message_type for field in kind.fields if field.type == _TYPE_MESSAGE)
        kinds += [found for found in dict.fromkeys(inside) if found not in kinds]
    table = np.full((len(kinds), _MOST_FIELDS), _NOTHING, np.int16)
    for number, kind in enumerate(kinds):
        for field in kind.fields:
            if field.number < _MOST_FIELDS and field.type == _TYPE_MESSAGE:
                table[number, field.number] = kinds.index(field.message_type)
            elif field.number < _MOST_FIELDS and field.type == _TYPE_BYTES and field.is_repeated:
                table[number, field.number] = _ELEMENT
    return table


@compiled
def _count(data: Bytes, size: int, children: NDArray[np.int16], most: int) -> int:
    """Count messages within messages until there are more than `most`; damaged ones end it."""
    position = np.int64(data.ctypes.data)
    ends, kinds = np.empty(_DEEPEST, np.int64), np.zeros(_DEEPEST, np.int64)
    ends[0], depth, counted = position + size, 0, 0
    while depth >= 0 and counted <= most:
        if position >= ends[depth]:
            depth -= 1
            continue
        field, wire, value, position = next_field(position, ends[depth])
        if position < 0:
            break
        child = children[kinds[depth], field] if field < _MOST_FIELDS else _NOTHING
        if wire != LENGTH or child == _NOTHING:
            continue
        counted += 1
        if child >= 0 and depth + 1 < _DEEPEST:
            depth += 1
            ends[depth], kinds[depth], position = position, child, value
    return counted
