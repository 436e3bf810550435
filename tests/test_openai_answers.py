"""Answers shaped as OpenAI has them: whole values."""

import json
from typing import Any

import pytest

from perfledger.instrumented_runtime.openai_answers import (
    AnswerFormat,
    Finished,
    Usage,
    error_body,
    error_kind,
)
from perfledger.instrumented_runtime.openai_protocol import (
    CHAT,
    TEXT_COMPLETION,
    CompletionRequest,
    parse_request,
)

USAGE = {
    "prompt_tokens": 3,
    "completion_tokens": 2,
    "total_tokens": 5,
    "prompt_tokens_details": {"cached_tokens": 1},
}


def chat(**fields: Any) -> CompletionRequest:
    hello = [{"role": "user", "content": "Hello"}]
    return parse_request(CHAT, json.dumps({"messages": hello, **fields}).encode())


def completion(**fields: Any) -> CompletionRequest:
    return parse_request(TEXT_COMPLETION, json.dumps({"prompt": "x", **fields}).encode())


def events(stream: bytes) -> list[object]:
    lines = [line for line in stream.decode().split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) if line != "data: [DONE]" else "[DONE]" for line in lines]


def test_chunks_of_a_chat() -> None:
    asked = chat(model="m", n=2, stream=True, stream_options={"include_usage": True})
    shape = AnswerFormat(asked, "chatcmpl-1", 1700000000)
    head = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": "m",
    }

    def chunk(index: int, delta: dict[str, str], finish: str | None = None) -> dict[str, object]:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**head, "choices": [choice], "usage": None}

    assert shape.events(0, "") == b""
    stream = [
        shape.events(0, '"quoted" é\n'),
        shape.events(1, "", "stop"),  # its first token was the last, without text
        shape.events(0, "b", "length"),
        shape.ending(Usage(3, 2, 1)),
    ]
    assert events(b"".join(stream)) == [
        chunk(0, {"role": "assistant", "content": ""}),
        chunk(0, {"content": '"quoted" é\n'}),
        chunk(1, {"role": "assistant", "content": ""}),
        chunk(1, {}, "stop"),
        chunk(0, {"content": "b"}),
        chunk(0, {}, "length"),
        {**head, "choices": [], "usage": USAGE},
        "[DONE]",
    ]


def test_chunks_of_a_completion_without_usage() -> None:
    shape = AnswerFormat(completion(model="m", stream=True), "cmpl-1", 17)
    head = {"id": "cmpl-1", "object": "text_completion", "created": 17, "model": "m"}

    def chunk(text: str, finish: str | None) -> dict[str, object]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        return {**head, "choices": [choice]}

    stream = shape.events(0, "a") + shape.events(0, "", "length") + shape.ending(Usage(3, 2, 0))
    assert events(stream) == [chunk("a", None), chunk("", "length"), "[DONE]"]


def test_whole_answers_hold_their_choices_in_order() -> None:
    finished = [Finished("a", "stop"), Finished("", "length")]
    head = {"created": 17, "model": "m", "usage": USAGE}
    whole = AnswerFormat(chat(model="m", n=2), "chatcmpl-1", 17).whole(finished, Usage(3, 2, 1))
    assert json.loads(whole) == {
        **head,
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "choices": [
            {
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": reason,
            }
            for index, (text, reason) in enumerate(finished)
        ],
    }
    old = AnswerFormat(completion(model="m", n=2), "cmpl-1", 17).whole(finished, Usage(3, 2, 1))
    assert json.loads(old) == {
        **head,
        "id": "cmpl-1",
        "object": "text_completion",
        "choices": [
            {"index": 0, "text": "a", "logprobs": None, "finish_reason": "stop"},
            {"index": 1, "text": "", "logprobs": None, "finish_reason": "length"},
        ],
    }


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, "invalid_request_error"), (429, "rate_limit_error"), (503, "server_error")],
)
def test_errors(status: int, kind: str) -> None:
    body = error_body("too late", kind=error_kind(status), code="deadline")
    assert json.loads(body) == {
        "error": {"message": "too late", "type": kind, "param": None, "code": "deadline"}
    }
