"""Requests of metrics and logs are counted on their bytes before protobuf makes objects of them."""

from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import (
    ExportMetricsServiceRequest,
)
from otlp_messages import LOG_RECORDS, METRICS, RECEIVED_NS, decode
from test_otlp_any_request import metric_requests

from perfledger.collectors.otlp_rows import UndecodableRequest
from perfledger.collectors.wire import census
from perfledger.collectors.wire.census import MOST_MESSAGES, has_too_many_messages


def wrapped(payload: bytes, levels: int) -> bytes:
    """Put bytes into field 1 or 2 of a message of a message, as a request's envelopes do."""
    for level in range(levels):
        length, size = b"", len(payload)
        while size >= 0x80:
            length += bytes([size & 0x7F | 0x80])
            size >>= 7
        tag = b"\x0a" if level == levels - 1 else b"\x12"
        payload = tag + length + bytes([size]) + payload
    return payload


def messages_in(message: Any) -> int:
    """Count messages in a message of lenient_messages, and elements that are left as bytes."""
    count = 0
    for field, value in message.ListFields():
        if field.type == 11:
            inside = value if field.is_repeated else [value]
            count += sum(1 + messages_in(one) for one in inside)
        elif field.type == 12 and field.is_repeated:
            count += len(value)
    return count


@settings(
    max_examples=100,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
    phases=[Phase.explicit, Phase.reuse, Phase.generate, Phase.shrink],
)
@given(metric_requests)
def test_every_message_is_counted(request: ExportMetricsServiceRequest) -> None:
    body = request.SerializeToString()
    kind = METRICS.lenient_request
    data = np.frombuffer(body or b"\0", np.uint8)
    found = census._count(data, len(body), census._children(kind), MOST_MESSAGES)
    assert found == messages_in(kind.FromString(body))


@pytest.mark.parametrize("signal", [METRICS, LOG_RECORDS], ids=lambda signal: signal.name)
def test_a_request_of_too_many_is_refused_before_it_is_parsed(signal: Any) -> None:
    body = wrapped(b"\x12\x00" * (MOST_MESSAGES + 1), 2)
    assert has_too_many_messages(body, signal.lenient_request)
    with pytest.raises(UndecodableRequest, match="send smaller batches"):
        decode(signal, body, RECEIVED_NS)
    few = wrapped(b"\x12\x00" * 1000, 2)
    assert not has_too_many_messages(few, signal.lenient_request)
    assert decode(signal, few, RECEIVED_NS).rejected == 0


def test_damaged_bytes_are_for_the_parser_to_refuse() -> None:
    assert not has_too_many_messages(b"\x0a\xff\xff", LOG_RECORDS.lenient_request)
    assert not has_too_many_messages(b"", LOG_RECORDS.lenient_request)
