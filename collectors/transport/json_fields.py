"""One value of OTLP's JSON -> its bytes on the protobuf wire, for each type of field.

OTLP's JSON is proto3's, except that ids are hexadecimal, enums are integers, and names are
lowerCamelCase only (OTLP 1.11, "JSON Protobuf Encoding"). A value of another type is refused with
the path to it and never guessed; no message quotes a value.
"""

import re
import struct
from base64 import b64decode
from binascii import Error as NotBase64
from binascii import unhexlify
from collections.abc import Callable, Mapping

from google.protobuf.descriptor import FieldDescriptor

# Of a value that is not null; the depth is for messages only.
Encode = Callable[[object, int], bytes]

# What stands for an id that is not hexadecimal: no id, so that the span alone is rejected.
NOT_AN_ID = b"\x00"
_JSON_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?", re.ASCII)
_NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": -float("inf")}
_URL_SAFE = str.maketrans("-_", "+/")
_LONGEST_INTEGER = 20  # digits of 2**64, with a sign for -2**63


class MisfitError(Exception):
    """A value that is not of its field's type; `path` grows on the way out."""

    def __init__(self, wanted: str) -> None:
        super().__init__(wanted)
        self.wanted = wanted
        self.path: list[str] = []


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_SHORT = tuple(_varint(value) for value in range(2**14))


def varint(value: int) -> bytes:
    """Return the wire form of an unsigned integer."""
    return _SHORT[value] if value < 2**14 else _varint(value)


def tag_of(field: FieldDescriptor, wire_type: int) -> bytes:
    """Return the bytes that announce a field on the wire."""
    return varint(field.number << 3 | wire_type)


def integer(value: object, low: int, high: int) -> int:
    """Return an integer in low..high from a number or a decimal string. Raises MisfitError."""
    if type(value) is str and len(value) <= _LONGEST_INTEGER and value.isascii():
        number = int(value) if value.removeprefix("-").isdigit() else None
    elif type(value) is float and value.is_integer():
        number = int(value)
    else:
        number = value if type(value) is int else None
    if number is None or not low <= number <= high:
        raise MisfitError(f"an integer from {low} to {high}")
    return number


def double(value: object) -> float:
    """Return a double from a number, a number in a string, or the names of those that are none."""
    if type(value) is float:
        return value
    if type(value) is int:
        return float(value)
    if type(value) is str:
        if value in _NOT_FINITE:
            return _NOT_FINITE[value]
        if _JSON_NUMBER.fullmatch(value):
            return float(value)
    raise MisfitError('a number, "NaN", "Infinity" or "-Infinity"')


def base64(value: object) -> bytes:
    """Return bytes from base64, URL-safe or not, padded or not. Raises MisfitError."""
    if type(value) is str:
        plain = value.translate(_URL_SAFE).rstrip("=")
        try:
            return b64decode(plain + "=" * (-len(plain) % 4), validate=True)
        except (NotBase64, ValueError):
            pass
    raise MisfitError("bytes in base64")


def hex_id(value: object) -> bytes:
    """Return an id from hexadecimal, in either case; `NOT_AN_ID` where it is none."""
    try:
        return unhexlify(value)  # type: ignore[arg-type]
    except (NotBase64, TypeError, ValueError):
        return NOT_AN_ID


def string(tag: bytes) -> Encode:
    """Return the encoder of a string."""

    def encode(value: object, _: int) -> bytes:
        if type(value) is not str:
            raise MisfitError("a string")
        data = value.encode()
        return tag + varint(len(data)) + data

    return encode


def bytes_of(tag: bytes, read: Callable[[object], bytes]) -> Encode:
    """Return the encoder of bytes, which JSON spells one way or another."""

    def encode(value: object, _: int) -> bytes:
        data = read(value)
        return tag + varint(len(data)) + data

    return encode


def packed_number(form: str, read: Callable[[object], float]) -> Callable[[object], bytes]:
    """Return the encoder, without a tag, of a number of fixed size; `form` is of struct."""
    pack = struct.Struct(form).pack
    return lambda value: pack(read(value))


def varint_number(read: Callable[[object], int]) -> Callable[[object], bytes]:
    """Return the encoder, without a tag, of an integer; a negative one takes 64 bits."""
    return lambda value: varint(read(value) & 2**64 - 1)


def between(low: int, high: int) -> Callable[[object], int]:
    """Return a reader of integers in low..high."""
    return lambda value: integer(value, low, high)


def enum_number(value: object) -> int:
    """Return an enum's value, an integer; a name is refused, as OTLP says."""
    if type(value) is not int or not -(2**31) <= value < 2**31:
        raise MisfitError("an enum's value as an integer, not its name")
    return value


def truth(value: object) -> int:
    """Return 0 or 1. Raises MisfitError."""
    if type(value) is not bool:
        raise MisfitError("true or false")
    return int(value)


_INT32, _UINT32 = between(-(2**31), 2**31 - 1), between(0, 2**32 - 1)
_INT64, _UINT64 = between(-(2**63), 2**63 - 1), between(0, 2**64 - 1)


def zigzag(read: Callable[[object], int]) -> Callable[[object], int]:
    """Return a reader of sint32 and sint64, which the wire has as 0, -1, 1, -2, ..."""

    def encode(value: object) -> int:
        number = read(value)
        return number << 1 if number >= 0 else (-number << 1) - 1

    return encode


# Wire type and content of each scalar that is not delimited.
SCALARS: Mapping[int, tuple[int, Callable[[object], bytes]]] = {
    FieldDescriptor.TYPE_DOUBLE: (1, packed_number("<d", double)),
    FieldDescriptor.TYPE_FIXED64: (1, packed_number("<Q", _UINT64)),
    FieldDescriptor.TYPE_SFIXED64: (1, packed_number("<q", _INT64)),
    FieldDescriptor.TYPE_FIXED32: (5, packed_number("<I", _UINT32)),
    FieldDescriptor.TYPE_INT64: (0, varint_number(_INT64)),
    FieldDescriptor.TYPE_UINT64: (0, varint_number(_UINT64)),
    FieldDescriptor.TYPE_INT32: (0, varint_number(_INT32)),
    FieldDescriptor.TYPE_UINT32: (0, varint_number(_UINT32)),
    FieldDescriptor.TYPE_SINT32: (0, varint_number(zigzag(_INT32))),
    FieldDescriptor.TYPE_SINT64: (0, varint_number(zigzag(_INT64))),
    FieldDescriptor.TYPE_ENUM: (0, varint_number(enum_number)),
    FieldDescriptor.TYPE_BOOL: (0, varint_number(truth)),
}
