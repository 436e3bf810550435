"""Answers of the OpenAI protocol: texts, counts and errors to JSON bytes.

Shapes follow OpenAI's API reference for chat completions and (legacy) completions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import orjson

from perfledger.instrumented_runtime.openai_protocol import (
    CHAT,
    TEXT_COMPLETION,
    CompletionRequest,
)


class Finished(NamedTuple):
    """The whole text of one choice and why it ended."""

    text: str
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int

    def to_json(self) -> dict[str, object]:
        """Return OpenAI's `usage` object."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def error_body(what: str, *, kind: str, code: str | None, param: str | None = None) -> bytes:
    """Return OpenAI's error object as JSON."""
    return orjson.dumps({"error": {"message": what, "type": kind, "param": param, "code": code}})


def error_kind(status: int) -> str:
    """Return the `type` that goes with an HTTP status."""
    if status == 429:
        return "rate_limit_error"
    return "server_error" if status >= 500 else "invalid_request_error"


class AnswerFormat:
    """The n choices of one answer in OpenAI's JSON, whole or in chunks.

    What never changes is encoded once. A streamed choice opens with its first event, and ends with
    the event that has its finish reason; events of the choices come in any order.
    """

    def __init__(self, request: CompletionRequest, answer_id: str, created_s: int) -> None:
        self._request = request
        self._chat = request.operation == CHAT
        kind = "chat.completion.chunk" if self._chat else TEXT_COMPLETION
        self._head = {"id": answer_id, "object": kind, "created": created_s, "model": request.model}
        self._prefix = b"data: " + orjson.dumps(self._head)[:-1]
        self._usage_null = b',"usage":null' if request.include_usage else b""
        content = b',"delta":{"content":' if self._chat else b',"text":'
        before = self._prefix + b',"choices":[{"index":'
        self._before_text = [before + b"%d" % choice + content for choice in range(request.n)]
        closing = b'},"logprobs":null' if self._chat else b',"logprobs":null'
        self._after_text = closing + b',"finish_reason":null}]' + self._usage_null + b"}\n\n"
        self._unopened = set(range(request.n)) if self._chat else set()

    def events(self, choice: int, text: str, finish_reason: str | None = None) -> bytes:
        """Return what a choice sends of some text ("" has none) and of its end, if it ends."""
        events = self._opening(choice) if text or finish_reason else b""
        if text:
            events += self._before_text[choice] + orjson.dumps(text) + self._after_text
        if finish_reason:
            last: dict[str, object] = {"delta": {}} if self._chat else {"text": ""}
            events += self._event(choice, last, finish_reason)
        return events

    def ending(self, usage: Usage) -> bytes:
        """Return the events that end the stream, after all choices."""
        events = b""
        if self._request.include_usage:
            tail = orjson.dumps({"choices": [], "usage": usage.to_json()})
            events = self._prefix + b"," + tail[1:] + b"\n\n"
        return events + b"data: [DONE]\n\n"

    def whole(self, finished: Sequence[Finished], usage: Usage) -> bytes:
        """Return the answer to a request that is not streamed; `finished` is in choice order."""
        choices = [self._whole_choice(index, *one) for index, one in enumerate(finished)]
        head = self._head | ({"object": "chat.completion"} if self._chat else {})
        return orjson.dumps(head | {"choices": choices, "usage": usage.to_json()})

    def _whole_choice(self, index: int, text: str, finish_reason: str) -> dict[str, object]:
        content: dict[str, object] = {"text": text}
        if self._chat:
            content = {"message": {"role": "assistant", "content": text, "refusal": None}}
        return {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}

    def _opening(self, choice: int) -> bytes:
        """Return the event before a choice's first text: a chat's role."""
        if choice not in self._unopened:
            return b""
        self._unopened.remove(choice)
        return self._event(choice, {"delta": {"role": "assistant", "content": ""}}, None)

    def _event(self, index: int, content: dict[str, object], finish_reason: str | None) -> bytes:
        choice = {"index": index, **content, "logprobs": None, "finish_reason": finish_reason}
        choices = orjson.dumps({"choices": [choice]})
        return self._prefix + b"," + choices[1:-1] + self._usage_null + b"}\n\n"
