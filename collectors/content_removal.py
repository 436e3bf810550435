"""Takes content out of a whole request, as message objects: thorough, and slow.

For what is not blanked in place: metrics and logs, and requests of spans that hold content deep
inside a value, or fields that OTLP does not have. What is left may be written to disk.
"""

from collections.abc import Iterable
from typing import Any

from google.protobuf.message import DecodeError, Message

from perfledger.collectors.attribute_values import LONGEST_NESTED_BYTES, MAX_DEPTH, LookedAt
from perfledger.collectors.content import is_denied, is_denied_within, status_repeats_content
from perfledger.collectors.lenient_messages import ANY_VALUE, KEY_VALUE

_MESSAGE = 11  # FieldDescriptor.TYPE_MESSAGE


def remove_content(message: Any) -> int:
    """Remove denied values, log bodies, exemplars and unknown fields; return how many went.

    `message` is a request of lenient_messages, or a part of one; it is changed in place.
    Exemplars and unknown fields are not counted as denied.
    """
    message.DiscardUnknownFields()
    return _remove(message)


def _remove(message: Any) -> int:
    removed = _of_its_own(message)
    for field, value in message.ListFields():
        if field.type != _MESSAGE:
            continue
        if field.message_type.name == "KeyValue":
            removed += _from_attributes(value)
        elif field.is_repeated:
            removed += sum(_remove(element) for element in value)
        else:
            removed += _remove(value)
    return removed


def _of_its_own(message: Any) -> int:
    """Remove what is content by its place: a log's body, an error's text, an exemplar."""
    name = message.DESCRIPTOR.name
    if name == "LogRecord" and message.HasField("body"):
        message.ClearField("body")
        return 1
    if name == "Span" and message.status.message:
        names = (event.name.decode(errors="replace") for event in message.events)
        if status_repeats_content(names):
            message.status.ClearField("message")
            return 1
    if "exemplars" in message.DESCRIPTOR.fields_by_name:
        message.ClearField("exemplars")
    return 0


def _from_attributes(attributes: Any) -> int:
    removed = 0
    for index in range(len(attributes) - 1, -1, -1):
        key = attributes[index].key.decode(errors="replace")
        if is_denied(key):
            del attributes[index]
            removed += 1
        else:
            removed += _Value(attributes[index].value, key).removed
    return removed


class _Value:
    """The value of one attribute while content is taken out of it; `removed` counts what went."""

    def __init__(self, value: Any, key: str) -> None:
        self.removed = 0
        self._looked_at = LookedAt()
        self._clean(value, (key,), 1)

    def _clean(self, value: Any, path: tuple[str, ...], depth: int) -> None:
        """Clean an array or a map; below the deepest level all of it goes."""
        value.DiscardUnknownFields()
        kind = value.WhichOneof("value")
        if kind not in ("array_value", "kvlist_value"):
            return
        if depth > 1 and value.ByteSize() > LONGEST_NESTED_BYTES:
            value.ClearField(kind)
            return
        elements = getattr(value, kind).values
        kept: list[bytes] = []
        if depth <= MAX_DEPTH:
            for element in self._looked_at.of(elements):
                self._keep(kind, element, path, depth, kept)
        del elements[:]
        elements.extend(kept)

    def _keep(
        self, kind: str, element: bytes, path: tuple[str, ...], depth: int, kept: list[bytes]
    ) -> None:
        """Append what may stay of one element, nothing of a damaged one."""
        try:
            parsed: Any = (ANY_VALUE if kind == "array_value" else KEY_VALUE).FromString(element)
        except DecodeError:
            if kind == "array_value":
                kept.append(b"")
            return
        if kind == "array_value":
            self._clean(parsed, path, depth + 1)
        else:
            key = parsed.key.decode(errors="replace")
            if is_denied_within(path, key):
                self.removed += 1
                return
            self._clean(parsed.value, (*path, key), depth + 1)
            parsed.DiscardUnknownFields()
        kept.append(parsed.SerializeToString())


def is_clean(message: Message) -> bool:
    """Return whether nothing would have to be removed from a message."""
    copy = _copied(message)
    before = copy.ByteSize()
    return not remove_content(copy) and bool(copy.ByteSize() == before)


def is_clean_value(attribute: Message) -> bool:
    """Return whether nothing would have to be removed from the value of a KeyValue.

    Below the deepest level that is kept all of it would.
    """
    copy = _copied(attribute)
    before = copy.ByteSize()
    key = copy.key.decode(errors="replace")
    return not _Value(copy.value, key).removed and bool(copy.ByteSize() == before)


def overwrites(attributes: Iterable[Any]) -> bool:
    """Return whether a value replaces another one, which is in the bytes and in no message.

    The attributes are those of an EVERY_… message of lenient_messages.
    """
    return any(
        len(attribute.value) > 1
        or any(sum(len(sent) for _, sent in v.ListFields()) > 1 for v in attribute.value)
        for attribute in attributes
    )


def _copied(message: Message) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy
