"""The HTTP side of the runtime: OpenAI's paths over the engines, and /health.

Handlers are thin: a completion request is taken in by completing.py and answered by streaming.py.
`TraceRequests` stands around all of it, so that a request is timed from its arrival, before its
body is read, to the last byte, and is recorded however it ends.
"""

import hmac
import itertools
from collections.abc import Callable
from dataclasses import asdict

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perfledger.instrumented_runtime.completing import Service, complete_request
from perfledger.instrumented_runtime.engine_link import OK
from perfledger.instrumented_runtime.openai_answers import error_body, error_kind
from perfledger.instrumented_runtime.openai_protocol import CHAT, TEXT_COMPLETION, RefusedError
from perfledger.instrumented_runtime.request_trace import RequestTrace
from perfledger.instrumented_runtime.streaming import retry_after
from perfledger.instrumented_runtime.telemetry import RequestRecord
from perfledger.schema.clocks import monotonic_ns

OPERATIONS = {"/v1/chat/completions": CHAT, "/v1/completions": TEXT_COMPLETION}

_TRACE = "perfledger.trace"  # key in the ASGI scope


def build_app(service: Service) -> ASGIApp:
    """Return the ASGI application."""
    app = FastAPI(openapi_url=None)

    @app.get("/health")
    async def health() -> Response:
        status = 200 if service.replicas.state == OK else 503
        return JSONResponse(health_report(service), status)

    @app.get("/v1/models")
    async def models() -> Response:
        card = {"id": service.model, "object": "model", "created": service.created_s}
        return JSONResponse({"object": "list", "data": [card | {"owned_by": "perfledger"}]})

    @app.post("/v1/chat/completions")
    @app.post("/v1/completions")
    async def complete(request: Request) -> Response:
        trace: RequestTrace = request.scope[_TRACE]
        return await complete_request(service, trace, request)

    app.add_exception_handler(RefusedError, _refuse)
    app.add_exception_handler(HTTPException, _refuse_path)
    app.add_exception_handler(ClientDisconnect, _left_early)
    app.add_exception_handler(Exception, _internal_error)
    return RequireKey(TraceRequests(app, service.send_record), service.api_key)


def health_report(service: Service) -> dict[str, object]:
    """Return the body of /health."""
    replicas, ready = service.replicas, service.replicas.ready
    facts: dict[str, object] = asdict(ready) if ready else {}
    facts |= {
        "tokenizer_hash": service.tokenizer.hash,
        "template_hash": service.tokenizer.template_hash,
        "options": asdict(service.options),
    }
    report: dict[str, object] = {
        "status": replicas.state,
        "model": service.model,
        "facts": facts,
        "in_flight": replicas.in_flight,
        "replicas": [replica.report() for replica in replicas],
        "telemetry": service.telemetry_report(),
    }
    return report | ({"detail": replicas.failure} if replicas.failure else {})


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


async def _refuse(request: Request, error: Exception) -> Response:
    assert isinstance(error, RefusedError)
    if (trace := request.scope.get(_TRACE)) is not None:
        trace.refused(error.code, error.code if error.status == 429 else "")
    response = _error(error.status, error.what, error.code, error.param)
    response.raw_headers += retry_after(error.retry_after_s)
    return response


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
    body = error_body(what, kind=error_kind(status), code=code, param=param)
    return Response(body, status, media_type="application/json")
