"""What the API process knows of one request: who asked, when each stage ran, how it ended.

The root span is a child of the caller's span where a valid W3C traceparent came with the request.
Counts, names and times only: nothing of the prompt or the answer is kept here.
"""

import re
import secrets
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from perfledger.instrumented_runtime.openai_answers import Usage
from perfledger.instrumented_runtime.openai_protocol import CompletionRequest
from perfledger.instrumented_runtime.routing.choice import Choice
from perfledger.instrumented_runtime.telemetry import AttributeValue, RequestRecord, SpanRecord
from perfledger.schema.clocks import monotonic_ns

# W3C Trace Context, level 1: version, trace id, parent id, flags; later versions may add fields.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-[0-9a-f]{2}(-.*)?")
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
# LEAVE_REASONS that are nobody's failure.
ABORT_REASONS = frozenset({"client_disconnect", "shutdown"})


class RequestTrace:
    """One request from its arrival (`start_ns`, monotonic) to its end."""

    def __init__(
        self, request: int, name: str, headers: list[tuple[bytes, bytes]], start_ns: int
    ) -> None:
        fields = single_headers(headers)
        caller = parse_traceparent(fields.get("traceparent"))
        self.request = request
        self.name = name
        self.headers = fields
        self.start_ns = start_ns
        self.trace_id = caller[0] if caller else secrets.randbits(128) or 1
        self.parent_span_id = caller[1] if caller else None
        self.span_id = secrets.randbits(64) or 1
        self.request_id = _request_id(fields.get("x-request-id"))
        self.created_s = int(time.time())
        prefix = "chatcmpl" if name == "chat" else "cmpl"
        self.answer_id = f"{prefix}-{secrets.token_hex(16)}"
        self.sent_ns: int | None = None
        self.replica = "0"  # which engine has it, or would have had it
        self._end_ns: int | None = None
        self._outcome = "error"
        self._spans: list[SpanRecord] = []
        self._attributes: dict[str, AttributeValue] = {"gen_ai.operation.name": name}

    @property
    def traceparent(self) -> str:
        """The W3C header that names the root span."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-01"

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record a stage around a block, however the block ends."""
        start_ns = monotonic_ns()
        try:
            yield
        finally:
            self.add_span(name, start_ns, monotonic_ns())

    def add_span(
        self,
        name: str,
        start_ns: int,
        end_ns: int,
        attributes: Mapping[str, AttributeValue] | None = None,
    ) -> None:
        """Record a stage whose times are known."""
        self._spans.append(SpanRecord(name, start_ns, end_ns, dict(attributes or {})))

    def routed(self, choice: Choice) -> None:
        """Record which replica gets the request: a `route` span where there was one to choose."""
        self.replica = self._attributes["perfledger.replica"] = choice.replica
        if choice.policy:
            self.add_span("route", choice.start_ns, choice.end_ns, choice.attributes())

    def describe(self, attributes: Mapping[str, AttributeValue]) -> None:
        """Set attributes of the root span."""
        self._attributes.update(attributes)

    def refused(self, code: str, reason: str = "") -> None:
        """The request was not taken: a bad one, or (with a `reason`) none such is taken now."""
        self._outcome = "refused"
        self._attributes["error.type"] = code
        if reason:
            self._attributes["perfledger.reason"] = reason

    def failed(self, reason: str) -> None:
        """The request ended without its answer; `reason` is a LEAVE_REASONS name."""
        self._attributes["perfledger.reason"] = reason
        self._attributes["gen_ai.response.finish_reasons"] = ["abort"]
        if reason in ABORT_REASONS:
            self._outcome = "aborted"
        else:
            self._outcome = "error"
            self._attributes["error.type"] = reason

    def answered(self, finish_reasons: list[str]) -> None:
        """The answer is complete; a reason for each choice."""
        self._outcome = "ok"
        self._attributes["gen_ai.response.finish_reasons"] = finish_reasons

    def counted(self, usage: Usage) -> None:
        """Set the token counts."""
        self._attributes["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        self._attributes["gen_ai.usage.output_tokens"] = usage.completion_tokens
        self._attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached_tokens

    def first_chunk_written(self) -> None:
        """The first part of the answer is on its way; only the first call counts."""
        self._attributes.setdefault("perfledger.ttfc_ns", monotonic_ns() - self.start_ns)

    def ended(self, end_ns: int) -> None:
        """Set the end, where it was before the record is made."""
        self._end_ns = end_ns

    def record(self) -> RequestRecord:
        """Return the record of the request, which ends now if it has not before."""
        return RequestRecord(
            request=self.request,
            trace_id=self.trace_id,
            span_id=self.span_id,
            parent_span_id=self.parent_span_id,
            name=self.name,
            start_ns=self.start_ns,
            end_ns=self._end_ns or monotonic_ns(),
            outcome=self._outcome,
            attributes=self._attributes,
            spans=self._spans,
            sent_ns=self.sent_ns,
            replica=self.replica,
        )


def request_attributes(asked: CompletionRequest, answer_id: str) -> dict[str, AttributeValue]:
    """Return the root's attributes that follow from a checked request."""
    attributes: dict[str, AttributeValue] = {
        "gen_ai.response.id": answer_id,
        "gen_ai.request.temperature": asked.temperature,
        "gen_ai.request.top_p": asked.top_p,
        "gen_ai.request.stream": asked.stream,
        "gen_ai.request.choice.count": asked.n,
    }
    if asked.model:
        attributes["gen_ai.request.model"] = asked.model
    if asked.max_tokens is not None:
        attributes["gen_ai.request.max_tokens"] = asked.max_tokens
    if asked.seed is not None:
        attributes["gen_ai.request.seed"] = asked.seed
    return attributes


def parse_traceparent(header: str | None) -> tuple[int, int] | None:
    """Return (trace id, parent span id) of a W3C traceparent, or None where it is not valid."""
    match = _TRACEPARENT.fullmatch(header or "")
    if match is None or match[1] == "ff" or (match[1] == "00" and match[4]):
        return None
    trace_id, span_id = int(match[2], 16), int(match[3], 16)
    return (trace_id, span_id) if trace_id and span_id else None


def single_headers(headers: list[tuple[bytes, bytes]]) -> dict[str, str]:
    """Return the headers that came once, names in lower case."""
    fields: dict[str, str] = {}
    repeated = set()
    for name, value in headers:
        key = name.decode("latin-1").lower()
        if key in fields:
            repeated.add(key)
        fields[key] = value.decode("latin-1")
    return {key: value for key, value in fields.items() if key not in repeated}


def _request_id(given: str | None) -> str:
    if given is not None and _REQUEST_ID.fullmatch(given):
        return given
    return f"req-{secrets.token_hex(16)}"
