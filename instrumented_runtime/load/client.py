"""One request against an OpenAI-compatible server: sent, streamed, and kept as a sample."""

import asyncio
import errno
import re
import secrets
from array import array
from contextlib import suppress
from dataclasses import dataclass, field

import aiohttp
import orjson

from perfledger.instrumented_runtime.load.plan import Endpoint, LoadPlan, Sample
from perfledger.instrumented_runtime.load.sse import (
    DONE,
    EventBuffer,
    StreamError,
    Usage,
    read_chunk,
)
from perfledger.instrumented_runtime.load.workload import Arrival
from perfledger.schema.clocks import monotonic_ns
from perfledger.schema.errors import PerfledgerError, UsageError

PATHS: dict[Endpoint, str] = {"chat": "/v1/chat/completions", "completions": "/v1/completions"}

# What the runtime takes as tenant, class or session.
_NOT_IN_A_HEADER = re.compile(r"[^A-Za-z0-9._:/@+-]+")
MAX_LABEL_CHARS = 128
_REASON = re.compile(r"[a-z_]{1,32}")

MAX_ANSWER_BYTES = 256 * 1024 * 1024
MAX_DETAIL_CHARS = 300
# After [DONE] we wait for the end of the body, or the connection could not be used again.
TAIL_S = 1.0
# Below uvicorn's 5 s: on a connection that the server is about to close, a request would fail
# through no fault of the server's.
KEEP_ALIVE_S = 2.0
DISCOVERY_TIMEOUT_S = 30.0

UNREACHABLE = frozenset({"connection_refused", "connect_failed"})


def open_session() -> aiohttp.ClientSession:
    """Return a session without limits of its own: aiohttp's default would allow 100 requests."""
    connector = aiohttp.TCPConnector(limit=0, limit_per_host=0, keepalive_timeout=KEEP_ALIVE_S)
    timeout = aiohttp.ClientTimeout(total=None, connect=None, sock_read=None, sock_connect=None)
    return aiohttp.ClientSession(
        connector=connector, timeout=timeout, headers={"Accept-Encoding": "identity"}
    )


def request_body(plan: LoadPlan, model: str, prompt: object, output_tokens: int) -> bytes:
    """Return the JSON of one request; `prompt` is text or an array of token ids."""
    fields: dict[str, object] = {
        "model": model,
        "max_tokens": output_tokens,
        "temperature": plan.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if plan.endpoint == "chat":
        fields["messages"] = [{"role": "user", "content": prompt}]
    else:
        fields["prompt"] = prompt
    if plan.n > 1:
        fields["n"] = plan.n
    if plan.ignore_eos:
        fields["ignore_eos"] = True
    return orjson.dumps(fields, option=orjson.OPT_SERIALIZE_NUMPY)


async def first_model(session: aiohttp.ClientSession, plan: LoadPlan) -> str:
    """Return the first model the server names. Raises PerfledgerError where it names none."""
    url = plan.at("/v1/models")
    try:
        async with asyncio.timeout(DISCOVERY_TIMEOUT_S):
            async with session.get(url, headers=_authorization(plan)) as response:
                body = await response.content.read(1_000_000)
                status = response.status
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        kind, _ = failure_of(error)
        raise PerfledgerError(
            f"no server answers: {kind}", where=url, fix="start one: perfledger serve"
        ) from error
    if status in (401, 403):
        fix = "name the variable that holds the key: --api-key-env OPENAI_API_KEY"
        raise UsageError(f"the server refused us: HTTP {status}", where=url, fix=fix)
    if model := _first_id(body):
        return model
    raise PerfledgerError(
        f"the server names no model (HTTP {status})", where=url, fix="give one: --model NAME"
    )


def _first_id(body: bytes) -> str:
    try:
        model = orjson.loads(body)["data"][0]["id"]
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        return ""
    return model if isinstance(model, str) else ""


async def is_reachable(session: aiohttp.ClientSession, plan: LoadPlan) -> bool:
    """Return whether anything accepts connections at the plan's URL."""
    try:
        async with asyncio.timeout(DISCOVERY_TIMEOUT_S):
            async with session.get(plan.at("/v1/models"), headers=_authorization(plan)):
                return True
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        return failure_of(error)[0] not in UNREACHABLE


@dataclass
class _Received:
    """What has come in of one answer."""

    chunk_ns: "array[int]" = field(default_factory=lambda: array("q"))
    channels: list[str] = field(default_factory=list)
    choices: "array[int]" = field(default_factory=lambda: array("q"))
    usage: Usage = field(default_factory=Usage)
    http_status: int | None = None
    response_id: str = ""
    finish_reason: str = ""
    end_ns: int | None = None  # when [DONE] was read


@dataclass(frozen=True)
class Sending:
    """One request, ready to go."""

    index: int
    warm_up: bool
    arrival: Arrival
    body: bytes
    scheduled_ns: int


async def send(session: aiohttp.ClientSession, plan: LoadPlan, sending: Sending) -> Sample:
    """Send one request and return its sample, whatever happens; cancelled, it is `interrupted`."""
    received = _Received()
    trace_id, span_id = secrets.token_bytes(16), secrets.token_bytes(8)
    headers = _headers(plan, sending.arrival, trace_id, span_id)
    failure = ("", "")
    sent_ns = monotonic_ns()
    try:
        async with asyncio.timeout(plan.timeout_s):
            await _stream(session, plan.at(PATHS[plan.endpoint]), headers, sending.body, received)
    except (aiohttp.ClientError, OSError, TimeoutError, StreamError) as error:
        failure = failure_of(error)
    except asyncio.CancelledError:
        failure = ("interrupted", "")
    return Sample(
        index=sending.index,
        warm_up=sending.warm_up,
        arrival=sending.arrival,
        trace_id=trace_id,
        span_id=span_id,
        scheduled_ns=sending.scheduled_ns,
        sent_ns=sent_ns,
        end_ns=monotonic_ns() if received.end_ns is None or failure[0] else received.end_ns,
        chunk_ns=received.chunk_ns,
        channels="".join(received.channels),
        choices=received.choices,
        error=failure[0],
        detail=failure[1][:MAX_DETAIL_CHARS],
        http_status=received.http_status,
        input_tokens=received.usage.input_tokens,
        cached_tokens=received.usage.cached_tokens,
        output_tokens=received.usage.output_tokens,
        reasoning_tokens=received.usage.reasoning_tokens,
        response_id=received.response_id,
        finish_reason=received.finish_reason,
    )


async def _stream(
    session: aiohttp.ClientSession,
    url: str,
    headers: dict[str, str],
    body: bytes,
    received: _Received,
) -> None:
    """Post and read to the end. Raises StreamError for an answer that is not a whole stream."""
    async with session.post(url, data=body, headers=headers) as response:
        received.http_status = response.status
        if response.status >= 400:
            detail = await response.content.read(4096)
            raise StreamError(_refusal(response.status, detail), detail.decode("utf-8", "replace"))
        if response.content_type != "text/event-stream":
            raise StreamError("not_streamed", f"the answer is {response.content_type}")
        await _read_events(response, received)
        if received.end_ns is not None:
            await _read_tail(response)
    if received.end_ns is None and not received.finish_reason:
        raise StreamError("incomplete", "the stream ended without [DONE] or a finish reason")
    if not received.chunk_ns:
        raise StreamError("no_content", "the stream held no text")


def _refusal(status: int, body: bytes) -> str:
    """Return the kind of an HTTP error; of a 429 with the reason: http_429_deadline."""
    kind = f"http_{status}"
    if status != 429:
        return kind
    try:
        code = orjson.loads(body)["error"]["code"]
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return kind
    return f"{kind}_{code}" if isinstance(code, str) and _REASON.fullmatch(code) else kind


async def _read_events(response: aiohttp.ClientResponse, received: _Received) -> None:
    events, size = EventBuffer(), 0
    while data := await response.content.readany():
        at_ns = monotonic_ns()
        size += len(data)
        if size > MAX_ANSWER_BYTES:
            raise StreamError("too_large", f"an answer of more than {MAX_ANSWER_BYTES} bytes")
        for event in events.feed(data):
            if event == DONE:
                received.end_ns = at_ns
                return
            _take(event, at_ns, received)


def _take(event: bytes, at_ns: int, received: _Received) -> None:
    chunk = read_chunk(event)
    if chunk.channel:
        received.chunk_ns.append(at_ns)
        received.channels.append(chunk.channel)
        received.choices.append(chunk.choice)
    received.usage = chunk.usage or received.usage
    received.finish_reason = chunk.finish_reason or received.finish_reason
    received.response_id = chunk.response_id or received.response_id


async def _read_tail(response: aiohttp.ClientResponse) -> None:
    """Read on to the end of the body; the answer is complete, so nothing here can fail it."""
    with suppress(TimeoutError, aiohttp.ClientError):
        async with asyncio.timeout(TAIL_S):
            while await response.content.readany():
                pass


def failure_of(error: BaseException) -> tuple[str, str]:
    """Return the kind of a failure, of low cardinality, and its detail."""
    if isinstance(error, StreamError):
        return error.kind, error.what
    if isinstance(error, TimeoutError):
        return "timeout", ""
    if isinstance(error, aiohttp.ClientConnectorError):
        return _CONNECT_KINDS.get(error.os_error.errno or 0, "connect_failed"), str(error)
    for kinds, name in _ERROR_KINDS:
        if isinstance(error, kinds):
            return name, str(error)
    return "client_error", str(error)


_CONNECT_KINDS = {
    errno.ECONNREFUSED: "connection_refused",
    errno.EMFILE: "client_out_of_files",
    errno.EADDRNOTAVAIL: "client_out_of_ports",
}
_ERROR_KINDS: tuple[tuple[tuple[type[BaseException], ...], str], ...] = (
    ((aiohttp.ServerDisconnectedError, aiohttp.ClientPayloadError), "disconnected"),
    ((aiohttp.ClientOSError, ConnectionError), "disconnected"),
)


def _headers(plan: LoadPlan, arrival: Arrival, trace_id: bytes, span_id: bytes) -> dict[str, str]:
    labels = {
        "x-perfledger-class": arrival.traffic_class,
        "x-perfledger-tenant": arrival.tenant,
        "x-perfledger-session": arrival.session,
    }
    numbers = {
        "x-perfledger-priority": arrival.priority,
        "x-perfledger-deadline-ms": arrival.deadline_ms,
    }
    headers = {
        "Content-Type": "application/json",
        "Accept": "text/event-stream",
        "traceparent": f"00-{trace_id.hex()}-{span_id.hex()}-01",
    }
    told = {name: label_header(label) for name, label in labels.items() if label}
    told |= {name: str(number) for name, number in numbers.items() if number is not None}
    return headers | told | _authorization(plan)


def label_header(label: str) -> str:
    """Return a label of a trace ("Conversation log") as our server takes it in a header."""
    return _NOT_IN_A_HEADER.sub("-", label)[:MAX_LABEL_CHARS]


def _authorization(plan: LoadPlan) -> dict[str, str]:
    return {"Authorization": f"Bearer {plan.api_key}"} if plan.api_key else {}
