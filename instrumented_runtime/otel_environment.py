"""What the standard OTEL_* variables ask for: whether each signal is sent, how, and where to.

The exporter acts on it and the API process tells it, so nothing here imports OpenTelemetry.
"""

from collections.abc import Mapping

from perfledger.schema.errors import UsageError

DEFAULT_ENDPOINTS = {"grpc": "http://localhost:4317", "http/protobuf": "http://localhost:4318"}
PROTOCOLS = tuple(DEFAULT_ENDPOINTS)


def protocol_of(signal: str, environment: Mapping[str, str]) -> str | None:
    """Return the protocol for TRACES or METRICS, or None where the environment turns it off.

    Raises UsageError for a protocol or an exporter that we do not speak.
    """
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return None
    exporter = environment.get(f"OTEL_{signal}_EXPORTER") or "otlp"
    if exporter == "none":
        return None
    protocol = (
        environment.get(f"OTEL_EXPORTER_OTLP_{signal}_PROTOCOL")
        or environment.get("OTEL_EXPORTER_OTLP_PROTOCOL")
        or "grpc"
    )
    if exporter != "otlp" or protocol not in PROTOCOLS:
        raise UsageError(
            f"cannot export {signal.lower()} by {exporter} {protocol}",
            where=f"OTEL_{signal}_EXPORTER, OTEL_EXPORTER_OTLP_PROTOCOL",
            fix=f"use otlp with {' or '.join(PROTOCOLS)}, or none",
        )
    return protocol


def destination(environment: Mapping[str, str]) -> str:
    """Return where traces and metrics go, without any credentials, or off."""
    try:
        traces, metrics = _destination("TRACES", environment), _destination("METRICS", environment)
    except UsageError as error:  # the exporter ends with it
        return f"off: {error.what}"
    return traces if traces == metrics else f"traces {traces}, metrics {metrics}"


def _destination(signal: str, environment: Mapping[str, str]) -> str:
    protocol = protocol_of(signal, environment)
    if protocol is None:
        return "off"
    endpoint = (
        environment.get(f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT")
        or environment.get("OTEL_EXPORTER_OTLP_ENDPOINT")
        or DEFAULT_ENDPOINTS[protocol]
    )
    scheme, slashes, rest = endpoint.partition("?")[0].rpartition("//")
    return f"OTLP ({protocol}) to {scheme}{slashes}{rest.rpartition('@')[2]}"
