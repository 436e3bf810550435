"""Who sent a group of spans: its resource and scope, read once for equal bytes."""

from typing import Any

from google.protobuf.message import DecodeError

from perfledger.collectors.attribute_values import AttributeReader, Tally
from perfledger.collectors.content_removal import is_clean, overwrites
from perfledger.collectors.lenient_messages import (
    EVERY_RESOURCE_SPANS,
    EVERY_SCOPE_SPANS,
    RESOURCE_SPANS,
    SCOPE_SPANS,
)
from perfledger.collectors.otlp_origin import Origin, read_origin

_MOST_REMEMBERED = 4096
_LONGEST_REMEMBERED_BYTES = 8192

Envelope = tuple[bytes, bytes]


class Unreadable(Exception):
    """The bytes around the spans of a group are not protobuf."""


class UnsafeOrigin(Exception):
    """A resource or scope holds content, or what OTLP does not know."""


class Origins:
    """`read` an envelope: what a ResourceSpans and a ScopeSpans hold beside their spans."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._known: dict[Envelope, tuple[Origin, Tally]] = {}

    def read(self, envelope: Envelope) -> tuple[Origin, Tally]:
        """Return the origin and what was found while it was read.

        Raises Unreadable, and UnsafeOrigin where these bytes must not be written to disk.
        """
        known = self._known.get(envelope)
        return known if known is not None else self._first_seen(envelope)

    def _first_seen(self, envelope: Envelope) -> tuple[Origin, Tally]:
        try:
            resource: Any = RESOURCE_SPANS.FromString(envelope[0])
            scope: Any = SCOPE_SPANS.FromString(envelope[1])
        except DecodeError:
            raise Unreadable from None
        if not is_clean(resource) or not is_clean(scope) or _overwrites(envelope):
            raise UnsafeOrigin
        reader = AttributeReader(self._limit_bytes)
        origin = read_origin(
            reader, resource.resource, resource.schema_url, scope.scope, scope.schema_url
        )
        if sum(map(len, envelope)) <= _LONGEST_REMEMBERED_BYTES:
            if len(self._known) >= _MOST_REMEMBERED:
                self._known.clear()
            self._known[envelope] = origin, reader.tally
        return origin, reader.tally


def _overwrites(envelope: Envelope) -> bool:
    resource: Any = EVERY_RESOURCE_SPANS.FromString(envelope[0])
    scope: Any = EVERY_SCOPE_SPANS.FromString(envelope[1])
    return overwrites(resource.resource.attributes) or overwrites(scope.scope.attributes)
