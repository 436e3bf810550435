"""OTLP 1.11, rule by rule, against a real server: what it MUST and SHOULD do.

The numbers are those of the project's conformance list; rules 13 to 16 are about data, and
are in test_otlp_rows.py and test_otlp_any_request.py. Rule 11 is the store's.
"""

import gzip
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from google.protobuf.json_format import Parse
from google.protobuf.message import Message
from google.rpc.code_pb2 import Code
from google.rpc.error_details_pb2 import BadRequest, RetryInfo
from google.rpc.status_pb2 import Status
from opentelemetry.proto.collector.logs.v1.logs_service_pb2 import ExportLogsServiceRequest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.logs.v1.logs_pb2 import LogRecord, ResourceLogs, ScopeLogs
from opentelemetry.proto.metrics.v1.metrics_pb2 import (
    Gauge,
    Metric,
    NumberDataPoint,
    ResourceMetrics,
    ScopeMetrics,
)
from otlp_client import PROTOBUF, TRACE_SERVICE, call, grpc_refusal, post, span, stored, traces
from otlp_json_text import as_json
from serving_in_thread import serving

from perfledger.collectors.collecting import CollectLimits
from perfledger.collectors.otlp_rows import SIGNALS
from perfledger.collectors.serving import Endpoints, Transport
from perfledger.collectors.transport.access import Token
from perfledger.collectors.transport.cors import Cors
from perfledger.collectors.transport.otlp_receiver import (
    DEFAULT_MAX_REQUEST_BYTES,
    LONGEST_MESSAGE,
    answer,
)

JSON = {"Content-Type": "application/json"}
TYPES = {"protobuf": PROTOBUF, "json": JSON}
LIMIT_BYTES = 100_000
ORIGIN = "https://app.example.org"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Endpoints]:
    """Servers that take requests of at most 100 kB, and browsers of one site."""
    cors = Cors(("https://*.example.org",), ("content-type", "x-a"), 600)
    limits = CollectLimits(request_bytes=LIMIT_BYTES)
    with serving(tmp_path_factory.mktemp("store"), limits, cors=cors) as bound:
        yield bound


def requests() -> dict[str, Message]:
    """Return one small request of each signal."""
    records = [LogRecord(time_unix_nano=1, severity_number=9)]
    logs = [ResourceLogs(scope_logs=[ScopeLogs(log_records=records)])]
    points = [NumberDataPoint(time_unix_nano=1, as_int=3)]
    metrics = [Metric(name="m", gauge=Gauge(data_points=points))]
    return {
        "traces": ExportTraceServiceRequest.FromString(traces(span(1))),
        "metrics": ExportMetricsServiceRequest(
            resource_metrics=[ResourceMetrics(scope_metrics=[ScopeMetrics(metrics=metrics)])]
        ),
        "logs": ExportLogsServiceRequest(resource_logs=logs),
    }


def encoded(message: Message, encoding: str) -> bytes:
    return as_json(message).encode() if encoding == "json" else message.SerializeToString()


def status_in(encoding: str, content: bytes) -> Status:
    return Parse(content, Status()) if encoding == "json" else Status.FromString(content)


every_encoding = pytest.mark.parametrize("encoding", TYPES)
every_signal = pytest.mark.parametrize("signal", SIGNALS, ids=lambda signal: signal.name)


@every_signal
@every_encoding
@pytest.mark.parametrize("gzipped", [False, True])
def test_rules_1_2_4_and_5_every_signal_over_http(
    served: Endpoints, signal: object, encoding: str, gzipped: bool
) -> None:
    body = encoded(requests()[signal.name], encoding)
    headers = {"Content-Type": f"{TYPES[encoding]['Content-Type']}; charset=utf-8"}
    if gzipped:
        body, headers["Content-Encoding"] = gzip.compress(body), "gzip"
    status, answer, content = post(served.http.port, body, headers, f"/v1/{signal.name}")
    assert status == 200
    assert answer["content-type"] == TYPES[encoding]["Content-Type"]
    assert content == {"json": b"{}", "protobuf": b""}[encoding]


@every_signal
@pytest.mark.parametrize("gzipped", [False, True])
def test_rules_1_2_and_5_every_signal_over_grpc(
    served: Endpoints, signal: object, gzipped: bool
) -> None:
    body = requests()[signal.name].SerializeToString()
    assert call(served.grpc.port, body, signal.grpc_service, gzipped) == b""


@pytest.mark.parametrize("encoding", TYPES)
def test_rule_5_an_empty_request_is_a_success(served: Endpoints, encoding: str) -> None:
    empty = {"json": b"{}", "protobuf": b""}[encoding]
    assert post(served.http.port, empty, TYPES[encoding])[::2] == (200, empty)
    envelopes = ExportTraceServiceRequest.FromString(traces())
    assert post(served.http.port, encoded(envelopes, encoding), TYPES[encoding])[0] == 200


def test_rule_3_the_default_limit_is_64_mib() -> None:
    assert DEFAULT_MAX_REQUEST_BYTES == Transport().request_bytes == 64 * 2**20


@every_encoding
@pytest.mark.parametrize("gzipped", [False, True])
def test_rule_3_over_the_limit_is_413_also_after_decompression(
    served: Endpoints, encoding: str, gzipped: bool
) -> None:
    body, headers = b" " * (LIMIT_BYTES + 1), dict(TYPES[encoding])
    if gzipped:
        body, headers["Content-Encoding"] = gzip.compress(body), "gzip"
    status, answer, content = post(served.http.port, body, headers)
    told = status_in(encoding, content)
    assert (status, told.code, list(told.details)) == (413, Code.RESOURCE_EXHAUSTED, [])
    assert "retry-after" not in answer


@pytest.mark.parametrize("gzipped", [False, True])
def test_rule_3_over_the_limit_is_resource_exhausted_without_retry_info(
    served: Endpoints, gzipped: bool
) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        call(served.grpc.port, bytes(LIMIT_BYTES + 1), gzipped=gzipped)
    assert grpc_refusal(caught.value) == (grpc.StatusCode.RESOURCE_EXHAUSTED, [], None)


def test_rule_3_a_response_is_bounded_by_cutting_its_message() -> None:
    class Rejecting:
        def response(self) -> ExportTraceServiceResponse:
            response = ExportTraceServiceResponse()
            response.partial_success.rejected_spans = 7
            response.partial_success.error_message = "x" * 5_000_000
            return response

    partial = answer(Rejecting()).partial_success
    assert partial.rejected_spans == 7
    assert partial.error_message == "x" * (LONGEST_MESSAGE - 3) + "..."


@pytest.mark.parametrize("content_type", ["text/plain", "application/xml", "application/grpc", ""])
def test_rule_4_other_types_are_415(served: Endpoints, content_type: str) -> None:
    status, answer, content = post(served.http.port, b"{}", {"Content-Type": content_type})
    assert (status, answer["content-type"]) == (415, "application/json")
    assert status_in("json", content).code == Code.INVALID_ARGUMENT


@every_encoding
@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH", "HEAD"])
def test_rule_4_other_methods_are_405(served: Endpoints, encoding: str, method: str) -> None:
    status, answer, content = post(served.http.port, b"", TYPES[encoding], method=method)
    assert (status, answer["allow"]) == (405, "POST")
    assert method == "HEAD" or status_in(encoding, content).code == Code.UNIMPLEMENTED


@every_encoding
def test_rule_6_a_partial_success_is_200_with_a_count_and_a_message(
    served: Endpoints, encoding: str
) -> None:
    body = ExportTraceServiceRequest.FromString(traces(span(1), span(0), span(2)))
    status, _, content = post(served.http.port, encoded(body, encoding), TYPES[encoding])
    reason = "1: span_id is not 8 bytes, or all zero"
    assert status == 200
    if encoding == "json":
        partial = {"rejectedSpans": "1", "errorMessage": reason}
        assert json.loads(content) == {"partialSuccess": partial}
    else:
        told = ExportTraceServiceResponse.FromString(content).partial_success
        assert (told.rejected_spans, told.error_message) == (1, reason)


def test_rule_6_over_grpc_too(served: Endpoints) -> None:
    answer = call(served.grpc.port, traces(span(1), span(0)))
    assert ExportTraceServiceResponse.FromString(answer).partial_success.rejected_spans == 1


@pytest.mark.parametrize(
    ("encoding", "body", "field"),
    [
        ("protobuf", b"\xff" * 9, "body"),
        ("json", b"{", "body"),
        ("json", rb'{"resourceSpans": "\ud800"}', "body"),
        ("json", b'{"resourceSpans": 1}', "resourceSpans"),
        (
            "json",
            b'{"resourceSpans": [{}, {"scopeSpans": [{"spans": [{"kind": "SERVER"}]}]}]}',
            "resourceSpans[1].scopeSpans[0].spans[0].kind",
        ),
    ],
)
def test_rule_7_undecodable_is_400_with_bad_request_details(
    served: Endpoints, encoding: str, body: bytes, field: str
) -> None:
    status, answer, content = post(served.http.port, body, TYPES[encoding])
    assert (status, answer["content-type"]) == (400, TYPES[encoding]["Content-Type"])
    told = status_in(encoding, content)
    details = BadRequest()
    assert told.code == Code.INVALID_ARGUMENT and told.details[0].Unpack(details)
    assert [violation.field for violation in details.field_violations] == [field]
    assert details.field_violations[0].description == told.message


@every_encoding
@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [
        ("/v1/nothing", {}, 404),
        ("/v1development/profiles", {}, 404),
        ("/v1/traces", {"Content-Encoding": "br"}, 415),
        ("/v1/traces", {"Content-Encoding": "gzip"}, 400),
    ],
)
def test_rule_7_every_error_is_a_status_in_the_encoding_of_the_request(
    served: Endpoints, encoding: str, path: str, headers: dict[str, str], expected: int
) -> None:
    headers = {**TYPES[encoding], **headers}
    status, answer, content = post(served.http.port, b"{}", headers, path)
    assert (status, answer["content-type"]) == (expected, TYPES[encoding]["Content-Type"])
    assert status_in(encoding, content).message


@every_encoding
def test_rules_8_and_9_back_pressure_says_when_to_retry(tmp_path: Path, encoding: str) -> None:
    limits = CollectLimits(request_bytes=1000, buffer_bytes=0)
    body = requests()["traces"]
    with serving(tmp_path, limits) as bound:
        refused = post(bound.http.port, encoded(body, encoding), TYPES[encoding])
        with pytest.raises(grpc.RpcError) as caught:
            call(bound.grpc.port, body.SerializeToString())
    status, headers, content = refused
    assert (status, headers["retry-after"]) == (503, "1")
    told, retry = status_in(encoding, content), RetryInfo()
    assert told.code == Code.UNAVAILABLE and told.details[0].Unpack(retry)
    assert retry.retry_delay.seconds == 1
    assert grpc_refusal(caught.value) == (grpc.StatusCode.UNAVAILABLE, ["RetryInfo"], 1.0)


MAPPING = {
    "without a token": (401, grpc.StatusCode.UNAUTHENTICATED),
    "undecodable": (400, grpc.StatusCode.INVALID_ARGUMENT),
    "unknown service": (404, grpc.StatusCode.UNIMPLEMENTED),
}


@pytest.mark.parametrize("case", MAPPING)
def test_rule_10_one_refusal_has_two_spellings(tmp_path: Path, case: str) -> None:
    tokens = [Token(bytes(32), "prod")] if case == "without a token" else []
    path, service = "/v1/traces", TRACE_SERVICE
    if case == "unknown service":
        path, service = "/v1/profiles", "opentelemetry.proto.collector.Other"
    with serving(tmp_path, tokens=tokens) as bound:
        status = post(bound.http.port, b"\xff" * 9, path=path)[0]
        with pytest.raises(grpc.RpcError) as caught:
            call(bound.grpc.port, b"\xff" * 9, service)
    assert (status, caught.value.code()) == MAPPING[case]


def test_rule_11_a_batch_sent_again_is_acknowledged_and_counts_once(tmp_path: Path) -> None:
    body = traces(span(1), span(2))
    with serving(tmp_path) as bound:
        assert [post(bound.http.port, body)[0] for _ in range(2)] == [200, 200]
        assert call(bound.grpc.port, body) == b""
    assert stored(tmp_path, "spans").height == 2


def test_rule_12_json_is_stored_as_the_same_rows_as_protobuf(tmp_path: Path) -> None:
    request = ExportTraceServiceRequest.FromString(
        traces(span(1, kind=2, parent_span_id=bytes([9] * 8)), span(2, trace_state="a=b"))
    )
    rows = {}
    for encoding in TYPES:
        with serving(tmp_path / encoding) as bound:
            assert post(bound.http.port, encoded(request, encoding), TYPES[encoding])[0] == 200
        rows[encoding] = stored(tmp_path / encoding, "spans").drop("received_ns").sort("span_id")
    assert rows["json"].equals(rows["protobuf"])
    assert rows["json"].height == 2


def test_rule_12_a_bad_id_in_json_rejects_its_span_alone(tmp_path: Path) -> None:
    request = json.loads(as_json(ExportTraceServiceRequest.FromString(traces(span(1), span(2)))))
    request["resourceSpans"][0]["scopeSpans"][0]["spans"][0]["spanId"] = "7uGbfsPBsXQ="
    with serving(tmp_path) as bound:
        status, _, content = post(bound.http.port, json.dumps(request).encode(), JSON)
    assert status == 200
    assert json.loads(content)["partialSuccess"]["rejectedSpans"] == "1"
    assert stored(tmp_path, "spans")["span_id"].to_list() == [(2).to_bytes(8, "big")]


def preflight(origin: str, **changes: str) -> dict[str, str]:
    wanted = {"Access-Control-Request-Method": "POST", **changes}
    return {"Origin": origin, **wanted}


def test_rule_17_a_preflight_of_an_allowed_page_is_granted(served: Endpoints) -> None:
    asked = preflight(ORIGIN, **{"Access-Control-Request-Headers": "content-type, X-A, x-b"})
    status, answer, content = post(served.http.port, b"", asked, method="OPTIONS")
    granted = {k: v for k, v in answer.items() if k.startswith("access-control-")}
    assert (status, content) == (204, b"")
    assert granted == {
        "access-control-allow-origin": ORIGIN,
        "access-control-allow-methods": "POST",
        "access-control-allow-headers": "content-type, x-a",
        "access-control-max-age": "600",
    }


@pytest.mark.parametrize(
    "asked",
    [
        preflight("https://example.org"),
        preflight("https://evil.org"),
        preflight("https://a.example.org.evil.org"),
        preflight("https://evil.org/.example.org"),
        preflight(ORIGIN, **{"Access-Control-Request-Method": "PUT"}),
        {"Access-Control-Request-Method": "POST"},
    ],
)
def test_rule_17_other_preflights_are_granted_nothing(
    served: Endpoints, asked: dict[str, str]
) -> None:
    status, answer, _ = post(served.http.port, b"", asked, method="OPTIONS")
    assert status == 204
    assert not any(name.startswith("access-control-") for name in answer)


@pytest.mark.parametrize("body", [traces(span(1)), b"\xff" * 9])
def test_rule_17_an_allowed_page_may_read_the_answer(served: Endpoints, body: bytes) -> None:
    answer = post(served.http.port, body, {**PROTOBUF, "Origin": ORIGIN})[1]
    assert answer["access-control-allow-origin"] == ORIGIN
    assert answer["vary"] == "origin"
    other = post(served.http.port, body, {**PROTOBUF, "Origin": "https://evil.org"})[1]
    assert "access-control-allow-origin" not in other


def test_rule_17_no_page_is_granted_nothing_even_where_any_page_may_send(tmp_path: Path) -> None:
    asked = {"Access-Control-Request-Method": "POST"}
    with serving(tmp_path, cors=Cors(("*",))) as bound:
        status, answer, content = post(bound.http.port, b"", asked, method="OPTIONS")
    assert (status, content) == (204, b"")
    assert not any(name.startswith("access-control-") for name in answer)


def test_rule_17_cors_is_off_by_default(tmp_path: Path) -> None:
    with serving(tmp_path) as bound:
        answer = post(bound.http.port, b"", preflight(ORIGIN), method="OPTIONS")
        headers = post(bound.http.port, traces(span(1)), {**PROTOBUF, "Origin": ORIGIN})[1]
    assert answer[0] == 405
    assert not any(name.startswith("access-control-") for name in (*answer[1], *headers))


def test_rule_17_any_page_where_the_pattern_is_a_star() -> None:
    allow: Callable[[str], bool] = Cors(("*",)).allows
    assert allow(ORIGIN) and allow("null") and allow("http://localhost:3000")
    assert Cors(("*",)).answer({"origin": ORIGIN})[1] == (b"access-control-allow-origin", b"*")
