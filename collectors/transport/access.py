"""Who may send, and into which namespace: bearer tokens, and which addresses need them.

A tokens file holds no token, only its SHA-256 or the file that holds it:

    [[token]]
    namespace = "prod"
    sha256 = "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08"

    [[token]]
    namespace = "staging"
    file = "/run/secrets/staging-token"

A file's name is relative to the tokens file. Several tokens may lead to one namespace, so that one
can be replaced without a gap. The token alone decides the namespace, never a header.
"""

import hmac
import logging
import re
import stat
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from google.rpc.code_pb2 import Code

from perfledger.collectors.forward.forward_loop import hops_of, new_instance_id
from perfledger.collectors.transport.address import Address
from perfledger.collectors.transport.otlp_receiver import Refusal, Sink
from perfledger.schema.errors import UsageError

log = logging.getLogger("perfledger.collect")
_SHA256 = re.compile(r"[0-9a-fA-F]{64}")
_MOST_TOKENS = 1000
_LONGEST_TOKEN = 4096
# Guessing a token must stay hopeless even with the hash known.
_SHORTEST_TOKEN = 16


@dataclass(frozen=True)
class Token:
    """A token's SHA-256, and where its telemetry goes."""

    digest: bytes
    namespace: str


class Access:
    """Finds the sink of a request by its token; counts those that are turned away."""

    def __init__(
        self,
        sinks: Mapping[str, Sink],
        tokens: Sequence[Token] = (),
        open_to: str | None = None,
        own_id: str | None = None,
    ) -> None:
        """Without tokens everything goes to the namespace `open_to`; a token's must be a sink.

        `own_id` is this process's id among collectors that forward to each other.
        """
        self._own_id = own_id or new_instance_id()
        self._sinks = sinks
        self._tokens = tuple(tokens)
        self._open_to = None if tokens else open_to
        self._refused: Counter[str] = Counter()

    def sink(self, authorization: str | None) -> Sink:
        """Return where telemetry goes under the value of an Authorization header.

        Raises Refusal (401) where a token is needed and none, or an unknown one, is given.
        """
        if self._open_to is not None:
            return self._sinks[self._open_to]
        scheme, _, token = (authorization or "").partition(" ")
        if scheme.lower() != "bearer":
            raise _unauthenticated("send a bearer token in the Authorization header")
        presented = sha256(token.strip().encode("utf-8", "surrogateescape")).digest()
        namespace = None
        # All are compared, so that the time says nothing about which is near.
        for known in self._tokens:
            if hmac.compare_digest(known.digest, presented):
                namespace = known.namespace
        if namespace is None:
            raise _unauthenticated("this token is not known here")
        return self._sinks[namespace]

    def hops(self, forwarded_by: str | None) -> tuple[str, ...]:
        """Return which collectors a request has passed, by its header. Raises Refusal on a loop."""
        return hops_of(forwarded_by, self._own_id)

    def refused(self, refusal: Refusal) -> None:
        """Count a request that was refused before it had a namespace."""
        self._refused[f"requests_refused_{refusal.http_status}"] += 1

    def counts(self) -> Counter[str]:
        """Return how many requests of nobody known were refused, by HTTP status."""
        return Counter(self._refused)


def _unauthenticated(message: str) -> Refusal:
    return Refusal(401, Code.UNAUTHENTICATED, message)


def read_tokens(path: Path) -> tuple[Token, ...]:
    """Read a tokens file; a warning says where others on this host may read a secret.

    Raises UsageError, which names the entry, where it is missing or not of the form above.
    """
    try:
        parsed = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read: {error.strerror}", where=str(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError("not TOML", where=str(path), fix="[[token]] entries") from error
    entries = parsed.get("token")
    if parsed.keys() != {"token"} or not isinstance(entries, list) or not entries:
        raise UsageError("holds no [[token]] entries, or something else too", where=str(path))
    if len(entries) > _MOST_TOKENS:
        raise UsageError(f"holds more than {_MOST_TOKENS} tokens", where=str(path))
    _warn_if_readable(path)
    return tuple(_token(entry, path, f"{path}, token {n}") for n, entry in enumerate(entries, 1))


def _token(entry: object, path: Path, where: str) -> Token:
    match entry:
        case {"namespace": str(namespace), "sha256": str(digest), **others} if not others:
            if not _SHA256.fullmatch(digest):
                raise UsageError("sha256 is not 64 hexadecimal digits", where=where)
            return Token(bytes.fromhex(digest), namespace)
        case {"namespace": str(namespace), "file": str(file), **others} if not others:
            return Token(_secret_digest(path.parent / file, where), namespace)
    fix = 'namespace = "…" and either sha256 = "…" or file = "…"'
    raise UsageError("not a token's entry", where=where, fix=fix)


def _secret_digest(path: Path, where: str) -> bytes:
    try:
        secret = path.read_bytes()[: _LONGEST_TOKEN + 1].strip()
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror}", where=where) from error
    if not _SHORTEST_TOKEN <= len(secret) <= _LONGEST_TOKEN:
        wanted = f"{_SHORTEST_TOKEN} to {_LONGEST_TOKEN} bytes"
        raise UsageError(f"{path} does not hold a token of {wanted}", where=where)
    _warn_if_readable(path)
    return sha256(secret).digest()


def _warn_if_readable(path: Path) -> None:
    if path.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        log.warning("%s can be read by others on this host; chmod 600 it", path)


def check_exposure(
    address: Address,
    flag: str,
    *,
    has_tokens: bool = False,
    has_tls: bool = False,
    checks_clients: bool = False,
    insecure: bool = False,
) -> None:
    """Raise UsageError where an address would take telemetry from anyone, or show tokens.

    Beyond loopback clients are told apart by certificate, or by token under TLS.
    """
    if insecure or address.is_loopback or checks_clients or (has_tokens and has_tls):
        return
    host = address.host
    if has_tokens:
        raise UsageError(
            f"{host} can be reached from other hosts, and tokens would travel there in the clear",
            where=flag,
            fix="--tls-cert and --tls-key, or --insecure behind something that ends TLS",
        )
    raise UsageError(
        f"{host} can be reached from other hosts, and nothing says who may send",
        where=flag,
        fix="a loopback address; --tokens-file with --tls-cert and --tls-key; --tls-client-ca;"
        " or --insecure to take telemetry from anyone",
    )
