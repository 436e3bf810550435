"""The HTTP side of the runtime: OpenAI's paths over one engine, and /health.

Handlers are thin: check (openai_protocol), render and tokenize, hand to the engine (engine_link),
answer (streaming). `TraceRequests` stands around all of it, so that a request is timed from its
arrival, before its body is read, to the last byte, and is recorded however it ends.
"""

import asyncio
import hmac
import itertools
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perfledger.instrumented_runtime import openai_protocol
from perfledger.instrumented_runtime.answer_text import AnswerText
from perfledger.instrumented_runtime.engine_link import FAILED, LOADING, OK, EngineLink
from perfledger.instrumented_runtime.faults.delays import HEADER as FAULT_HEADER
from perfledger.instrumented_runtime.faults.delays import for_engine, parse_faults, plant
from perfledger.instrumented_runtime.messages import SamplingParams, Submit
from perfledger.instrumented_runtime.openai_protocol import (
    CHAT,
    TEXT_COMPLETION,
    CompletionRequest,
    RefusedError,
)
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.request_trace import (
    RequestTrace,
    request_attributes,
    traffic_attributes,
)
from perfledger.instrumented_runtime.scheduler import limits_of, most_output_tokens, never_fits
from perfledger.instrumented_runtime.streaming import Completion
from perfledger.instrumented_runtime.telemetry import RequestRecord
from perfledger.instrumented_runtime.tokenizer import Tokenizer
from perfledger.schema.clocks import monotonic_ns
from perfledger.schema.errors import UsageError

OPERATIONS = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT_COMPLETION}

MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_IN_FLIGHT = 4096  # requests in the engine, most of them waiting
BODY_TIMEOUT_S = 30.0
# From here on tokenizing takes some ms, in which the event loop would serve nobody else.
LONG_TEXT_CHARS = 16_384

_TRACE = "perfledger.trace"  # key in the ASGI scope
_SHUT = {
    LOADING: ("the model is loading", "engine_loading"),
    FAILED: ("the engine has failed: see /health", "engine_failed"),
}


@dataclass(frozen=True)
class Service:
    """What the handlers need: the model, its engine, and where records go."""

    model: str
    aliases: frozenset[str]
    created_s: int
    options: RuntimeOptions
    tokenizer: Tokenizer
    link: EngineLink
    send_record: Callable[[RequestRecord], None]
    telemetry_report: Callable[[], Mapping[str, object]]
    api_key: str = ""


def build_app(service: Service) -> ASGIApp:
    """Return the ASGI application."""
    app = FastAPI(openapi_url=None)

    @app.get("/health")
    async def health() -> Response:
        status = 200 if service.link.state == OK else 503
        return JSONResponse(health_report(service), status)

    @app.get("/v1/models")
    async def models() -> Response:
        card = {"id": service.model, "object": "model", "created": service.created_s}
        return JSONResponse({"object": "list", "data": [card | {"owned_by": "perfledger"}]})

    @app.post("/v1/chat/completions")
    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        trace: RequestTrace = request.scope[_TRACE]
        return await _complete(service, trace, request)

    app.add_exception_handler(RefusedError, _refuse)
    app.add_exception_handler(HTTPException, _refuse_path)
    app.add_exception_handler(ClientDisconnect, _left_early)
    app.add_exception_handler(Exception, _internal_error)
    return RequireKey(TraceRequests(app, service.send_record), service.api_key)


def health_report(service: Service) -> dict[str, object]:
    """Return the body of /health."""
    link, ready = service.link, service.link.ready
    facts: dict[str, object] = asdict(ready) if ready else {}
    facts |= {
        "tokenizer_hash": service.tokenizer.hash,
        "template_hash": service.tokenizer.template_hash,
        "options": asdict(service.options),
    }
    report: dict[str, object] = {
        "status": link.state,
        "model": service.model,
        "facts": facts,
        "in_flight": link.in_flight,
        "telemetry": service.telemetry_report(),
    }
    return report | ({"detail": link.failure} if link.failure else {})


class RequireKey:
    """Refuses requests to /v1 without the bearer token, where there is a key."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode() if api_key else b""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass on, or answer 401."""
        if self._expected and scope["type"] == "http" and scope["path"].startswith("/v1"):
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                what = "a valid API key is needed: Authorization: Bearer KEY"
                response = _error(401, what, "invalid_api_key", None)
                response.headers["www-authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


class TraceRequests:
    """Times each completion request from outside everything else, and sends its record."""

    def __init__(self, app: ASGIApp, send_record: Callable[[RequestRecord], None]) -> None:
        self._app = app
        self._send_record = send_record
        self._numbers = itertools.count(1)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the request and record it however it ends."""
        name = OPERATIONS.get(scope.get("path", ""))
        if name is None or scope.get("method") != "POST":
            await self._app(scope, receive, send)
            return
        arrived_ns = monotonic_ns()
        trace = RequestTrace(next(self._numbers), name, scope["headers"], arrived_ns)
        scope[_TRACE] = trace
        headers = [
            (b"x-request-id", trace.request_id.encode()),
            (b"traceparent", trace.traceparent.encode()),
        ]

        async def send_traced(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *headers]
            await send(message)

        try:
            await self._app(scope, receive, send_traced)
        finally:
            self._send_record(trace.record())


async def _complete(service: Service, trace: RequestTrace, request: Request) -> Response:
    trace.describe(traffic_attributes(trace.headers))
    delays_ns = parse_faults(trace.headers.get(FAULT_HEADER), service.options.allow_faults)
    _refuse_if_shut(service.link)
    body = await _read_body(request, trace.headers)
    asked = openai_protocol.parse_request(trace.name, body)
    trace.describe(request_attributes(asked, trace.answer_id))
    if asked.model not in service.aliases:
        what = f"the model {asked.model!r} is not served here: ask for {service.model!r}"
        raise RefusedError(what, code="model_not_found", param="model", status=404)
    asked = replace(asked, model=service.model)
    prompt = await _tokens_of(service.tokenizer, asked, trace, delays_ns)
    sampling = _sampling(service, asked, len(prompt))
    trace.describe(
        {
            "gen_ai.usage.input_tokens": len(prompt),
            "gen_ai.request.model": service.model,
            "gen_ai.response.model": service.model,
            "perfledger.model.hash": service.link.ready.weights_hash if service.link.ready else "",
            "perfledger.tokenizer.hash": service.tokenizer.hash,
        }
    )
    _refuse_if_shut(service.link)  # it may have ended meanwhile
    trace.sent_ns = monotonic_ns()
    answer = service.link.submit(
        Submit(
            request=trace.request,
            prompt=prompt,
            sampling=sampling,
            trace_id=trace.trace_id,
            span_id=trace.span_id,
            sent_ns=trace.sent_ns,
            delays_ns=for_engine(delays_ns),
        )
    )
    text = AnswerText(service.tokenizer.detokenizer(), asked.stop)
    return Completion(answer, text, asked, trace, len(prompt), delays_ns)


def _refuse_if_shut(link: EngineLink) -> None:
    if link.state != OK:
        what, code = _SHUT.get(link.state, ("the server is stopping", "stopping"))
        raise RefusedError(what, code=code, status=503)
    if link.in_flight >= MAX_IN_FLIGHT:
        what = f"{link.in_flight} requests are waiting or running: try again later"
        raise RefusedError(what, code="too_many_requests", status=429)


async def _read_body(request: Request, headers: dict[str, str]) -> bytes:
    """Return the whole body. Raises RefusedError if it is too large, too slow or not JSON."""
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json":
        what = "the body must come with Content-Type: application/json"
        raise RefusedError(what, code="unsupported_media_type", status=415)
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            async for piece in request.stream():
                body += piece
                if len(body) > MAX_BODY_BYTES:
                    what = f"the body has more than {MAX_BODY_BYTES} bytes"
                    raise RefusedError(what, code="request_too_large", status=413)
    except TimeoutError:
        what = f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s"
        raise RefusedError(what, code="request_timeout", status=408) from None
    return bytes(body)


async def _tokens_of(
    tokenizer: Tokenizer, asked: CompletionRequest, trace: RequestTrace, delays_ns: dict[str, int]
) -> list[int]:
    """Return the prompt's token ids: template and tokenizer run here, each in its span."""
    text = asked.prompt
    if asked.operation == CHAT:
        with trace.span("template"):
            text = _render(tokenizer, asked.messages)
            await plant(delays_ns, "template")
    if not isinstance(text, str):
        _check_token_ids(text, tokenizer.vocab_size)
        return text
    bare = asked.operation != CHAT  # a rendered chat holds its special tokens
    with trace.span("tokenize"):
        if len(text) < LONG_TEXT_CHARS:
            prompt = tokenizer.encode(text, add_special_tokens=bare)
        else:
            prompt = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=bare)
        await plant(delays_ns, "tokenize")
    return prompt


def _render(tokenizer: Tokenizer, messages: tuple[dict[str, str], ...]) -> str:
    try:
        return tokenizer.render_chat(messages)
    except UsageError as error:
        what = str(error).replace("\n", ";")
        raise RefusedError(what, code="chat_template", param="messages") from None


def _check_token_ids(prompt: list[int], vocab_size: int) -> None:
    for token in prompt:
        if not 0 <= token < vocab_size:
            what = f"prompt has the token id {token}, must be from 0 to {vocab_size - 1}"
            raise RefusedError(what, param="prompt")


def _sampling(service: Service, asked: CompletionRequest, prompt_tokens: int) -> SamplingParams:
    """Return how to sample. Raises RefusedError for a request that can never fit."""
    ready = service.link.ready
    assert ready is not None, "the state is OK"
    limits = limits_of(
        service.options, max_model_len=ready.max_model_len, kv_blocks=ready.kv_blocks
    )
    most = most_output_tokens(prompt_tokens, limits)
    max_tokens = max(1, most) if asked.max_tokens is None else asked.max_tokens
    if reason := never_fits(prompt_tokens, max_tokens, limits):
        param = "messages" if asked.operation == CHAT else "prompt"
        raise RefusedError(reason, code="context_length_exceeded", param=param)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        seed=asked.seed,
        stop_token_ids=() if asked.ignore_eos else tuple(service.tokenizer.eos_token_ids),
    )


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    if (trace := request.scope.get(_TRACE)) is not None:
        trace.refused(error.code)
    return _error(error.status, error.what, error.code, error.param)


async def _refuse_path(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    what = f"{request.method} {request.url.path}: {error.detail}"
    return _error(error.status_code, what, "not_found", None)


async def _left_early(request: Request, error: Exception) -> Response:
    request.scope[_TRACE].failed("client_disconnect")
    return Response(status_code=499)  # nobody is there to read it


async def _internal_error(request: Request, error: Exception) -> Response:
    if (trace := request.scope.get(_TRACE)) is not None:
        trace.failed("error")
    return _error(500, "an internal error, see the server's log", "internal_error", None)


def _error(status: int, what: str, code: str, param: str | None) -> Response:
    kind = openai_protocol.error_kind(status)
    body = openai_protocol.error_body(what, kind=kind, code=code, param=param)
    return Response(body, status, media_type="application/json")
