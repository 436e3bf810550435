"""Who gets in: tokens and what they lead to, over both transports, and which addresses are safe."""

import logging
import os
from hashlib import sha256
from pathlib import Path

import grpc
import pytest
from google.rpc.code_pb2 import Code
from google.rpc.status_pb2 import Status
from otlp_client import PROTOBUF, TRACE_SERVICE, post, span, traces
from serving_in_thread import serving

from perfledger.collectors.transport.access import Token, check_exposure, read_tokens
from perfledger.collectors.transport.address import Address
from perfledger.collectors.transport.cors import Cors
from perfledger.schema.errors import UsageError
from perfledger.schema.store import Store

SECRETS = {"prod": "prod-token-0123456789", "staging": "staging-token-01234567"}
TOKENS = [Token(sha256(secret.encode()).digest(), name) for name, secret in SECRETS.items()]
EXPORT = f"/{TRACE_SERVICE}/Export"


def bearer(secret: str) -> dict[str, str]:
    return {**PROTOBUF, "Authorization": f"Bearer {secret}"}


def call_with(port: int, body: bytes, **metadata: str) -> bytes:
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        export = channel.unary_unary(EXPORT)
        return export(body, timeout=30, metadata=tuple(metadata.items()))


def span_ids(folder: Path, namespace: str) -> list[bytes]:
    return sorted(Store.at(str(folder), namespace).scan("spans").collect()["span_id"])


def test_the_token_decides_the_namespace_over_both_transports(tmp_path: Path) -> None:
    elsewhere = {"X-Scope-OrgID": "staging", "Perfledger-Namespace": "staging"}
    with serving(tmp_path, tokens=TOKENS) as bound:
        for at, (name, secret) in enumerate(SECRETS.items()):
            body, more = (traces(span(2 * at + n)) for n in (1, 2))
            assert post(bound.http.port, body, {**bearer(secret), **elsewhere})[0] == 200
            lower = f"bearer {secret}"
            assert call_with(bound.grpc.port, more, authorization=lower, namespace=name) == b""
    assert span_ids(tmp_path, "prod") == [n.to_bytes(8, "big") for n in (1, 2)]
    assert span_ids(tmp_path, "staging") == [n.to_bytes(8, "big") for n in (3, 4)]
    assert not (tmp_path / "default").exists()


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        "Bearer unknown-token-0123456789",
        f"Bearer {SECRETS['prod']}x",
        f"Bearer {sha256(SECRETS['prod'].encode()).hexdigest()}",
        f"Basic {SECRETS['prod']}",
        SECRETS["prod"],
        "Bearer \xff\xfe",
    ],
)
def test_without_a_known_token_nobody_gets_in(tmp_path: Path, authorization: str | None) -> None:
    sent = {} if authorization is None else {"authorization": authorization}
    with serving(tmp_path, tokens=TOKENS) as bound:
        status, headers, content = post(bound.http.port, traces(span(1)), {**PROTOBUF, **sent})
        if "\xff" not in str(authorization):
            with pytest.raises(grpc.RpcError) as caught:
                call_with(bound.grpc.port, traces(span(1)), **sent)
            assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
    assert (status, headers["www-authenticate"]) == (401, 'Bearer realm="perfledger"')
    told = Status.FromString(content)
    assert told.code == Code.UNAUTHENTICATED and "retry-after" not in headers
    assert not list(tmp_path.rglob("*.parquet"))


def test_a_stranger_is_refused_before_anything_of_the_body_is_read(tmp_path: Path) -> None:
    with serving(tmp_path, tokens=TOKENS) as bound:
        # The body never comes: an answer shows that nobody waits for it.
        status = post(bound.http.port, b"", {**PROTOBUF, "Content-Length": "900"})[0]
        with grpc.insecure_channel(f"127.0.0.1:{bound.grpc.port}") as channel:
            waiting = channel.stream_unary(EXPORT).future(iter_never())
            assert waiting.exception(30).code() == grpc.StatusCode.UNAUTHENTICATED
        metrics = post(bound.metrics.port, b"", path="/metrics", method="GET")[2].decode()
    assert status == 401
    assert 'requests_refused_total{namespace="",status="401"} 2' in metrics


def test_a_browser_asks_before_it_shows_its_token(tmp_path: Path) -> None:
    origin = {"Origin": "https://app.example.org"}
    asked = {"Access-Control-Request-Method": "POST"}
    asked["Access-Control-Request-Headers"] = "authorization,content-type"
    with serving(tmp_path, tokens=TOKENS, cors=Cors(("https://app.example.org",))) as bound:
        status, granted, _ = post(bound.http.port, b"", {**origin, **asked}, method="OPTIONS")
        refused, headers, _ = post(bound.http.port, b"", {**PROTOBUF, **origin})
        sent = post(bound.http.port, traces(span(1)), {**bearer(SECRETS["prod"]), **origin})
    assert (status, refused, sent[0]) == (204, 401, 200)
    assert granted["access-control-allow-headers"] == "authorization, content-type"
    for answer in (granted, headers, sent[1]):
        assert answer["access-control-allow-origin"] == "https://app.example.org"


def iter_never() -> object:
    import threading

    threading.Event().wait(5)
    yield b""


# --- The tokens file --------------------------------------------------------------------


def write(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "tokens.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_tokens_file_names_hashes_and_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = tmp_path / "secret"
    secret.write_text(f"{SECRETS['staging']}\n")
    secret.chmod(0o600)
    digest = TOKENS[0].digest.hex().upper()
    text = f'[[token]]\nnamespace = "prod"\nsha256 = "{digest}"\n'
    text += f'[[token]]\nnamespace = "staging"\nfile = "{secret.name}"\n'
    assert read_tokens(write(tmp_path, text)) == tuple(TOKENS)
    assert caplog.records == []


def test_what_others_can_read_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = f'[[token]]\nnamespace = "prod"\nsha256 = "{"0" * 64}"\n'
    with caplog.at_level(logging.WARNING):
        read_tokens(path := write(tmp_path, text, 0o644))
    assert caplog.messages == [f"{path} can be read by others on this host; chmod 600 it"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", r"holds no \[\[token\]\] entries"),
        ("[[token]\n", "not TOML"),
        ("token = 1\n", r"holds no \[\[token\]\] entries"),
        ("token = [1]\n", "not a token's entry .*token 1"),
        ('[[token]]\nnamespace = "a"\n', "not a token's entry"),
        ('[[token]]\nnamespace = "a"\ntoken = "plain-secret-0123"\n', "not a token's entry"),
        ('[[token]]\nnamespace = "a"\nsha256 = "00"\n', "sha256 is not 64 hexadecimal digits"),
        ('[[token]]\nnamespace = "a"\nsha256 = "1"\nfile = "b"\n', "not a token's entry"),
        ('[[token]]\nnamespace = "a"\nfile = "/nowhere"\n', "cannot read /nowhere: No such file"),
        ('[[token]]\nnamespace = "a"\nfile = "/dev/null"\n', "does not hold a token of 16 to"),
    ],
)
def test_a_mistake_in_the_tokens_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        read_tokens(write(tmp_path, text))
    assert "plain-secret" not in str(caught.value)


def test_a_tokens_file_that_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"cannot read: No such file.*{os.sep}none"):
        read_tokens(tmp_path / "none")


# --- Addresses --------------------------------------------------------------------------

WIDE = ["0.0.0.0:4317", "[::]:4317", "10.0.0.1:4317", "example.org:4317"]


@pytest.mark.parametrize("address", WIDE)
def test_a_wide_address_needs_to_know_who_sends(address: str) -> None:
    wide = Address.parse(address, "--otlp-grpc")
    with pytest.raises(UsageError, match="(?s)nothing says who may send .*--tokens-file"):
        check_exposure(wide, "--otlp-grpc", has_tls=True)
    with pytest.raises(UsageError, match="(?s)tokens would travel there in the clear.*--tls-cert"):
        check_exposure(wide, "--otlp-grpc", has_tokens=True)
    check_exposure(wide, "--otlp-grpc", has_tokens=True, has_tls=True)
    check_exposure(wide, "--otlp-grpc", has_tls=True, checks_clients=True)
    check_exposure(wide, "--otlp-grpc", insecure=True)


@pytest.mark.parametrize("address", ["127.0.0.1:1", "127.9.9.9:1", "[::1]:1", "localhost:1"])
def test_loopback_needs_nothing(address: str) -> None:
    parsed = Address.parse(address, "--otlp-grpc")
    check_exposure(parsed, "--otlp-grpc")
    assert parsed.is_loopback
