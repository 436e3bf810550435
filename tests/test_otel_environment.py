"""The standard variables: what the exporter does and what the start says are one reading."""

import subprocess
import sys

import pytest

from perfledger.instrumented_runtime.otel_environment import destination, protocol_of
from perfledger.schema.errors import UsageError

GRPC = "OTLP (grpc) to http://localhost:4317"
HTTP = "OTLP (http/protobuf) to http://localhost:4318"
ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"


@pytest.mark.parametrize(
    ("environment", "traces", "metrics", "said"),
    [
        ({}, "grpc", "grpc", GRPC),
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "", ENDPOINT: ""}, "grpc", "grpc", GRPC),
        (
            {"OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"},
            "http/protobuf",
            "http/protobuf",
            HTTP,
        ),
        (
            {"OTEL_EXPORTER_OTLP_METRICS_PROTOCOL": "http/protobuf"},
            "grpc",
            "http/protobuf",
            f"traces {GRPC}, metrics {HTTP}",
        ),
        ({"OTEL_METRICS_EXPORTER": "none"}, "grpc", None, f"traces {GRPC}, metrics off"),
        ({"OTEL_TRACES_EXPORTER": "none"}, None, "grpc", f"traces off, metrics {GRPC}"),
        ({"OTEL_TRACES_EXPORTER": "none", "OTEL_METRICS_EXPORTER": "none"}, None, None, "off"),
        ({"OTEL_SDK_DISABLED": "True", ENDPOINT: "http://h:1"}, None, None, "off"),
    ],
)
def test_the_environment_chooses(
    environment: dict[str, str], traces: str | None, metrics: str | None, said: str
) -> None:
    chosen = protocol_of("TRACES", environment), protocol_of("METRICS", environment)
    assert (*chosen, destination(environment)) == (traces, metrics, said)


@pytest.mark.parametrize(
    ("endpoint", "shown"),
    [
        ("https://me:secret@host:1/x", "https://host:1/x"),
        ("https://host:1/x?key=secret", "https://host:1/x"),
        ("host:4317", "host:4317"),
    ],
)
def test_no_credentials_are_said(endpoint: str, shown: str) -> None:
    assert destination({ENDPOINT: endpoint}) == f"OTLP (grpc) to {shown}"


@pytest.mark.parametrize(
    ("environment", "what"),
    [
        ({"OTEL_EXPORTER_OTLP_PROTOCOL": "http/json"}, "cannot export traces by otlp http/json"),
        ({"OTEL_TRACES_EXPORTER": "zipkin"}, "cannot export traces by zipkin grpc"),
    ],
)
def test_what_is_not_spoken_is_refused_and_said_to_be_off(
    environment: dict[str, str], what: str
) -> None:
    with pytest.raises(UsageError, match=what):
        protocol_of("TRACES", environment)
    assert destination(environment) == f"off: {what}"


def test_it_does_not_import_opentelemetry() -> None:
    check = (
        "import sys, perfledger.instrumented_runtime.serve;"
        "print([name for name in sys.modules if name in ('opentelemetry', 'grpc', 'torch')])"
    )
    run = subprocess.run([sys.executable, "-P", "-c", check], capture_output=True, text=True)
    assert run.stdout == "[]\n"
