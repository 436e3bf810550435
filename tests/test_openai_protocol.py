"""Requests checked, answers shaped, stops cut, headers read: pure functions, whole values."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from perfledger.instrumented_runtime.answer_text import AnswerText, StopFilter
from perfledger.instrumented_runtime.faults import for_engine, parse_faults
from perfledger.instrumented_runtime.openai_protocol import (
    CHAT,
    TEXT_COMPLETION,
    AnswerFormat,
    CompletionRequest,
    RefusedError,
    Usage,
    parse_request,
)
from perfledger.instrumented_runtime.request_trace import (
    RequestTrace,
    parse_traceparent,
    traffic_attributes,
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
        {"n": 1},
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
        ("n", 2),
        ("n", True),
        ("tools", [{"type": "function"}]),
        ("response_format", {"type": "json_object"}),
        ("logprobs", True),
        ("logprobs", 0),
        ("logit_bias", {"5": 1}),
        ("echo", True),
        ("suffix", "end"),
        ("best_of", 3),
        ("presence_penalty", 0.5),
    ],
)
def test_what_would_change_the_meaning_is_refused_by_name(field: str, value: object) -> None:
    body = json.dumps({"messages": HELLO, field: value}).encode()
    what = "n must be 1" if field == "n" else f"{field} is not supported"
    assert refusal(CHAT, body) == (400, "unsupported_parameter", field, what)


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


def events(stream: bytes) -> list[object]:
    lines = [line for line in stream.decode().split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line[6:]) if line != "data: [DONE]" else "[DONE]" for line in lines]


def test_chunks_of_a_chat() -> None:
    asked = parse_chat(model="m", stream=True, stream_options={"include_usage": True})
    shape = AnswerFormat(asked, "chatcmpl-1", 1700000000)
    head = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1700000000,
        "model": "m",
    }

    def chunk(delta: dict[str, str], finish: str | None) -> dict[str, object]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return {**head, "choices": [choice], "usage": None}

    text = shape.text('"quoted" é\n')
    assert shape.text("") == b""
    assert events(shape.opening() + text + shape.closing("stop", Usage(3, 2, 1))) == [
        chunk({"role": "assistant", "content": ""}, None),
        chunk({"content": '"quoted" é\n'}, None),
        chunk({}, "stop"),
        {
            **head,
            "choices": [],
            "usage": {
                "prompt_tokens": 3,
                "completion_tokens": 2,
                "total_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 1},
            },
        },
        "[DONE]",
    ]


def test_chunks_of_a_completion_without_usage() -> None:
    shape = AnswerFormat(parse_prompt(model="m", prompt="x", stream=True), "cmpl-1", 17)
    head = {"id": "cmpl-1", "object": "text_completion", "created": 17, "model": "m"}

    def chunk(text: str, finish: str | None) -> dict[str, object]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}
        return {**head, "choices": [choice]}

    stream = shape.opening() + shape.text("a") + shape.closing("length", Usage(3, 2, 0))
    assert events(stream) == [chunk("a", None), chunk("", "length"), "[DONE]"]


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: cut at the stop string that is complete first, of several the longest."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(map(len, hits))], True
    return text, False


FEW_LETTERS = st.text(alphabet="ab\u00e9", max_size=30)


@given(
    st.lists(FEW_LETTERS, max_size=12),
    st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=4), max_size=4),
)
def test_stop_strings_cut_the_same_whatever_the_pieces(pieces: list[str], stops: list[str]) -> None:
    filter_, out, hit = StopFilter(stops), "", False
    for piece in pieces:
        text, hit = filter_.push(piece)
        out += text
        if hit:
            break
    else:
        out += filter_.flush()
    assert (out, hit) == cut("".join(pieces), stops)


def test_only_what_may_become_a_stop_string_is_held() -> None:
    filter_ = StopFilter(["END", "\n\n"])
    assert [filter_.push(piece) for piece in ("a E", "N", "d\n", "b", "EN", "D c")] == [
        ("a ", False),
        ("", False),
        ("ENd", False),
        ("\nb", False),
        ("", False),
        ("", True),
    ]


class Letters:
    """A tokenizer of one letter a token."""

    def push(self, token: int) -> str:
        return chr(token)

    def flush(self) -> str:
        return ""


def test_tokens_are_counted_up_to_the_hit_and_the_end_token_has_no_text() -> None:
    text = AnswerText(Letters(), ["bc"])  # type: ignore[arg-type]
    assert [text.push(ord(letter), None) for letter in "abc"] == [
        ("a", None),
        ("", None),
        ("", "stop"),
    ]
    assert text.tokens == 3
    ended = AnswerText(Letters(), ["bc"])  # type: ignore[arg-type]
    assert [ended.push(98, None), ended.push(0, "stop")] == [("", None), ("b", "stop")]
    full = AnswerText(Letters(), ())  # type: ignore[arg-type]
    assert [full.push(98, "length"), full.tokens] == [("b", "length"), 1]


def test_faults() -> None:
    faults = parse_faults("template=50ms, decode=1s,queue=7us", True)
    assert faults == {"template": 50_000_000, "decode": 1_000_000_000, "queue": 7_000}
    assert for_engine(faults) == {"decode": 1_000_000_000, "queue": 7_000}
    assert parse_faults(None, False) == {}


@pytest.mark.parametrize(
    "header",
    [
        "",
        "decode",
        "decode=5",
        "decode=-5ms",
        "sleep=5ms",
        "decode=5ms,decode=6ms",
        "decode=11s",
        "decode=5ms;",
        "x" * 300,
    ],
)
def test_bad_faults_are_refused(header: str) -> None:
    with pytest.raises(RefusedError) as caught:
        parse_faults(header, True)
    assert (caught.value.code, caught.value.param) == ("invalid_header", "x-perfledger-fault")


def test_faults_are_off_by_default() -> None:
    with pytest.raises(RefusedError, match="--allow-faults"):
        parse_faults("decode=5ms", False)


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def test_traceparent() -> None:
    ids = (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
    assert parse_traceparent(PARENT) == ids
    assert parse_traceparent("cc" + PARENT[2:] + "-more") == ids


@pytest.mark.parametrize(
    "header",
    [
        None,
        "",
        PARENT.upper(),
        PARENT + "-more",
        "ff" + PARENT[2:],
        PARENT.replace("0af7651916cd43dd8448eb211c80319c", "0" * 32),
        PARENT.replace("b7ad6b7169203331", "0" * 16),
        PARENT[:-3],
        PARENT + "\n",
    ],
)
def test_invalid_traceparents_are_ignored(header: str | None) -> None:
    assert parse_traceparent(header) is None


def test_a_trace_continues_the_callers() -> None:
    headers = [(b"traceparent", PARENT.encode()), (b"X-Request-ID", b"mine")]
    record = (trace := RequestTrace(7, "chat", headers, 1000)).record()
    assert trace.request_id == "mine"
    assert re.fullmatch(r"00-0af7651916cd43dd8448eb211c80319c-[0-9a-f]{16}-01", trace.traceparent)
    assert (record.request, record.name, record.start_ns) == (7, "chat", 1000)
    assert (record.trace_id, record.parent_span_id) == parse_traceparent(PARENT)
    assert f"{record.span_id:016x}" == trace.traceparent.split("-")[2]


def test_a_trace_of_its_own() -> None:
    headers = [(b"traceparent", PARENT.encode())] * 2 + [(b"x-request-id", b"a b")]
    trace = RequestTrace(7, "chat", headers, 1000)
    assert trace.record().parent_span_id is None
    assert re.fullmatch(r"req-[0-9a-f]{32}", trace.request_id)


def test_traffic_headers() -> None:
    assert traffic_attributes(
        {
            "x-perfledger-tenant": "acme",
            "x-perfledger-class": "batch",
            "x-perfledger-session": "s:1/2",
            "x-perfledger-deadline-ms": "1500",
        }
    ) == {
        "perfledger.tenant": "acme",
        "perfledger.class": "batch",
        "perfledger.session": "s:1/2",
        "perfledger.deadline_ms": 1500,
    }
    assert traffic_attributes({}) == {}


@pytest.mark.parametrize(
    ("header", "value"),
    [
        ("x-perfledger-tenant", ""),
        ("x-perfledger-tenant", "a" * 129),
        ("x-perfledger-class", "two words"),
        ("x-perfledger-deadline-ms", "-5"),
        ("x-perfledger-deadline-ms", "0"),
        ("x-perfledger-deadline-ms", "soon"),
        ("x-perfledger-deadline-ms", "\u0665"),
    ],
)
def test_bad_traffic_headers_are_refused_by_name(header: str, value: str) -> None:
    with pytest.raises(RefusedError) as caught:
        traffic_attributes({header: value})
    assert (caught.value.code, caught.value.param) == ("invalid_header", header)
