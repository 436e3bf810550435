"""OTLP in JSON -> the same request in protobuf, driven by the descriptors of the messages.

So it is complete for every signal and field that the installed OpenTelemetry protocol knows.
Unknown fields are ignored, null is absent, and a bad id stays a bad id: its span is rejected
alone, later. Everything else that is not of its type refuses the request, with the path to it.
"""

from collections.abc import Callable
from threading import Lock

import orjson
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message

from perfledger.collectors.transport.json_fields import (
    SCALARS,
    Encode,
    MisfitError,
    base64,
    bytes_of,
    hex_id,
    string,
    tag_of,
    varint,
)
from perfledger.collectors.transport.json_quick import quick_fixed64, quick_key_value

# Messages in each other; protobuf's own parser stops there too.
MAX_DEPTH = 100
# Each value is an object of Python's for a moment: some 100 bytes, however few it had in the text.
MOST_VALUES = 2**21
_LONGEST_PATH = 300
_IDS = frozenset({"trace_id", "span_id", "parent_span_id"})
_DELIMITED = 2
_KEY_VALUE = "opentelemetry.proto.common.v1.KeyValue"


class UnreadableJsonError(Exception):
    """No JSON, or a value that is not of its field's type; `field` is the path to it."""

    def __init__(self, message: str, field: str) -> None:
        super().__init__(message)
        self.message = message
        self.field = field


class TooManyValuesError(Exception):
    """More values than are held at once."""


def to_protobuf(request: type[Message], body: bytes | bytearray) -> bytes:
    """Return the wire bytes of a `request` that is given as OTLP's JSON.

    Raises UnreadableJsonError, and TooManyValuesError over `MOST_VALUES`.
    """
    if body.count(b",") + body.count(b"[") + body.count(b"{") > MOST_VALUES:
        raise TooManyValuesError
    try:
        parsed = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise UnreadableJsonError(f"not JSON in UTF-8, at {place}", "body") from None
    try:
        return _encoder(request)(parsed, 1)
    except MisfitError as misfit:
        path = "".join(misfit.path).removeprefix(".") or "body"
        shown = path if len(path) <= _LONGEST_PATH else f"{path[:_LONGEST_PATH]}..."
        raise UnreadableJsonError(f"{shown} must be {misfit.wanted}", shown) from None


_messages: dict[str, Encode] = {}
# An encoder is of use only once those of its fields are made.
_making = Lock()


def _encoder(request: type[Message]) -> Encode:
    with _making:
        return _message(request.DESCRIPTOR)


def _message(descriptor: Descriptor) -> Encode:
    """Return the encoder of a message's content; made once for each type."""
    if (known := _messages.get(descriptor.full_name)) is not None:
        return known
    fields: dict[str, Encode] = {}
    find = fields.get

    def encode(value: object, depth: int) -> bytes:
        if type(value) is not dict:
            raise MisfitError("an object")
        if depth > MAX_DEPTH:
            raise MisfitError(f"nested less deeply: at most {MAX_DEPTH} messages")
        parts = []
        try:
            for name, item in value.items():
                if item is not None and (field := find(name)) is not None:
                    parts.append(field(item, depth))
        except MisfitError as misfit:
            misfit.path.insert(0, f".{name}")
            raise
        return b"".join(parts)

    whole = quick_key_value(encode) if descriptor.full_name == _KEY_VALUE else encode
    # Known before its fields are: an AnyValue holds AnyValues.
    _messages[descriptor.full_name] = whole
    fields.update((field.json_name, _field(field)) for field in descriptor.fields)
    return whole


def _field(field: FieldDescriptor) -> Encode:
    if field.type == FieldDescriptor.TYPE_FIXED64 and not field.is_repeated:
        return quick_fixed64(tag_of(field, 1))
    if field.type in SCALARS:
        wire_type, content = SCALARS[field.type]
        if field.is_repeated:
            return _packed(tag_of(field, _DELIMITED), content)
        tag = tag_of(field, wire_type)
        return lambda value, _: tag + content(value)
    one = _one_delimited(field)
    return _repeated(one) if field.is_repeated else one


def _one_delimited(field: FieldDescriptor) -> Encode:
    tag = tag_of(field, _DELIMITED)
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return _submessage(tag, _message(field.message_type))
    if field.type == FieldDescriptor.TYPE_STRING:
        return string(tag)
    return bytes_of(tag, hex_id if field.name in _IDS else base64)


def _submessage(tag: bytes, message: Encode) -> Encode:
    def encode(value: object, depth: int) -> bytes:
        content = message(value, depth + 1)
        return tag + varint(len(content)) + content

    return encode


def _repeated(one: Encode) -> Encode:
    """Return the encoder of a list; null in it is an empty message, as an AnyValue may be."""

    def encode(value: object, depth: int) -> bytes:
        items, parts = _items(value), []
        try:
            for item in items:
                parts.append(one({} if item is None else item, depth))
        except MisfitError as misfit:
            misfit.path.insert(0, f"[{len(parts)}]")
            raise
        return b"".join(parts)

    return encode


def _packed(tag: bytes, content: Callable[[object], bytes]) -> Encode:
    def encode(value: object, _: int) -> bytes:
        items, parts = _items(value), []
        try:
            for item in items:
                parts.append(content(item))
        except MisfitError as misfit:
            misfit.path.insert(0, f"[{len(parts)}]")
            raise
        data = b"".join(parts)
        return tag + varint(len(data)) + data if parts else b""

    return encode


def _items(value: object) -> list[object]:
    if type(value) is not list:
        raise MisfitError("a list")
    return value
