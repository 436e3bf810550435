"""OTLP attribute values -> typed values of the store: denied, cut, counted, never rejected.

Every kind is accepted: text, int, double, bool, bytes, empty, arrays and maps. The last two
become JSON text, at most `MAX_DEPTH` deep; bytes inside them base64, NaN and the infinities their
names in quotes, as in proto3 JSON. A long value is cut, a long array or map loses its tail, and
`Tally.cut` says how often. Text that is not UTF-8 is repaired, and counted too.
Messages are those of lenient_messages: text comes as bytes.
"""

import base64
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import orjson
from google.protobuf.message import DecodeError, Message

from perfledger.collectors.content import is_denied, is_denied_within
from perfledger.collectors.lenient_messages import ANY_VALUE, KEY_VALUE

MAX_DEPTH = 32
# An array or map inside another one that is longer goes: each level below would copy it.
LONGEST_NESTED_BYTES = 2**20
# Elements of one array or map, and of all levels of one value: far more than are kept.
MOST_ELEMENTS = 10_000
MOST_ELEMENTS_OF_ALL_LEVELS = 100_000
DEFAULT_MAX_VALUE_BYTES = 2048
DENIED = "\0denied"
_SCALARS = frozenset({"int_value", "double_value", "bool_value"})


class Json(str):
    """Text that is a JSON document."""

    __slots__ = ()


Value = str | int | float | bool | bytes | Json | None
# The fields of schema.tables.KEY_VALUE, in its order.
Pair = tuple[Value, ...]  # key, text, int, double, bool, bytes, json


@dataclass
class Tally:
    """What was found while reading one request. `items` are spans, points or log records."""

    items: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    cut: int = 0
    denied: int = 0
    repaired: int = 0
    duplicate_keys: int = 0
    exemplars_dropped: int = 0


class AttributeReader:
    """Reads attributes of one request, within limits, and keeps the tally."""

    def __init__(self, max_value_bytes: int = DEFAULT_MAX_VALUE_BYTES) -> None:
        self.max_value_bytes = max_value_bytes
        self.tally = Tally()
        # Key as sent -> key as kept, or DENIED.
        self._keys: dict[bytes, str] = {}

    def values(self, attributes: Iterable[Any]) -> dict[str, Value]:
        """Return what may be kept. Of equal keys the last wins, as a sender would overwrite."""
        kept: dict[str, Value] = {}
        known = self._keys
        for attribute in attributes:
            key = known.get(attribute.key) or self._first_seen(attribute.key)
            if key is DENIED:
                self.tally.denied += 1
                continue
            value = self.value(attribute, key)
            if key in kept:
                self.tally.duplicate_keys += 1
                del kept[key]
            kept[key] = value
        return kept

    def pairs(self, attributes: Iterable[Any]) -> list[Pair]:
        """Return the attributes as rows of a KEY_VALUES column."""
        return [pair(key, value) for key, value in self.values(attributes).items()]

    def text(self, value: bytes, limit: int | None = None) -> str:
        """Return text of at most `limit` bytes of UTF-8 (default: the limit of a value)."""
        limit = self.max_value_bytes if limit is None else limit
        return self.cut(self._repair(value), limit)

    def text_or_none(self, value: bytes) -> str | None:
        """Return the text, cut, or None where it is empty: protobuf's way to say absent."""
        return self.text(value) or None

    def cut(self, value: str, limit: int) -> str:
        """Return at most the first `limit` bytes of a text, whole characters only."""
        if len(value) * 4 <= limit:
            return value
        encoded = value.encode()
        if len(encoded) <= limit:
            return value
        self.tally.cut += 1
        return encoded[:limit].decode(errors="ignore")

    def _repair(self, value: bytes) -> str:
        try:
            return value.decode()
        except UnicodeDecodeError:
            self.tally.repaired += 1
            return value.decode(errors="replace")

    def key(self, sent: bytes) -> str:
        """Return a key as it is kept, or `DENIED`."""
        return self._keys.get(sent) or self._first_seen(sent)

    def _first_seen(self, sent: bytes) -> str:
        cut_before, repaired_before = self.tally.cut, self.tally.repaired
        key = self._repair(sent)
        if is_denied(key):
            self.tally.repaired = repaired_before
            kept = DENIED
        else:
            kept = self.cut(key, self.max_value_bytes)
        if (self.tally.cut, self.tally.repaired) == (cut_before, repaired_before):
            self._keys[sent] = kept
        return kept

    def value(self, attribute: Any, key: str) -> Value:
        """Return the value of one KeyValue whose kept key is `key`."""
        value = attribute.value
        kind = value.WhichOneof("value")
        return getattr(value, kind) if kind in _SCALARS else self._other(value, kind, key)

    def _other(self, value: Any, kind: str | None, key: str) -> Value:
        if kind == "string_value":
            return self.text(value.string_value)
        if kind == "bytes_value":
            return self._bytes(value.bytes_value)
        if kind in ("array_value", "kvlist_value"):
            nested = _NestedReader(self, self.max_value_bytes).read(value, (key,))
            return Json(as_json(nested))
        return None  # empty, or a kind that exists in profiles only

    def _bytes(self, value: bytes) -> bytes:
        if len(value) > self.max_value_bytes:
            self.tally.cut += 1
        return value[: self.max_value_bytes]


class LookedAt:
    """The elements of one array or map and those inside it that are looked at: not too many.

    Content is taken out of the same ones and the others go, so what is kept reads the same again.
    """

    def __init__(self) -> None:
        self._left = MOST_ELEMENTS_OF_ALL_LEVELS

    def of(self, elements: Iterable[bytes]) -> Iterator[bytes]:
        for element in islice(elements, MOST_ELEMENTS):
            if not self._left:
                return
            self._left -= 1
            yield element


class _NestedReader:
    """Turns one array or map into plain values whose JSON text is about `budget` bytes."""

    def __init__(self, reader: AttributeReader, budget_bytes: int) -> None:
        self._reader = reader
        self._left_bytes = budget_bytes
        self._looked_at = LookedAt()

    def read(self, value: Any, path: tuple[str, ...], depth: int = 1) -> object:
        kind = value.WhichOneof("value")
        if kind == "array_value" or kind == "kvlist_value":
            if depth > MAX_DEPTH or (depth > 1 and value.ByteSize() > LONGEST_NESTED_BYTES):
                self._reader.tally.cut += 1
                return self._null()
            self._left_bytes -= len("[],")
            if kind == "array_value":
                return self._array(value.array_value.values, path, depth)
            return self._map(value.kvlist_value.values, path, depth)
        return self._leaf(value, kind)

    def _array(self, values: Iterable[bytes], path: tuple[str, ...], depth: int) -> list[object]:
        kept: list[object] = []
        for element in self._looked_at.of(values):
            if self._is_spent():
                break
            value = self._parsed(ANY_VALUE, element)
            kept.append(self._null() if value is None else self.read(value, path, depth + 1))
        return kept

    def _map(
        self, elements: Iterable[bytes], path: tuple[str, ...], depth: int
    ) -> dict[str, object]:
        kept: dict[str, object] = {}
        tally = self._reader.tally
        for element in self._looked_at.of(elements):
            attribute = self._parsed(KEY_VALUE, element)
            if attribute is None:
                continue
            sent = attribute.key.decode(errors="replace")
            if is_denied_within(path, sent):
                tally.denied += 1
                continue
            if self._is_spent():
                break
            key = self._text(attribute.key)
            if key in kept:
                tally.duplicate_keys += 1
            kept[key] = self.read(attribute.value, (*path, sent), depth + 1)
        return kept

    def _null(self) -> object:
        """Return what stands for a lost element; it takes the room that it takes when reread."""
        self._left_bytes -= len("null,")
        return None

    def _parsed(self, kind: type[Message], element: bytes) -> Any:
        """Return an element, or None where its bytes are damaged: it counts as cut."""
        try:
            return kind.FromString(element)
        except DecodeError:
            self._reader.tally.cut += 1
            return None

    def _leaf(self, value: Any, kind: str | None) -> object:
        leaf: object = None
        if kind == "string_value":
            return self._text(value.string_value)
        if kind == "bytes_value":
            return self._text(base64.b64encode(value.bytes_value))
        if kind == "double_value":
            leaf = _finite_or_name(value.double_value)
        elif kind == "int_value":
            leaf = value.int_value
        elif kind == "bool_value":
            leaf = value.bool_value
        self._left_bytes -= len(orjson.dumps(leaf)) + 1
        return leaf

    def _text(self, value: bytes) -> str:
        kept = self._reader.text(value, max(0, self._left_bytes))
        self._left_bytes -= len(orjson.dumps(kept)) + 1
        return kept

    def _is_spent(self) -> bool:
        """Say whether the rest of this array or map must go, and count it once."""
        if self._left_bytes > 0:
            return False
        self._reader.tally.cut += 1
        return True


def pair(key: str, value: Value) -> Pair:
    """Return one element of a KEY_VALUES column: the value stands in its type's field."""
    kind = type(value)
    if kind is str:
        return (key, value, None, None, None, None, None)
    if kind is int:
        return (key, None, value, None, None, None, None)
    if kind is float:
        return (key, None, None, value, None, None, None)
    if kind is bool:
        return (key, None, None, None, value, None, None)
    if kind is bytes:
        return (key, None, None, None, None, value, None)
    return (key, None, None, None, None, None, value)


def as_json(value: object) -> str:
    """Return JSON text; bytes become base64, NaN and the infinities their names."""
    return orjson.dumps(_plain(value)).decode()


def _plain(value: object) -> object:
    """Return a value of ours, or a map of such, as JSON can say it."""
    if type(value) is dict:
        return {key: _plain(inner) for key, inner in value.items()}
    if type(value) is bytes:
        return base64.b64encode(value).decode()
    if type(value) is float:
        return _finite_or_name(value)
    if type(value) is Json:
        return orjson.Fragment(str(value))
    return value


def _finite_or_name(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
