"""Resource and instrumentation scope: the columns that all rows of one OTLP group share."""

from dataclasses import dataclass

from opentelemetry.proto.common.v1.common_pb2 import InstrumentationScope
from opentelemetry.proto.resource.v1.resource_pb2 import Resource

from perfledger.collectors.attribute_values import AttributeReader, Value, pair
from perfledger.schema.attributes import RESOURCE_ATTRIBUTES

_COLUMNS = {a.name: a.column for a in RESOURCE_ATTRIBUTES if a.column}


@dataclass(frozen=True)
class Origin:
    """`columns` holds service_name, run_id, … where sent; `cut` how many values were cut here."""

    columns: dict[str, object]
    scope_name: str | None
    scope_version: str | None
    cut: int


def read_origin(
    reader: AttributeReader,
    resource: Resource,
    resource_schema_url: str,
    scope: InstrumentationScope,
    scope_schema_url: str,
) -> Origin:
    """Return what a resource and a scope say. A promoted key of a wrong type stays a pair."""
    cut_before = reader.tally.cut
    values = reader.values(resource.attributes)
    columns: dict[str, object] = {}
    for name, column in _COLUMNS.items():
        if type(values.get(name)) is str:
            columns[column] = values.pop(name)
    values |= _extras(reader, resource, resource_schema_url, scope, scope_schema_url)
    columns["resource_attributes"] = [pair(key, value) for key, value in values.items()]
    scope_name, scope_version = reader.text_or_none(scope.name), reader.text_or_none(scope.version)
    return Origin(columns, scope_name, scope_version, reader.tally.cut - cut_before)


def _extras(
    reader: AttributeReader,
    resource: Resource,
    resource_schema_url: str,
    scope: InstrumentationScope,
    scope_schema_url: str,
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
