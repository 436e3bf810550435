"""What happens to a device, as OTLP log records: rows of the table `logs`.

Names: perfledger.device.lost (error.type: NVML's error), .found (it is back), .error (an Xid or a
double bit error that the driver told).
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.logs.v1.logs_pb2 import SeverityNumber

from perfledger.collectors.host.readings import key_value
from perfledger.schema.attributes import SCHEMA_VERSION

LOST, FOUND, ERROR = (f"perfledger.device.{what}" for what in ("lost", "found", "error"))
_INFO, _ERROR = SeverityNumber.SEVERITY_NUMBER_INFO, SeverityNumber.SEVERITY_NUMBER_ERROR


class DeviceEvent(NamedTuple):
    """One event of a device, at a monotonic time. `why` is an error's name, or ""."""

    at_ns: int
    name: str
    device: str
    why: str = ""


def encode_events(
    events: Iterable[DeviceEvent],
    scope_name: str,
    resource: Mapping[str, str | int],
    to_wall_ns: Callable[[int], int],
) -> bytes:
    """Return the OTLP logs request that tells the events."""
    request = ExportLogsServiceRequest()
    group = request.resource_logs.add()
    group.resource.attributes.extend(key_value(key, value) for key, value in resource.items())
    scoped = group.scope_logs.add()
    scoped.scope.name, scoped.scope.version = scope_name, SCHEMA_VERSION
    for event in events:
        record = scoped.log_records.add()
        record.time_unix_nano = record.observed_time_unix_nano = to_wall_ns(event.at_ns)
        record.event_name = event.name
        record.severity_number = _INFO if event.name == FOUND else _ERROR
        said = {"hw.id": event.device, "hw.type": "gpu", "error.type": event.why}
        record.attributes.extend(key_value(key, text) for key, text in said.items() if text)
    return bytes(request.SerializeToString())
