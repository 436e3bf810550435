"""Where telemetry is forwarded to, as `[forward]` of the TOML file says.

[forward]
endpoint = "https://otlp.example.com"   # http:// is without TLS
protocol = "grpc"                       # or "http/protobuf", to ENDPOINT/v1/traces and so on
headers_file = "forward.headers"        # lines `Name: value`: tokens stay out of this file
ca_file = "ca.pem"                      # certificates to trust, in place of the system's
compression = "none"                    # or "gzip"
signals = ["traces", "metrics", "logs"]
queue_mib = 64                          # held in memory; what comes when it is full is dropped
max_age_s = 300                         # what could not be sent for so long is dropped
timeout_s = 10                          # for one attempt
drain_s = 5                             # for what is left when the collector stops
[forward.headers]
x-scope-orgid = "team-a"
"""

import re
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self
from urllib.parse import SplitResult, urlsplit

from perfledger.collectors.otlp_rows import SIGNALS
from perfledger.collectors.settings_table import SettingsTable
from perfledger.schema.errors import UsageError

GRPC, HTTP = PROTOCOLS = ("grpc", "http/protobuf")
SIGNAL_NAMES = tuple(signal.name for signal in SIGNALS)
FORWARDED_BY = "x-perfledger-forwarded-by"

_HEADER_NAME = re.compile(r"[A-Za-z0-9!#$&'*+.^_`|~-]{1,200}")
_HEADER_VALUE = re.compile(r"[\x20-\x7e]{0,8000}")
# Ours to set; others would break the framing of a request, or the check for loops.
_OWN_HEADERS = frozenset(
    {"accept-encoding", "connection", "content-encoding", "content-length", "content-type"}
    | {"host", "te", "transfer-encoding", "upgrade", "user-agent", FORWARDED_BY}
)
_MOST_HEADERS_FILE_BYTES = 64 * 1024


@dataclass(frozen=True)
class ForwardTarget:
    """One OTLP endpoint, and what may be spent on it. Headers may hold secrets: never shown."""

    endpoint: str
    protocol: str = GRPC
    headers: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    ca: bytes | None = field(default=None, repr=False)  # PEM
    compression: str = "none"
    signals: tuple[str, ...] = SIGNAL_NAMES
    queue_bytes: int = 64 * 2**20
    # Requests of one signal that wait are sent as one, up to here: peers take 4 MiB at least.
    batch_bytes: int = 2 * 2**20
    concurrency: int = 4
    max_age_s: float = 300.0
    timeout_s: float = 10.0
    drain_s: float = 5.0
    first_retry_s: float = 1.0
    last_retry_s: float = 30.0

    @property
    def is_secure(self) -> bool:
        """Return whether TLS is used."""
        return self.endpoint.startswith("https:")

    @property
    def address(self) -> str:
        """Return HOST:PORT for gRPC."""
        url = urlsplit(self.endpoint)
        host = f"[{url.hostname}]" if ":" in (url.hostname or "") else url.hostname
        return f"{host}:{url.port or (443 if self.is_secure else 80)}"

    @classmethod
    def from_toml(cls, values: Mapping[str, object], folder: Path = Path()) -> Self:
        """Read the table [forward] and the files it names; relative ones are in `folder`.

        Raises UsageError on an unknown key, a bad value, or a file that cannot be used.
        """
        table = SettingsTable("forward", values)
        protocol = table.choice("protocol", PROTOCOLS)
        headers = [*table.texts_by_name("headers").items(), *_file_headers(table, folder)]
        target = cls(
            endpoint=_endpoint(table, protocol),
            protocol=protocol,
            headers=_checked(table, headers),
            ca=_ca(table, folder),
            compression=table.choice("compression", ("none", "gzip")),
            signals=_signals(table),
            queue_bytes=table.integer("queue_mib", 64, 1, 2**20) * 2**20,
            max_age_s=table.number("max_age_s", 300.0, 1, 86_400),
            timeout_s=table.number("timeout_s", 10.0, 0.1, 600),
            drain_s=table.number("drain_s", 5.0, 0, 60),
        )
        table.end()
        if target.ca is not None and not target.is_secure:
            raise table.error("ca_file", "absent, or the endpoint https://")
        return target


def _endpoint(table: SettingsTable, protocol: str) -> str:
    example = (
        f"a URL such as {'http://127.0.0.1:4317' if protocol == GRPC else 'http://127.0.0.1:4318'}"
    )
    text = table.text("endpoint").rstrip("/")
    try:
        url = urlsplit(text)
        host = url.hostname or ""
        # Reading the port checks it, and a name that IDNA refuses could never be looked up.
        usable = url.scheme in ("http", "https") and url.port != 0 and host.encode("idna")
    except ValueError:
        raise table.error("endpoint", example) from None
    if not usable or not text.isascii() or not text.isprintable() or " " in text:
        raise table.error("endpoint", example)
    _refuse_parts(table, url, protocol)
    return text


def _refuse_parts(table: SettingsTable, url: SplitResult, protocol: str) -> None:
    if url.username is not None or url.password is not None:
        raise table.error("endpoint", "without user and password; put them into headers_file")
    if url.query or url.fragment:
        raise table.error("endpoint", "without ? and #")
    if protocol == GRPC and url.path:
        raise table.error(
            "endpoint", 'without a path; gRPC has none (or protocol = "http/protobuf")'
        )


def _signals(table: SettingsTable) -> tuple[str, ...]:
    signals = table.texts("signals", SIGNAL_NAMES)
    if not signals or set(signals) - set(SIGNAL_NAMES):
        raise table.error("signals", f"a list of some of {', '.join(SIGNAL_NAMES)}")
    return signals


def _file_headers(table: SettingsTable, folder: Path) -> list[tuple[str, str]]:
    content = _content(table, "headers_file", folder)
    if content is None:
        return []
    if len(content) > _MOST_HEADERS_FILE_BYTES:
        raise table.error("headers_file", f"at most {_MOST_HEADERS_FILE_BYTES} bytes long")
    lines = content.decode("latin-1").splitlines()
    pairs = [line.partition(":") for line in lines if line.strip() and not line.startswith("#")]
    if not all(colon for _, colon, _ in pairs):
        raise table.error("headers_file", "a file of lines `Name: value`")
    return [(name.strip(), value.strip()) for name, _, value in pairs]


def _checked(table: SettingsTable, headers: list[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """Return headers in lower case, as gRPC wants them. Raises UsageError on one that cannot be."""
    for name, value in headers:
        low = name.lower()
        if not _HEADER_NAME.fullmatch(name) or not _HEADER_VALUE.fullmatch(value):
            raise table.error("headers", "printable ASCII, one header a line")
        if low in _OWN_HEADERS or low.startswith("grpc-") or low.endswith("-bin"):
            raise table.error("headers", f"without {low}, which the collector sets or cannot send")
    return tuple((name.lower(), value) for name, value in headers)


def _ca(table: SettingsTable, folder: Path) -> bytes | None:
    content = _content(table, "ca_file", folder)
    if content is not None:
        try:
            # An empty text would mean the system's certificates.
            ssl.create_default_context(cadata=content.decode("ascii") or "none")
        except (ssl.SSLError, UnicodeDecodeError, ValueError):
            raise table.error("ca_file", "a file of certificates in PEM") from None
    return content


def _content(table: SettingsTable, key: str, folder: Path) -> bytes | None:
    path = table.text(key)
    if not path:
        return None
    try:
        return (folder / path).read_bytes()
    except OSError as error:
        why = f"{key} cannot be read: {error.strerror}"
        raise UsageError(why, where=path, fix="check the path and its permissions") from error
