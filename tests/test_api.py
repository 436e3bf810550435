"""The OpenAI-compatible API of a real server: curl, the openai client and raw sockets."""

import json
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import openai
import pytest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO: dict[str, Any] = {
    "messages": [{"role": "user", "content": "Hello"}],
    "max_tokens": 6,
    "temperature": 0,
    "ignore_eos": True,
}
PROMPT: dict[str, Any] = {"prompt": "The licence", "max_tokens": 6, "temperature": 0}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, start_runtime: Any) -> Iterator[Any]:
    """One server for the module: enough KV for one long request, faults allowed."""
    flags = ("--no-telemetry", "--allow-faults", "--max-num-seqs", "4", "--max-model-len", "1024")
    with start_runtime(tmp_path_factory.mktemp("api"), *flags) as running:
        yield running


@pytest.fixture
def client(served: Any) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)


def curl(url: str, body: object = None, *flags: str) -> tuple[int, dict[str, str], bytes]:
    """Return status, headers and body; a body that is not bytes is sent as JSON."""
    command = ["curl", "-sS", "-i", "--max-time", "60", "-H", "Expect:", *flags]
    if body is not None:
        command += ["-H", "Content-Type: application/json", "--data-binary", "@-"]
    given = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    ran = subprocess.run([*command, url], input=given, capture_output=True, check=True)
    head, _, content = ran.stdout.partition(b"\r\n\r\n")
    status, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(status.split()[1]), headers, content


def post(served: Any, path: str, body: object, *flags: str) -> tuple[int, Any]:
    status, _, content = curl(served.url + path, body, *flags)
    return status, json.loads(content)


def normalised(answer: dict[str, Any]) -> dict[str, Any]:
    """Take out what differs from call to call, after checking its form."""
    assert re.fullmatch(r"(chatcmpl|cmpl)-[0-9a-f]{32}", answer["id"])
    assert abs(answer["created"] - time.time()) < 100
    return {**answer, "id": "ID", "created": 0}


def events_of(stream: bytes) -> list[Any]:
    lines = [line for line in stream.decode().split("\n\n") if line]
    return [json.loads(line[6:]) if line != "data: [DONE]" else "[DONE]" for line in lines]


def text_of(events: list[Any]) -> str:
    choices = [choice for event in events if event != "[DONE]" for choice in event["choices"]]
    return "".join(
        one["delta"].get("content", "") if "delta" in one else one["text"] for one in choices
    )


def error(what: str, param: str | None, code: str, kind: str = "invalid_request_error") -> Any:
    return {"error": {"message": what, "type": kind, "param": param, "code": code}}


def test_models(served: Any) -> None:
    status, headers, content = curl(f"{served.url}/v1/models")
    body = json.loads(content)
    created = body["data"][0].pop("created")
    assert (status, headers["content-type"], body) == (
        200,
        "application/json",
        {
            "object": "list",
            "data": [{"id": "reference-small", "object": "model", "owned_by": "perfledger"}],
        },
    )
    assert abs(created - time.time()) < 1000


def test_a_whole_chat(served: Any) -> None:
    status, answer = post(served, CHAT, HELLO | {"model": "reference-small"})
    text = answer["choices"][0]["message"]["content"]
    assert status == 200 and text
    assert normalised(answer) == {
        "id": "ID",
        "object": "chat.completion",
        "created": 0,
        "model": "reference-small",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": text, "refusal": None},
                "logprobs": None,
                "finish_reason": "length",
            }
        ],
        "usage": {
            "prompt_tokens": answer["usage"]["prompt_tokens"],
            "completion_tokens": 6,
            "total_tokens": answer["usage"]["prompt_tokens"] + 6,
            "prompt_tokens_details": {"cached_tokens": 0},
        },
    }
    assert post(served, CHAT, HELLO)[1]["choices"] == answer["choices"]


def test_a_streamed_chat_is_the_whole_one_in_chunks(served: Any) -> None:
    whole = post(served, CHAT, HELLO)[1]
    body = HELLO | {"stream": True, "stream_options": {"include_usage": True}}
    status, headers, content = curl(served.url + CHAT, body)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    *chunks, usage, done = events_of(content)
    assert done == "[DONE]"
    assert len({chunk["id"] for chunk in [*chunks, usage]}) == 1
    head = {"object": "chat.completion.chunk", "model": "reference-small", "id": "ID", "created": 0}
    assert normalised(usage) == {**head, "choices": [], "usage": whole["usage"]}
    deltas = [normalised(chunk)["choices"][0] for chunk in chunks]
    assert [normalised(chunk) for chunk in chunks] == [
        {**head, "choices": [delta], "usage": None} for delta in deltas
    ]
    assert deltas[0]["delta"] == {"role": "assistant", "content": ""}
    assert deltas[-1] == {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length"}
    assert {one["finish_reason"] for one in deltas[:-1]} == {None}
    assert text_of(chunks) == whole["choices"][0]["message"]["content"]


def test_a_whole_and_a_streamed_completion(served: Any) -> None:
    status, answer = post(served, COMPLETIONS, PROMPT)
    text = answer["choices"][0]["text"]
    assert (status, normalised(answer)) == (
        200,
        {
            "id": "ID",
            "object": "text_completion",
            "created": 0,
            "model": "reference-small",
            "choices": [{"index": 0, "text": text, "logprobs": None, "finish_reason": "length"}],
            "usage": {
                "prompt_tokens": answer["usage"]["prompt_tokens"],
                "completion_tokens": 6,
                "total_tokens": answer["usage"]["prompt_tokens"] + 6,
                "prompt_tokens_details": {"cached_tokens": 0},
            },
        },
    )
    *chunks, done = events_of(curl(served.url + COMPLETIONS, PROMPT | {"stream": True})[2])
    assert (done, text_of(chunks)) == ("[DONE]", text)
    assert normalised(chunks[-1]) == {
        "id": "ID",
        "object": "text_completion",
        "created": 0,
        "model": "reference-small",
        "choices": [{"index": 0, "text": "", "logprobs": None, "finish_reason": "length"}],
    }


def test_a_prompt_in_a_list_is_the_prompt(served: Any) -> None:
    one = post(served, COMPLETIONS, PROMPT)[1]["choices"]
    assert post(served, COMPLETIONS, PROMPT | {"prompt": ["The licence"]})[1]["choices"] == one
    ids = post(served, COMPLETIONS, PROMPT | {"prompt": [300, 301, 302]})
    assert (ids[0], ids[1]["usage"]["prompt_tokens"]) == (200, 3)
    assert (
        post(served, COMPLETIONS, PROMPT | {"prompt": [[300, 301, 302]]})[1]["choices"]
        == (ids[1]["choices"])
    )


def test_the_openai_client(client: openai.OpenAI) -> None:
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hello"}]},
    ]
    settings: Any = {"model": "reference-small", "messages": messages, "temperature": 0}
    whole = client.chat.completions.create(**settings, max_completion_tokens=5)
    stream = client.chat.completions.create(
        **settings, max_tokens=5, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    pieces = [one.choices[0].delta.content or "" for one in chunks if one.choices]
    assert "".join(pieces) == whole.choices[0].message.content
    assert whole.usage is not None and whole.usage.completion_tokens == 5
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens  # more of it is cached now
    old = client.completions.create(model="reference-small", prompt="The", max_tokens=2)
    assert (old.choices[0].finish_reason, [one.id for one in client.models.list()]) == (
        "length",
        ["reference-small"],
    )


def test_the_openai_client_sees_typed_errors(client: openai.OpenAI) -> None:
    messages: Any = [{"role": "user", "content": "Hello"}]
    with pytest.raises(openai.NotFoundError, match="the model 'gpt-4' is not served here"):
        client.chat.completions.create(model="gpt-4", messages=messages)
    with pytest.raises(openai.BadRequestError, match="n is 5, must be from 1 to 4"):
        client.chat.completions.create(model="reference-small", messages=messages, n=5)


def test_seeds_repeat_and_differ(served: Any) -> None:
    def text(seed: int) -> str:
        body = PROMPT | {"temperature": 1, "top_p": 0.9, "seed": seed, "max_tokens": 12}
        return str(post(served, COMPLETIONS, body)[1]["choices"][0]["text"])

    assert text(1) == text(1)
    assert text(1) != text(2)


def test_a_stop_string_ends_the_answer_and_is_not_in_it(served: Any) -> None:
    body = PROMPT | {"max_tokens": 40}
    full = post(served, COMPLETIONS, body)[1]["choices"][0]["text"]
    stop = full[len(full) // 2 : len(full) // 2 + 5]  # crosses token borders
    status, answer = post(served, COMPLETIONS, body | {"stop": ["never this", stop]})
    assert (status, answer["choices"][0]["finish_reason"]) == (200, "stop")
    assert answer["choices"][0]["text"] == full[: full.index(stop)]
    assert 0 < answer["usage"]["completion_tokens"] < 40
    streamed = curl(served.url + COMPLETIONS, body | {"stop": stop, "stream": True})[2]
    assert text_of(events_of(streamed)) == full[: full.index(stop)]


@pytest.mark.parametrize(
    ("path", "body", "status", "expected"),
    [
        (
            CHAT,
            HELLO | {"model": "gpt-4"},
            404,
            error(
                "the model 'gpt-4' is not served here: ask for 'reference-small'",
                "model",
                "model_not_found",
            ),
        ),
        (
            CHAT,
            HELLO | {"messages": []},
            400,
            error("messages is empty", "messages", "invalid_value"),
        ),
        (
            CHAT,
            HELLO | {"n": 5},
            400,
            error("n is 5, must be from 1 to 4: a batch holds no more", "n", "invalid_value"),
        ),
        (
            COMPLETIONS,
            PROMPT | {"n": 2, "best_of": 3},
            400,
            error("best_of is not supported", "best_of", "unsupported_parameter"),
        ),
        (
            COMPLETIONS,
            PROMPT | {"priority": "high"},
            400,
            error("priority must be an integer", "priority", "invalid_type"),
        ),
        (
            COMPLETIONS,
            PROMPT | {"max_tokens": -5},
            400,
            error(
                "max_tokens is -5, must be from 1 to 9223372036854775807",
                "max_tokens",
                "invalid_value",
            ),
        ),
        (
            COMPLETIONS,
            PROMPT | {"prompt": [1, 999_999]},
            400,
            error(
                "prompt has the token id 999999, must be from 0 to 8191", "prompt", "invalid_value"
            ),
        ),
        (
            COMPLETIONS,
            PROMPT | {"prompt": [5] * 1020, "max_tokens": 5},
            400,
            error(
                "1020 prompt tokens and max_tokens 5 make 1025, but the model takes 1024 tokens",
                "prompt",
                "context_length_exceeded",
            ),
        ),
        (
            COMPLETIONS,
            PROMPT | {"prompt": []},
            400,
            error("the prompt has no tokens", "prompt", "context_length_exceeded"),
        ),
        (
            COMPLETIONS,
            b'{"prompt": "x"',
            400,
            error(
                "the body is not JSON: unexpected end of data: line 1 column 15 (char 14)",
                None,
                "invalid_json",
            ),
        ),
        (
            COMPLETIONS,
            b" " * (4 * 1024 * 1024 + 1),
            413,
            error("the body has more than 4194304 bytes", None, "request_too_large"),
        ),
        ("/v1/embeddings", b"{}", 404, error("POST /v1/embeddings: Not Found", None, "not_found")),
        ("/health", b"{}", 405, error("POST /health: Method Not Allowed", None, "not_found")),
    ],
)
def test_refusals(served: Any, path: str, body: object, status: int, expected: Any) -> None:
    assert post(served, path, body) == (status, expected)


def test_a_body_of_another_type_is_refused(served: Any) -> None:
    command = ["curl", "-sS", "-d", '{"prompt": "x"}', served.url + COMPLETIONS]
    answer = subprocess.run(command, capture_output=True, check=True).stdout
    what = "the body must come with Content-Type: application/json"
    assert json.loads(answer) == error(what, None, "unsupported_media_type")


@pytest.mark.parametrize(
    ("header", "what"),
    [
        ("x-perfledger-tenant: two words", "1 to 128 letters, digits or . _ : / @ + -"),
        ("x-perfledger-tenant: " + "a" * 20_000, "1 to 128 letters, digits or . _ : / @ + -"),
        ("x-perfledger-priority: high", "an integer from -2147483648 to 2147483647"),
        ("x-perfledger-deadline-ms: soon", "milliseconds, 1 to 999999999"),
        ("x-perfledger-deadline-ms: -20", "milliseconds, 1 to 999999999"),
    ],
)
def test_bad_headers_are_refused_by_name(served: Any, header: str, what: str) -> None:
    name = header.split(":")[0]
    expected = error(f"{name} must be {what}", name, "invalid_header")
    assert post(served, COMPLETIONS, PROMPT, "-H", header) == (400, expected)


def test_a_deadline_that_comes_while_waiting_is_refused(served: Any) -> None:
    flags = ("-H", "x-perfledger-deadline-ms: 2000", "-H", "x-perfledger-fault: queue=10s")
    for stream in (True, False):
        status, headers, content = curl(
            served.url + COMPLETIONS, PROMPT | {"stream": stream}, *flags
        )
        what = json.loads(content)["error"]["message"]
        assert (status, headers["x-perfledger-replica"]) == (429, "0")
        assert re.fullmatch(r"the deadline came after \d+ ms in the queue \(admission\)", what)
        assert json.loads(content) == error(what, None, "deadline", "rate_limit_error")
    enough = ("-H", "x-perfledger-deadline-ms: 60000", "-H", "x-perfledger-priority: 3")
    assert post(served, COMPLETIONS, PROMPT, *enough)[0] == 200
    assert in_flight(served) == 0


def test_header_and_body_must_not_disagree_on_the_priority(served: Any) -> None:
    header = ("-H", "x-perfledger-priority: 3")
    assert post(served, COMPLETIONS, PROMPT | {"priority": 3}, *header)[0] == 200
    what = "priority is 4 but x-perfledger-priority is 3: give one of them"
    expected = (400, error(what, "priority", "invalid_value"))
    assert post(served, COMPLETIONS, PROMPT | {"priority": 4}, *header) == expected


def test_choices_are_answers_of_their_own_and_each_stops_by_itself(served: Any) -> None:
    body = PROMPT | {"n": 4, "temperature": 1, "seed": 5, "max_tokens": 30, "ignore_eos": True}
    full = [one["text"] for one in post(served, COMPLETIONS, body)[1]["choices"]]
    assert len(set(full)) == 4
    stop = full[2][8:12]
    status, answer = post(served, COMPLETIONS, body | {"stop": stop})
    assert (status, [one["index"] for one in answer["choices"]]) == (200, [0, 1, 2, 3])
    expected = [
        (text[: text.index(stop)], "stop") if stop in text else (text, "length") for text in full
    ]
    assert [(one["text"], one["finish_reason"]) for one in answer["choices"]] == expected
    assert 4 < answer["usage"]["completion_tokens"] < 120
    streamed = events_of(curl(served.url + COMPLETIONS, body | {"stop": stop, "stream": True})[2])
    found: dict[int, str] = {}
    for event in streamed[:-1]:
        (choice,) = event["choices"]
        found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    assert [found[index] for index in range(4)] == [text for text, _ in expected]
    assert in_flight(served) == 0


def test_ids_and_trace_context_come_back(served: Any) -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    flags = ("-H", f"traceparent: {parent}", "-H", "tracestate: a=b", "-H", "x-request-id: mine")
    status, headers, _ = curl(served.url + COMPLETIONS, PROMPT, *flags)
    assert (status, headers["x-request-id"]) == (200, "mine")
    assert re.fullmatch(
        r"00-0af7651916cd43dd8448eb211c80319c-[0-9a-f]{16}-01", headers["traceparent"]
    )
    assert headers["traceparent"] != parent
    _, headers, _ = curl(served.url + COMPLETIONS, PROMPT, "-H", "traceparent: 00-rubbish")
    assert re.fullmatch(r"req-[0-9a-f]{32}", headers["x-request-id"])
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", headers["traceparent"])


def request_bytes(body: dict[str, Any], path: str = COMPLETIONS) -> bytes:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    return head.encode() + b"Content-Length: %d\r\n\r\n" % len(content) + content


def connect(served: Any) -> socket.socket:
    port = int(served.url.rsplit(":", 1)[1])
    return socket.create_connection(("127.0.0.1", port), timeout=30)


def read_until(connection: socket.socket, mark: bytes) -> bytes:
    received = b""
    while mark not in received:
        piece = connection.recv(65536)
        assert piece, received
        received += piece
    return received


def in_flight(served: Any) -> int:
    return int(json.loads(curl(f"{served.url}/health")[2])["in_flight"])


def wait_for(ready: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"GET\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: many\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nx: " + b"a" * 40_000,
    ],
)
def test_garbage_is_answered_400_and_harms_nobody(served: Any, garbage: bytes) -> None:
    with connect(served) as connection:
        connection.sendall(garbage)
        assert connection.recv(4096).startswith(b"HTTP/1.1 400 ")
    assert post(served, COMPLETIONS, PROMPT)[0] == 200


def test_a_client_that_leaves_before_its_body_has_come(served: Any) -> None:
    with connect(served) as connection:
        connection.sendall(request_bytes(PROMPT)[:-5])
    assert post(served, COMPLETIONS, PROMPT)[0] == 200
    assert in_flight(served) == 0


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_blocks(served: Any, stream: bool) -> None:
    long = PROMPT | {"max_tokens": 1000, "ignore_eos": True, "stream": stream}
    slow = b"x-perfledger-fault: decode=1s\r\nContent-Length"
    connection = connect(served)
    connection.sendall(request_bytes(long).replace(b"Content-Length", slow))
    if stream:
        read_until(connection, b"finish_reason")
    else:
        wait_for(lambda: in_flight(served) == 1)
    connection.close()
    wait_for(lambda: in_flight(served) == 0)


def test_an_unread_client_delays_nobody(served: Any) -> None:
    """Its answer stops at the full socket, is kept, and arrives whole once it reads."""
    asked = PROMPT | {"max_tokens": 300, "ignore_eos": True, "stream": True}  # some 60 KB
    asked["stream_options"] = {"include_usage": True}
    with socket.socket() as unread:
        unread.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        unread.connect(("127.0.0.1", int(served.url.rsplit(":", 1)[1])))
        unread.sendall(request_bytes(asked))
        wait_for(lambda: in_flight(served) == 1)
        assert post(served, COMPLETIONS, PROMPT)[0] == 200
        wait_for(lambda: in_flight(served) == 0)
        assert post(served, COMPLETIONS, PROMPT)[0] == 200
        assert b'"completion_tokens":300,' in read_until(unread, b"data: [DONE]")


def test_two_requests_on_one_connection(served: Any) -> None:
    with connect(served) as connection:
        for _ in range(2):
            connection.sendall(request_bytes(PROMPT))
            assert read_until(connection, b'"cached_tokens":0}}}').startswith(b"HTTP/1.1 200 ")


def test_a_planted_delay_of_the_api(served: Any) -> None:
    header = ("-H", "x-perfledger-fault: tokenize=300ms")
    before = time.monotonic()
    assert post(served, COMPLETIONS, PROMPT, *header)[0] == 200
    assert time.monotonic() - before > 0.3


def test_keys_models_and_faults_are_guarded(tmp_path: Any, start_runtime: Any) -> None:
    flags = ("--no-telemetry", "--max-num-seqs", "1")
    with start_runtime(tmp_path, *flags, PERFLEDGER_API_KEY="secret") as guarded:
        what = "a valid API key is needed: Authorization: Bearer KEY"
        refused = (401, error(what, None, "invalid_api_key"))
        assert post(guarded, COMPLETIONS, PROMPT) == refused
        wrong = ("-H", "Authorization: Bearer Secret")
        assert post(guarded, COMPLETIONS, PROMPT, *wrong) == refused
        right = ("-H", "Authorization: Bearer secret")
        assert post(guarded, COMPLETIONS, PROMPT, *right)[0] == 200
        assert curl(f"{guarded.url}/v1/models")[0] == 401
        status, _, report = curl(f"{guarded.url}/health")
        assert (status, b"secret" in report) == (200, False)
        fault = ("-H", "x-perfledger-fault: decode=5ms")
        what = "x-perfledger-fault is off on this server: start it with --allow-faults"
        assert post(guarded, COMPLETIONS, PROMPT, *right, *fault) == (
            400,
            error(what, "x-perfledger-fault", "invalid_header"),
        )


def test_what_a_loaded_server_refuses_and_changes(tmp_path: Any, start_runtime: Any) -> None:
    """8 requests want 2 seats: every step of the policy is on until most of them have ended."""
    policy = "refuse-n,cap-max-tokens,shed-low-priority"
    flags = ("--no-telemetry", "--max-num-seqs", "2", "--max-model-len", "1024")
    long = request_bytes(PROMPT | {"max_tokens": 150, "ignore_eos": True})
    with start_runtime(tmp_path, *flags, "--degrade", policy) as loaded, ExitStack() as stack:
        held = [stack.enter_context(connect(loaded)) for _ in range(8)]
        for connection in held:
            connection.sendall(long)
        wait_for(lambda: in_flight(loaded) == 8)
        url, body = loaded.url + COMPLETIONS, PROMPT | {"max_tokens": 100, "ignore_eos": True}
        for code, asked in (("degraded", {"n": 2}), ("shed", {"priority": 1})):
            status, headers, content = curl(url, body | asked)
            found = json.loads(content)["error"]["code"]
            assert (status, headers["retry-after"], found) == (429, "1", code)
        status, headers, content = curl(url, body)
        assert (status, headers["x-perfledger-degraded"]) == (200, "cap_max_tokens=64")
        assert json.loads(content)["usage"]["completion_tokens"] == 64
        answers = [read_until(connection, b'"cached_tokens":') for connection in held]
        lengths = {int(re.findall(rb'"completion_tokens":(\d+)', one)[0]) for one in answers}
        assert lengths == {150, 64}  # the later ones came when the policy was on already
        status, headers, _ = curl(url, body)
        assert (status, "x-perfledger-degraded" in headers) == (200, False)
