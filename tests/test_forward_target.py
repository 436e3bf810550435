"""[forward] of the TOML file."""

import tomllib
from pathlib import Path

import pytest
from forward_servers import (
    HTTP,
)

from perfledger.collectors.forward.forward_target import ForwardTarget
from perfledger.schema.errors import UsageError


def test_the_table_in_toml(tmp_path: Path) -> None:
    secrets = tmp_path / "headers"
    secrets.write_text("# ours\nAuthorization: Bearer s3cret:x\n\n")
    text = f"""
    endpoint = "https://otlp.example.com/base/"
    protocol = "http/protobuf"
    headers_file = "{secrets}"
    headers = {{X-Scope-OrgID = "team-a"}}
    compression = "gzip"
    signals = ["traces"]
    queue_mib = 8
    max_age_s = 60
    timeout_s = 3
    drain_s = 1
    """
    target = ForwardTarget.from_toml(tomllib.loads(text))
    assert target == ForwardTarget(
        "https://otlp.example.com/base",
        HTTP,
        headers=(("x-scope-orgid", "team-a"), ("authorization", "Bearer s3cret:x")),
        compression="gzip",
        signals=("traces",),
        queue_bytes=8 * 2**20,
        max_age_s=60.0,
        timeout_s=3.0,
        drain_s=1.0,
    )
    assert "s3cret" not in repr(target)
    assert ForwardTarget.from_toml({"endpoint": "http://[::1]:4317"}).address == "[::1]:4317"
    assert ForwardTarget.from_toml({"endpoint": "https://peer"}).address == "peer:443"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "endpoint must be a URL"),
        ('endpoint = "127.0.0.1:4317"', "endpoint must be a URL"),
        ('endpoint = "http://peer:99999"', "endpoint must be a URL"),
        ('endpoint = "http://"', "endpoint must be a URL"),
        (f'endpoint = "http://{"a" * 300}"', "endpoint must be a URL"),
        ('endpoint = "http://peer/v1/traces"', "gRPC has none"),
        ('endpoint = "http://me:s3cret@peer"', "without user and password"),
        ('endpoint = "http://peer?x=s3cret"', "without ? and #"),
        ('endpoint = "http://peer"\nprotocol = "http"', "must be grpc or http/protobuf"),
        ('endpoint = "http://peer"\nqueue_mib = 0', "queue_mib must be a whole number"),
        ('endpoint = "http://peer"\nsignals = ["spans"]', "signals must be a list of some of"),
        ('endpoint = "http://peer"\nsignals = []', "signals must be a list of some of"),
        ('endpoint = "http://peer"\nheaders = {Host = "s3cret"}', "without host"),
        ('endpoint = "http://peer"\nheaders = {a = "s3cret\\n"}', "printable ASCII"),
        ('endpoint = "http://peer"\nheaders = {a-bin = "s3cret"}', "without a-bin"),
        ('endpoint = "http://peer"\nheaders_file = "/no/such"', "headers_file cannot be read"),
        ('endpoint = "http://peer"\nca_file = "/dev/null"', "a file of certificates in PEM"),
        ('endpoint = "http://peer"\nretries = 3', "unknown setting: retries"),
    ],
)
def test_a_mistake_in_toml_is_named_and_no_secret_shown(text: str, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        ForwardTarget.from_toml(tomllib.loads(text))
    assert said in str(caught.value)
    assert "s3cret" not in str(caught.value)
