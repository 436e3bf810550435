"""OTLP attribute values -> typed values of the store: denied, cut, counted, never rejected.

Every kind is accepted: text, int, double, bool, bytes, empty, arrays and maps. The last two
become JSON text, at most `MAX_DEPTH` deep; bytes inside them base64, NaN and the infinities their
names in quotes, as in proto3 JSON. A long value is cut, a long array or map loses its tail, and
`Tally.cut` says how often.
"""

import base64
import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import orjson
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue

from perfledger.collectors.content import is_denied, is_denied_within

MAX_DEPTH = 32
DEFAULT_MAX_VALUE_BYTES = 2048
_DENIED = "\0denied"
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
    duplicate_keys: int = 0
    exemplars_dropped: int = 0


class AttributeReader:
    """Reads attributes of one request, within limits, and keeps the tally."""

    def __init__(self, max_value_bytes: int = DEFAULT_MAX_VALUE_BYTES) -> None:
        self.max_value_bytes = max_value_bytes
        self.tally = Tally()
        # Key as sent -> key as kept, or _DENIED.
        self._keys: dict[str, str] = {}

    def values(self, attributes: Iterable[KeyValue]) -> dict[str, Value]:
        """Return what may be kept. Of equal keys the last wins, as a sender would overwrite."""
        kept: dict[str, Value] = {}
        known = self._keys
        for attribute in attributes:
            key = known.get(attribute.key) or self._first_seen(attribute.key)
            if key is _DENIED:
                self.tally.denied += 1
                continue
            if key in kept:
                self.tally.duplicate_keys += 1
            value = attribute.value
            kind = value.WhichOneof("value")
            kept[key] = getattr(value, kind) if kind in _SCALARS else self._other(value, kind, key)
        return kept

    def pairs(self, attributes: Iterable[KeyValue]) -> list[Pair]:
        """Return the attributes as rows of a KEY_VALUES column."""
        return [pair(key, value) for key, value in self.values(attributes).items()]

    def text(self, value: str, limit: int | None = None) -> str:
        """Return text of at most `limit` bytes of UTF-8 (default: the limit of a value)."""
        limit = self.max_value_bytes if limit is None else limit
        if len(value) * 4 <= limit:
            return value
        encoded = value.encode()
        if len(encoded) <= limit:
            return value
        self.tally.cut += 1
        return encoded[:limit].decode(errors="ignore")

    def text_or_none(self, value: str) -> str | None:
        """Return the text, cut, or None where it is empty: protobuf's way to say absent."""
        return self.text(value) if value else None

    def _first_seen(self, key: str) -> str:
        kept = _DENIED if is_denied(key) else self.text(key)
        if kept is _DENIED or len(kept) == len(key):
            self._keys[key] = kept
        return kept

    def _other(self, value: AnyValue, kind: str | None, key: str) -> Value:
        if kind == "string_value":
            return self.text(value.string_value)
        if kind == "bytes_value":
            return self._bytes(value.bytes_value)
        if kind in ("array_value", "kvlist_value"):
            nested = _NestedReader(self, self.max_value_bytes).read(value, (key,))
            return Json(_json(nested).decode())
        return None  # empty, or a kind that exists in profiles only

    def _bytes(self, value: bytes) -> bytes:
        if len(value) > self.max_value_bytes:
            self.tally.cut += 1
        return value[: self.max_value_bytes]


class _NestedReader:
    """Turns one array or map into plain values whose JSON text is about `budget` bytes."""

    def __init__(self, reader: AttributeReader, budget_bytes: int) -> None:
        self._reader = reader
        self._left_bytes = budget_bytes

    def read(self, value: AnyValue, path: tuple[str, ...], depth: int = 1) -> object:
        kind = value.WhichOneof("value")
        if kind == "array_value" or kind == "kvlist_value":
            if depth > MAX_DEPTH:
                self._reader.tally.cut += 1
                return None
            self._left_bytes -= len("[],")
            if kind == "array_value":
                return self._array(value.array_value.values, path, depth)
            return self._map(value.kvlist_value.values, path, depth)
        return self._leaf(value, kind)

    def _array(self, values: Iterable[AnyValue], path: tuple[str, ...], depth: int) -> list[object]:
        kept: list[object] = []
        for value in values:
            if self._is_spent():
                break
            kept.append(self.read(value, path, depth + 1))
        return kept

    def _map(
        self, attributes: Iterable[KeyValue], path: tuple[str, ...], depth: int
    ) -> dict[str, object]:
        kept: dict[str, object] = {}
        tally = self._reader.tally
        for attribute in attributes:
            if self._is_spent():
                break
            key = self._text(attribute.key)
            if is_denied_within(path, key):
                tally.denied += 1
                continue
            if key in kept:
                tally.duplicate_keys += 1
            kept[key] = self.read(attribute.value, (*path, key), depth + 1)
        return kept

    def _leaf(self, value: AnyValue, kind: str | None) -> object:
        leaf: object = None
        if kind == "string_value":
            return self._text(value.string_value)
        if kind == "bytes_value":
            return self._text(base64.b64encode(value.bytes_value).decode())
        if kind == "double_value":
            leaf = _finite_or_name(value.double_value)
        elif kind == "int_value":
            leaf = value.int_value
        elif kind == "bool_value":
            leaf = value.bool_value
        self._left_bytes -= len(_json(leaf)) + 1
        return leaf

    def _text(self, value: str) -> str:
        kept = self._reader.text(value, max(0, self._left_bytes))
        self._left_bytes -= len(_json(kept)) + 1
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


def _json(value: object) -> bytes:
    return orjson.dumps(value)


def _finite_or_name(value: float) -> float | str:
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
