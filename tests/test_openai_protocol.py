"""Request bodies checked: whole values."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfledger.instrumented_runtime.openai_protocol import (
    CHAT,
    TEXT_COMPLETION,
    CompletionRequest,
    RefusedError,
    parse_request,
)

HELLO = [{"role": "user", "content": "Hello"}]


def parse_chat(**fields: Any) -> CompletionRequest:
    return parse_request(CHAT, json.dumps({"messages": HELLO, **fields}).encode())


def parse_prompt(**fields: Any) -> CompletionRequest:
    return parse_request(TEXT_COMPLETION, json.dumps(fields).encode())


def refusal(operation: str, body: bytes) -> tuple[int, str, str | None, str]:
    with pytest.raises(RefusedError) as caught:
        parse_request(operation, body)
    error = caught.value
    return error.status, error.code, error.param, error.what


def test_a_chat_with_everything() -> None:
    asked = parse_chat(
        model="m",
        messages=[
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
            },
            {"role": "assistant", "content": "c", "name": "ignored"},
        ],
        max_completion_tokens=7,
        temperature=0,
        top_p=0.5,
        seed=-3,
        stop="END",
        ignore_eos=True,
        stream=True,
        stream_options={"include_usage": True},
        n=3,
        best_of=3,
        priority=-2,
        user="someone",
        metadata={"any": "thing"},
    )
    assert asked == CompletionRequest(
        operation="chat",
        model="m",
        messages=(
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "a\nb"},
            {"role": "assistant", "content": "c"},
        ),
        prompt="",
        max_tokens=7,
        temperature=0.0,
        top_p=0.5,
        seed=-3,
        stop=("END",),
        ignore_eos=True,
        stream=True,
        include_usage=True,
        n=3,
        priority=-2,
    )


def test_defaults_are_those_of_openai() -> None:
    assert parse_prompt(prompt="Hi", temperature=None, n=None) == CompletionRequest(
        operation="text_completion",
        model="",
        messages=(),
        prompt="Hi",
        max_tokens=16,
        temperature=1.0,
        top_p=1.0,
        seed=None,
        stop=(),
        ignore_eos=False,
        stream=False,
        include_usage=False,
        n=1,
        priority=None,
    )
    assert parse_chat().max_tokens is None


@pytest.mark.parametrize(
    ("prompt", "taken"),
    [("Hi", "Hi"), (["Hi"], "Hi"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ([], [])],
)
def test_forms_of_one_prompt(prompt: object, taken: object) -> None:
    assert parse_prompt(prompt=prompt).prompt == taken


@pytest.mark.parametrize(
    "neutral",
    [
        {"n": 1, "best_of": 1},
        {"tools": [], "tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"logprobs": False, "top_logprobs": 0},
        {"logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0.0},
        {"stop": None, "stream_options": None, "seed": None},
    ],
)
def test_fields_that_ask_for_nothing_are_taken(neutral: dict[str, object]) -> None:
    assert parse_chat(**neutral) == parse_chat()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_object"}),
        ("logprobs", True),
        ("logprobs", 0),
        ("logit_bias", {"5": 1}),
        ("echo", True),
        ("suffix", "end"),
        ("best_of", 3),
        ("use_beam_search", True),
        ("cache_salt", "mine"),
        ("structured_outputs", {"regex": "a"}),
        ("stop_token_ids", [5]),
        ("presence_penalty", 0.5),
    ],
)
def test_what_would_change_the_meaning_is_refused_by_name(field: str, value: object) -> None:
    body = json.dumps({"messages": HELLO, field: value}).encode()
    expected = (400, "unsupported_parameter", field, f"{field} is not supported")
    assert refusal(CHAT, body) == expected


def test_best_of_is_no_more_than_n() -> None:
    body = json.dumps({"messages": HELLO, "n": 2, "best_of": 4}).encode()
    what = "best_of is not supported"
    assert refusal(CHAT, body) == (400, "unsupported_parameter", "best_of", what)


@pytest.mark.parametrize(
    ("fields", "code", "param", "what"),
    [
        ({"messages": None}, "invalid_type", "messages", "messages must be a list"),
        ({"messages": []}, "invalid_value", "messages", "messages is empty"),
        ({"messages": ["x"]}, "invalid_type", "messages[0]", "messages[0] must be an object"),
        (
            {"messages": [{"role": "robot", "content": "x"}]},
            "invalid_value",
            "messages[0].role",
            "messages[0].role must be one of system, developer, user, assistant",
        ),
        (
            {"messages": [{"role": "user"}]},
            "invalid_type",
            "messages[0].content",
            "messages[0].content must be a string or a list of text parts",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "unsupported_parameter",
            "messages[0].content[0].type",
            "messages[0].content[0].type must be text: other parts are not supported",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": 1}]}]},
            "invalid_type",
            "messages[0].content[0].text",
            "messages[0].content[0].text must be a string",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "tool_calls": [{}]}]},
            "unsupported_parameter",
            "messages[0].tool_calls",
            "tool_calls is not supported",
        ),
        (
            {"max_tokens": -1},
            "invalid_value",
            "max_tokens",
            "max_tokens is -1, must be from 1 to 9223372036854775807",
        ),
        ({"max_tokens": "9"}, "invalid_type", "max_tokens", "max_tokens must be an integer"),
        ({"max_tokens": True}, "invalid_type", "max_tokens", "max_tokens must be an integer"),
        (
            {"max_tokens": 3, "max_completion_tokens": 4},
            "invalid_value",
            "max_completion_tokens",
            "max_tokens is 3 but max_completion_tokens is 4: give one of them",
        ),
        (
            {"temperature": 2.5},
            "invalid_value",
            "temperature",
            "temperature is 2.5, must be from 0 to 2",
        ),
        ({"temperature": "hot"}, "invalid_type", "temperature", "temperature must be a number"),
        ({"top_p": 0}, "invalid_value", "top_p", "top_p is 0, must be above 0"),
        ({"n": 0}, "invalid_value", "n", "n is 0, must be from 1 to 128"),
        ({"n": 129}, "invalid_value", "n", "n is 129, must be from 1 to 128"),
        ({"n": True}, "invalid_type", "n", "n must be an integer"),
        ({"n": "2"}, "invalid_type", "n", "n must be an integer"),
        ({"priority": 1.0}, "invalid_type", "priority", "priority must be an integer"),
        ({"priority": "high"}, "invalid_type", "priority", "priority must be an integer"),
        (
            {"priority": 2**31},
            "invalid_value",
            "priority",
            "priority is 2147483648, must be from -2147483648 to 2147483647",
        ),
        ({"seed": 1.5}, "invalid_type", "seed", "seed must be an integer"),
        ({"stream": "yes"}, "invalid_type", "stream", "stream must be true or false"),
        ({"stop": ["a"] * 5}, "invalid_value", "stop", "stop has 5 strings, at most 4"),
        (
            {"stop": ""},
            "invalid_value",
            "stop",
            "each stop string must have 1 to 256 characters",
        ),
        ({"stop": 5}, "invalid_type", "stop", "stop must be a string or a list of strings"),
        (
            {"stream_options": {"include_usage": True}},
            "invalid_value",
            "stream_options",
            "stream_options is only for stream: true",
        ),
        ({"model": 5}, "invalid_type", "model", "model must be a string"),
        ({"model": "m" * 300}, "invalid_value", "model", "model is longer than 256 characters"),
    ],
)
def test_bad_fields(fields: dict[str, object], code: str, param: str, what: str) -> None:
    body = json.dumps({"messages": HELLO, **fields}).encode()
    assert refusal(CHAT, body) == (400, code, param, what)


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b'{"prompt": "a"', "invalid_json", None),
        (b'{"prompt": "\xff"}', "invalid_json", None),
        (b'{"prompt": "a", "temperature": NaN}', "invalid_json", None),
        (b"[" * 100_000, "invalid_json", None),
        (b"[]", "invalid_type", None),
        (b"{}", "invalid_type", "prompt"),
        (b'{"prompt": ["a", "b"]}', "unsupported_parameter", "prompt"),
        (b'{"prompt": [1, "b"]}', "invalid_type", "prompt"),
        (b'{"prompt": [true]}', "invalid_type", "prompt"),
    ],
)
def test_bad_bodies(body: bytes, code: str, param: str | None) -> None:
    assert refusal(TEXT_COMPLETION, body)[:3] == (400, code, param)


@given(
    st.binary(max_size=200)
    | st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["messages", "prompt", "stop", "n", "role", "content"]), inner
            )
        ),
        max_leaves=10,
    ).map(lambda value: json.dumps(value).encode())
)
def test_any_body_is_taken_or_refused(body: bytes) -> None:
    for operation in (CHAT, TEXT_COMPLETION):
        try:
            assert parse_request(operation, body).operation == operation
        except RefusedError as error:
            assert error.status == 400
