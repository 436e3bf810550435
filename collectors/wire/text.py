"""UTF-8 in kernels: whether bytes are text, and where text may be cut. Places are addresses."""

import numpy as np

from perfledger.collectors.wire.jit import load8, load64, part

_HIGH_BITS = np.int64(-0x7F7F7F7F7F7F7F80)  # 0x8080808080808080


@part
def is_ascii(start: int, end: int) -> bool:
    """Return whether no byte is above 127; eight at a time."""
    seen, position = np.int64(0), start
    while end - position >= 8:
        seen |= load64(position)
        position += 8
    if position < end and end - start >= 8:
        seen |= load64(end - 8)
        position = end
    while position < end:
        seen |= load8(position)
        position += 1
    return seen & _HIGH_BITS == 0


@part
def is_utf8(start: int, end: int) -> bool:
    """Return whether bytes are UTF-8 (Unicode 15, table 3-7: no surrogates, nothing overlong)."""
    position = start
    while position < end:
        byte = load8(position)
        position += 1
        if byte < 0x80:
            continue
        more, low, high = 0, 0x80, 0xBF
        if 0xC2 <= byte <= 0xDF:
            more = 1
        elif 0xE0 <= byte <= 0xEF:
            more = 2
            low = 0xA0 if byte == 0xE0 else 0x80
            high = 0x9F if byte == 0xED else 0xBF
        elif 0xF0 <= byte <= 0xF4:
            more = 3
            low = 0x90 if byte == 0xF0 else 0x80
            high = 0x8F if byte == 0xF4 else 0xBF
        else:
            return False
        if end - position < more or load8(position) < low or load8(position) > high:
            return False
        for index in range(1, more):
            if load8(position + index) & 0xC0 != 0x80:
                return False
        position += more
    return True


@part
def kept_length(start: int, length: int, limit: int) -> int:
    """Return how many bytes of a text are kept, or -1 where it is not UTF-8.

    At most `limit`, and whole characters.
    """
    if not is_ascii(start, start + length) and not is_utf8(start, start + length):
        return -1
    if length <= limit:
        return length
    kept = limit
    while kept > 0 and load8(start + kept) & 0xC0 == 0x80:
        kept -= 1
    return kept
