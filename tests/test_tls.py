"""TLS and client certificates on both servers, with certificates made by openssl and real SDKs."""

import gzip
import http.client
import socket
import ssl
import subprocess
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import grpc
import pytest
from conftest import free_port, perfledger
from debian_packages import program
from opentelemetry.exporter.otlp.proto.grpc import trace_exporter as grpc_traces
from opentelemetry.exporter.otlp.proto.http import trace_exporter as http_traces
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from otlp_client import PROTOBUF, TRACE_SERVICE, span, stored, traces, wait_until
from serving_in_thread import serving

from perfledger.collectors.serving import Endpoints
from perfledger.collectors.transport.tls import TlsFiles
from perfledger.schema.errors import UsageError
from perfledger.schema.store import Store


def openssl(*arguments: str, cwd: Path) -> None:
    subprocess.run([program("openssl"), *arguments], cwd=cwd, check=True, capture_output=True)


@pytest.fixture(scope="module")
def pki(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with ca.pem, and certificates and keys of `server` and `client` that it signed."""
    folder = tmp_path_factory.mktemp("pki")
    for ca in ("ca", "other"):
        new = ("req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        openssl(*new, "-keyout", f"{ca}.key", "-out", f"{ca}.pem", "-subj", f"/CN={ca}", cwd=folder)
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    for name, ca in (("server", "ca"), ("client", "ca"), ("stranger", "other")):
        request = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
        files = ("-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(*request, *files, cwd=folder)
        sign = ("x509", "-req", "-in", f"{name}.csr", "-CA", f"{ca}.pem", "-CAkey", f"{ca}.key")
        openssl(*sign, "-CAcreateserial", "-extfile", "names", "-out", f"{name}.pem", cwd=folder)
    openssl(
        "ec", "-in", "server.key", "-aes256", "-passout", "pass:x", "-out", "locked.key", cwd=folder
    )
    return folder


@pytest.fixture(autouse=True)
def no_other_authorities(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the SDK's certificate_file count: requests puts these variables above it."""
    for variable in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        monkeypatch.delenv(variable, raising=False)


def files(pki: Path, **changes: Path) -> TlsFiles:
    return TlsFiles(**{"cert": pki / "server.pem", "key": pki / "server.key", **changes})


@pytest.fixture
def mutual(pki: Path, tmp_path: Path) -> Iterator[Endpoints]:
    """A collector that lets in who has a certificate of the same authority."""
    with serving(tmp_path / "store", tls=files(pki, client_ca=pki / "ca.pem")) as bound:
        yield bound


def exporters(bound: Endpoints, pki: Path, client: str | None) -> list[SpanExporter]:
    certificate, key = (str(pki / f"{client}.{end}") if client else None for end in ("pem", "key"))
    credentials = grpc.ssl_channel_credentials(
        (pki / "ca.pem").read_bytes(),
        Path(key).read_bytes() if key else None,
        Path(certificate).read_bytes() if certificate else None,
    )
    return [
        grpc_traces.OTLPSpanExporter(
            f"https://127.0.0.1:{bound.grpc.port}", credentials=credentials, timeout=3
        ),
        http_traces.OTLPSpanExporter(
            f"https://127.0.0.1:{bound.http.port}/v1/traces",
            certificate_file=str(pki / "ca.pem"),
            client_certificate_file=certificate,
            client_key_file=key,
            timeout=3,
        ),
    ]


def send(exporter: SpanExporter, name: str) -> None:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    provider.get_tracer("t").start_span(name).end()
    provider.shutdown()


def test_the_sdk_sends_over_tls(pki: Path, tmp_path: Path) -> None:
    with serving(tmp_path, tls=files(pki)) as bound:
        for name, exporter in zip(("grpc", "http"), exporters(bound, pki, None), strict=True):
            send(exporter, name)
    assert sorted(stored(tmp_path, "spans")["name"]) == ["grpc", "http"]


def test_the_sdk_sends_with_its_certificate(mutual: Endpoints, pki: Path, tmp_path: Path) -> None:
    for name, exporter in zip(("grpc", "http"), exporters(mutual, pki, "client"), strict=True):
        send(exporter, name)
    wait_until(lambda: stored_names(tmp_path / "store") == ["grpc", "http"])


def stored_names(folder: Path) -> list[str]:
    return sorted(stored(folder, "spans")["name"])


@pytest.mark.parametrize("client", [None, "stranger"])
def test_without_a_certificate_of_the_authority_nobody_gets_in(
    mutual: Endpoints, pki: Path, client: str | None
) -> None:
    context = ssl.create_default_context(cafile=pki / "ca.pem")
    if client:
        context.load_cert_chain(pki / f"{client}.pem", pki / f"{client}.key")
    connection = http.client.HTTPSConnection("127.0.0.1", mutual.http.port, context=context)
    with pytest.raises((ssl.SSLError, ConnectionError, http.client.RemoteDisconnected)):
        connection.request("POST", "/v1/traces", traces(span(1)), PROTOBUF)
        connection.getresponse()
    pair = [(pki / f"{client}.{end}").read_bytes() if client else None for end in ("key", "pem")]
    credentials = grpc.ssl_channel_credentials((pki / "ca.pem").read_bytes(), *pair)
    with (
        grpc.secure_channel(f"127.0.0.1:{mutual.grpc.port}", credentials) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary(f"/{TRACE_SERVICE}/Export")(traces(span(1)), timeout=5)
    assert caught.value.code() == grpc.StatusCode.UNAVAILABLE


def test_a_config_file_makes_a_collector_that_other_hosts_may_use(
    pki: Path, tmp_path: Path
) -> None:
    program("curl")
    tokens, config = tmp_path / "tokens.toml", tmp_path / "collect.toml"
    digest = sha256(b"a-token-of-the-team").hexdigest()
    tokens.write_text(f'[[token]]\nnamespace = "team"\nsha256 = "{digest}"\n')
    tokens.chmod(0o600)
    config.write_text(
        f'[collect]\ntokens_file = "{tokens}"\ntls_cert = "{pki}/server.pem"\n'
        f'tls_key = "{pki}/server.key"\n'
    )
    wide = f"0.0.0.0:{free_port()}"
    (tmp_path / "body").write_bytes(gzip.compress(traces(span(1))))
    store = tmp_path / "store"
    flags = ["--config", str(config), "--store", str(store), "--metrics", "off"]
    flags += ["--otlp-grpc", "127.0.0.1:0", "--otlp-http", wide]
    with perfledger("collect", *flags, log=tmp_path / "collect.log"):
        url = f"https://127.0.0.1:{wide.rpartition(':')[2]}/v1/traces"
        curl = ["curl", "-sS", "--retry", "20", "--retry-connrefused", "--retry-delay", "1"]
        curl += ["--cacert", str(pki / "ca.pem"), "--data-binary", f"@{tmp_path / 'body'}"]
        curl += ["-H", "Content-Type: application/x-protobuf", "-H", "Content-Encoding: gzip"]
        curl += ["-o", "/dev/null", "-w", "%{http_code}", url]
        unknown = subprocess.run(curl, capture_output=True, text=True, check=True).stdout
        curl += ["-H", "Authorization: Bearer a-token-of-the-team"]
        known = subprocess.run(curl, capture_output=True, text=True, check=True).stdout
    assert (unknown, known) == ("401", "200")
    assert Store.at(str(store), "team").scan("spans").collect().height == 1
    assert [path.name for path in store.iterdir()] == ["team"]


def test_plain_clients_and_old_protocols_are_turned_away(pki: Path, tmp_path: Path) -> None:
    with serving(tmp_path, tls=files(pki)) as bound:
        with socket.create_connection(("127.0.0.1", bound.http.port), timeout=10) as plain:
            plain.sendall(b"POST /v1/traces HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"200" not in plain.recv(100)
        old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        old.check_hostname, old.verify_mode = False, ssl.CERT_NONE
        old.set_ciphers("ALL:@SECLEVEL=0")
        with pytest.warns(DeprecationWarning):
            old.maximum_version = ssl.TLSVersion.TLSv1_1
        with (
            socket.create_connection(("127.0.0.1", bound.http.port), timeout=10) as client,
            pytest.raises((ssl.SSLError, ConnectionError)),
        ):
            old.wrap_socket(client)


def test_metrics_on_loopback_stay_plain(pki: Path, tmp_path: Path) -> None:
    with serving(tmp_path, tls=files(pki, client_ca=pki / "ca.pem")) as bound:
        connection = http.client.HTTPConnection("127.0.0.1", bound.metrics.port, timeout=10)
        connection.request("GET", "/health")
        assert connection.getresponse().status == 200


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"cert": "none.pem"}, "(?s)No such file.*--tls-cert"),
        ({"key": "client.key"}, "(?s)TLS files cannot be used.*--tls-key"),
        ({"key": "locked.key"}, "(?s)TLS files cannot be used.*encrypted"),
        ({"cert": "names"}, "TLS files cannot be used"),
        ({"client_ca": "none.pem"}, "(?s)No such file.*--tls-client-ca"),
        ({"client_ca": "names"}, "(?s)TLS files cannot be used.*--tls-client-ca"),
    ],
)
def test_files_that_do_not_fit_are_said(pki: Path, changes: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        files(pki, **{name: pki / file for name, file in changes.items()}).check()
