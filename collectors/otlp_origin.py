"""Resource and instrumentation scope: the columns that all rows of one OTLP group share."""

from dataclasses import dataclass
from typing import Any

from perfledger.collectors.attribute_values import AttributeReader, Value, as_json
from perfledger.schema.attributes import RESOURCE_ATTRIBUTES

_COLUMNS = {a.name: a.column for a in RESOURCE_ATTRIBUTES if a.column}
# Each row of a resource carries its text: what one sender says of itself must stay small.
_LONGEST_JSON_BYTES = 64 * 1024

Row = dict[str, object]

LATEST_NS = 2**63 - 1


@dataclass(frozen=True)
class Origin:
    """`columns` holds service_name, run_id, … where sent; `cut` how many values were cut here."""

    columns: dict[str, object]
    scope_name: str | None
    scope_version: str | None
    cut: int


def is_id(value: bytes, length: int) -> bool:
    """Return whether a trace id (16 bytes) or span id (8 bytes) names something."""
    return len(value) == length and any(value)


def read_origin(
    reader: AttributeReader,
    resource: Any,
    resource_schema_url: bytes,
    scope: Any,
    scope_schema_url: bytes,
) -> Origin:
    """Return what a resource and a scope say. A promoted key of a wrong type stays a pair."""
    cut_before = reader.tally.cut
    values = reader.values(resource.attributes)
    columns: dict[str, object] = {}
    for name, column in _COLUMNS.items():
        if type(values.get(name)) is str:
            columns[column] = values.pop(name)
    values |= _extras(reader, resource, resource_schema_url, scope, scope_schema_url)
    columns["resource_attributes"] = as_json(_bounded(values, reader))
    scope_name, scope_version = reader.text_or_none(scope.name), reader.text_or_none(scope.version)
    return Origin(columns, scope_name, scope_version, reader.tally.cut - cut_before)


def _extras(
    reader: AttributeReader,
    resource: Any,
    resource_schema_url: bytes,
    scope: Any,
    scope_schema_url: bytes,
) -> dict[str, Value]:
    """Return the scope's attributes and what OTLP has fields for and the store has not.

    Names as OpenTelemetry gives them for formats without such fields.
    """
    extras: dict[str, Value] = {
        f"otel.scope.{key}": value for key, value in reader.values(scope.attributes).items()
    }
    if resource_schema_url:
        extras["otel.resource.schema_url"] = reader.text(resource_schema_url)
    if scope_schema_url:
        extras["otel.scope.schema_url"] = reader.text(scope_schema_url)
    if resource.dropped_attributes_count:
        extras["otel.resource.dropped_attributes_count"] = resource.dropped_attributes_count
    if scope.dropped_attributes_count:
        extras["otel.scope.dropped_attributes_count"] = scope.dropped_attributes_count
    return extras


def _bounded(values: dict[str, Value], reader: AttributeReader) -> dict[str, Value]:
    """Return the first attributes that fit into `_LONGEST_JSON_BYTES`; the rest counts as cut."""
    kept: dict[str, Value] = {}
    left_bytes = _LONGEST_JSON_BYTES
    for key, value in values.items():
        left_bytes -= len(as_json({key: value}).encode())
        if left_bytes < 0:
            reader.tally.cut += len(values) - len(kept)
            break
        kept[key] = value
    return kept
