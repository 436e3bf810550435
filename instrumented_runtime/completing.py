"""A completion request on its way in: checked, rendered, tokenized, routed, handed to an engine.

What is wrong with it is raised as RefusedError, whose HTTP answer the API gives.
"""

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from fastapi import Request, Response

from perfledger.instrumented_runtime.answer_text import AnswerText
from perfledger.instrumented_runtime.engine_link import FAILED, LOADING, OK, RequestFailedError
from perfledger.instrumented_runtime.faults.delays import HEADER as FAULT_HEADER
from perfledger.instrumented_runtime.faults.delays import for_engine, parse_faults, plant
from perfledger.instrumented_runtime.messages import Ready, SamplingParams, Submit
from perfledger.instrumented_runtime.openai_protocol import (
    CHAT,
    CompletionRequest,
    RefusedError,
    parse_request,
)
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.request_trace import RequestTrace, request_attributes
from perfledger.instrumented_runtime.routing.choice import Choice
from perfledger.instrumented_runtime.routing.replica import DRAINING, UNHEALTHY
from perfledger.instrumented_runtime.routing.replicas import Replicas
from perfledger.instrumented_runtime.scheduling.limits import (
    limits_of,
    most_output_tokens,
    never_fits,
)
from perfledger.instrumented_runtime.streaming import Completion
from perfledger.instrumented_runtime.telemetry import AttributeValue, RequestRecord
from perfledger.instrumented_runtime.tokenizer import Tokenizer
from perfledger.instrumented_runtime.traffic_headers import DEADLINE, Traffic, parse_traffic
from perfledger.schema.clocks import monotonic_ns
from perfledger.schema.errors import UsageError

MAX_BODY_BYTES = 4 * 1024 * 1024
MAX_IN_FLIGHT = 4096  # requests in the engine, most of them waiting
BODY_TIMEOUT_S = 30.0
# From here on tokenizing takes some ms, in which the event loop would serve nobody else.
LONG_TEXT_CHARS = 16_384
NS_PER_MS = 1_000_000

_SHUT = {
    LOADING: ("the model is loading", "engine_loading"),
    FAILED: ("the engine has failed: see /health", "engine_failed"),
    UNHEALTHY: ("no engine answers: see /health", "engine_unhealthy"),
    DRAINING: ("all engines are draining", "draining"),
}


@dataclass(frozen=True)
class Service:
    """What the handlers need: the model, its engines, and where records go."""

    model: str
    aliases: frozenset[str]
    created_s: int
    options: RuntimeOptions
    tokenizer: Tokenizer
    replicas: Replicas
    send_record: Callable[[RequestRecord], None]
    telemetry_report: Callable[[], Mapping[str, object]]
    api_key: str = ""


async def complete_request(service: Service, trace: RequestTrace, request: Request) -> Response:
    """Hand a request to the engine and return its response, which then follows the answer."""
    traffic = parse_traffic(trace.headers)
    trace.describe(traffic.attributes())
    delays_ns = parse_faults(trace.headers.get(FAULT_HEADER), service.options.allow_faults)
    _refuse_if_shut(service.replicas)
    asked = _parse(service, trace, await _read_body(request, trace.headers))
    traffic = traffic.or_of_body(asked.priority)
    trace.describe(traffic.attributes())
    prompt = await _tokens_of(service.tokenizer, asked, trace, delays_ns)
    sampling = _sampling(service, asked, len(prompt))
    trace.describe(_served_by(service) | {"gen_ai.usage.input_tokens": len(prompt)})
    _refuse_if_shut(service.replicas)  # it may have ended meanwhile
    choice = _choose(service.replicas, trace, prompt, traffic.tenant)
    trace.sent_ns = monotonic_ns()
    submit = Submit(
        request=trace.request,
        prompt=prompt,
        sampling=sampling,
        trace_id=trace.trace_id,
        span_id=trace.span_id,
        sent_ns=trace.sent_ns,
        delays_ns=for_engine(delays_ns),
        tenant=traffic.tenant,
        priority=traffic.priority or 0,
        deadline_ns=_deadline_ns(traffic, trace),
    )
    answer = service.replicas.submit(submit, choice, trace.routed)
    texts = [AnswerText(service.tokenizer.detokenizer(), asked.stop) for _ in range(asked.n)]
    return Completion(answer, texts, asked, trace, len(prompt), delays_ns)


def _refuse_if_shut(replicas: Replicas) -> None:
    if replicas.state != OK:
        what, code = _SHUT.get(replicas.state, ("the server is stopping", "stopping"))
        raise RefusedError(what, code=code, status=503)
    if replicas.in_flight >= MAX_IN_FLIGHT:
        what = f"{replicas.in_flight} requests are waiting or running: try again later"
        raise RefusedError(what, code="too_many_requests", status=429, retry_after_s=1)


def _choose(replicas: Replicas, trace: RequestTrace, prompt: list[int], tenant: str) -> Choice:
    try:
        choice = replicas.choose(prompt, tenant)
    except RequestFailedError as failed:
        raise RefusedError(failed.detail, code="no_replica", status=503) from None
    trace.routed(choice)
    return choice


def _parse(service: Service, trace: RequestTrace, body: bytes) -> CompletionRequest:
    asked = parse_request(trace.name, body)
    trace.describe(request_attributes(asked, trace.answer_id))
    if asked.model not in service.aliases:
        what = f"the model {asked.model!r} is not served here: ask for {service.model!r}"
        raise RefusedError(what, code="model_not_found", param="model", status=404)
    return replace(asked, model=service.model)


def _served_by(service: Service) -> dict[str, AttributeValue]:
    return {
        "gen_ai.request.model": service.model,
        "gen_ai.response.model": service.model,
        "perfledger.model.hash": _ready(service).weights_hash,
        "perfledger.tokenizer.hash": service.tokenizer.hash,
    }


def _deadline_ns(traffic: Traffic, trace: RequestTrace) -> int | None:
    """Return when the caller stops waiting. Raises RefusedError where that was before now."""
    if traffic.deadline_ms is None:
        return None
    deadline_ns, now_ns = trace.start_ns + traffic.deadline_ms * NS_PER_MS, monotonic_ns()
    if deadline_ns <= now_ns:
        waited_ms = (now_ns - trace.start_ns) // NS_PER_MS
        what = (
            f"the deadline of {traffic.deadline_ms} ms has passed: reading and tokenizing the"
            f" request took {waited_ms} ms"
        )
        raise RefusedError(what, code="deadline", param=DEADLINE, status=429)
    return deadline_ns


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


def _ready(service: Service) -> Ready:
    ready = service.replicas.ready
    assert ready is not None, "the state is OK"
    return ready


def _sampling(service: Service, asked: CompletionRequest, prompt_tokens: int) -> SamplingParams:
    """Return how to sample. Raises RefusedError for a request that can never fit."""
    ready = _ready(service)
    limits = limits_of(
        service.options, max_model_len=ready.max_model_len, kv_blocks=ready.kv_blocks
    )
    most = most_output_tokens(prompt_tokens, limits, asked.n)
    if asked.n > limits.max_num_seqs:
        what = f"n is {asked.n}, must be from 1 to {limits.max_num_seqs}: a batch holds no more"
        raise RefusedError(what, param="n")
    max_tokens = max(1, most) if asked.max_tokens is None else asked.max_tokens
    if reason := never_fits(prompt_tokens, max_tokens, limits, asked.n):
        param = "messages" if asked.operation == CHAT else "prompt"
        raise RefusedError(reason, code="context_length_exceeded", param=param)
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=asked.temperature,
        top_p=asked.top_p,
        seed=asked.seed,
        stop_token_ids=() if asked.ignore_eos else tuple(service.tokenizer.eos_token_ids),
        n=asked.n,
    )
