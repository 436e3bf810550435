"""The commonest shapes of OTLP's JSON, encoded without going field by field.

Attributes are most of a request, and nearly all are `{"key": "k", "value": {"stringValue": "v"}}`
or hold another scalar. Whatever is not exactly of such a shape goes the general way, which also
tells what is wrong with it; both give the same bytes.
"""

import struct

from perfledger.collectors.transport.json_fields import Encode, integer, varint

_MOST_KEYS, _LONGEST_KEY = 4096, 100
_LONGEST_TEXT_BYTES = 120
_SAFE_DIGITS = 18  # as many always fit into 64 bits

# KeyValue.value (2) that holds an AnyValue with string_value (1) of n bytes, or int_value (3).
_TEXT_OF = tuple(b"\x12" + bytes([n + 2, 0x0A, n]) for n in range(_LONGEST_TEXT_BYTES))
_INTEGER_OF = tuple(b"\x12" + bytes([n + 1, 0x18]) for n in range(11))

_pack_double = struct.Struct("<d").pack


def quick_key_value(general: Encode) -> Encode:
    """Return an encoder of KeyValue that knows the usual shapes; `general` takes the others."""
    heads: dict[str, bytes] = {}

    def encode(value: object, depth: int) -> bytes:
        try:
            key, content = value["key"], value["value"]  # type: ignore[index]
            head = heads.get(key)
            if head is not None and len(value) == 2:  # type: ignore[arg-type]
                ((kind, item),) = content.items()
                if (data := quick_value(kind, item)) is not None:
                    return head + data
        except (TypeError, KeyError, ValueError, AttributeError):
            return general(value, depth)
        if head is None:
            _learn(heads, key)
        return general(value, depth)

    return encode


def quick_value(kind: object, item: object) -> bytes | None:
    """Return KeyValue's field 2 for one scalar, or None where this is not of a usual shape."""
    if kind == "stringValue":
        if type(item) is str and len(data := item.encode()) < _LONGEST_TEXT_BYTES:
            return _TEXT_OF[len(data)] + data
    elif kind == "intValue":
        if is_short_number(item):
            data = varint(int(item))  # type: ignore[call-overload]
            return _INTEGER_OF[len(data)] + data
    elif kind == "doubleValue":
        if type(item) is float:
            return b"\x12\x09\x21" + _pack_double(item)
    elif kind == "boolValue" and type(item) is bool:
        return b"\x12\x02\x10\x01" if item else b"\x12\x02\x10\x00"
    return None


def quick_fixed64(tag: bytes) -> Encode:
    """Return the encoder of a fixed64, of which nearly all are times as decimal strings."""
    pack = struct.Struct("<Q").pack

    def encode(value: object, _: int) -> bytes:
        if type(value) is str and len(value) == 19 and value.isascii() and value.isdigit():
            return tag + pack(int(value))
        return tag + pack(integer(value, 0, 2**64 - 1))

    return encode


def is_short_number(value: object) -> bool:
    """Return whether this is a decimal string, not negative, that fits into 64 bits for sure."""
    return type(value) is str and len(value) <= _SAFE_DIGITS and value.isascii() and value.isdigit()


def _learn(heads: dict[str, bytes], key: object) -> None:
    """Keep the encoded form of a key. Keys are few; a sender that invents them does not stay."""
    if type(key) is str and len(data := key.encode()) < _LONGEST_KEY:
        if len(heads) >= _MOST_KEYS:
            heads.clear()
        heads[key] = b"\x0a" + varint(len(data)) + data
