"""TLS of both servers, from PEM files: who we are, and which clients' certificates are trusted."""

import ssl
from dataclasses import dataclass
from pathlib import Path

import grpc

from perfledger.schema.errors import UsageError


@dataclass(frozen=True)
class TlsFiles:
    """PEM files; with `client_ca` a client must show a certificate that it signed."""

    cert: Path
    key: Path
    client_ca: Path | None = None

    def check(self) -> None:
        """Raise UsageError where a file is missing, is none, or key and certificate differ."""
        self.http_context()

    def http_context(self) -> ssl.SSLContext:
        """Return what HTTP is served with: TLS 1.2 or later. Raises UsageError."""
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        try:
            context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (OSError, ValueError) as error:
            raise _unusable(error, f"--tls-cert {self.cert}, --tls-key {self.key}") from None
        if self.client_ca is not None:
            try:
                context.load_verify_locations(self.client_ca)
            except (OSError, ValueError) as error:
                raise _unusable(error, f"--tls-client-ca {self.client_ca}") from None
            context.verify_mode = ssl.CERT_REQUIRED
        return context

    def grpc_credentials(self) -> grpc.ServerCredentials:
        """Return what gRPC is served with. Raises UsageError."""
        self.check()
        roots = self.client_ca.read_bytes() if self.client_ca else None
        pair = (self.key.read_bytes(), self.cert.read_bytes())
        return grpc.ssl_server_credentials([pair], roots, require_client_auth=roots is not None)


def _no_password() -> str:
    raise ValueError("the key is encrypted, and nobody is there to type its password")


def _unusable(error: Exception, where: str) -> UsageError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return UsageError(f"TLS files cannot be used: {reason}", where=where, fix="PEM files that fit")
