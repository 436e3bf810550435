"""HOST:PORT, as typed and as shown."""

import ipaddress
from dataclasses import dataclass
from typing import Self

from perfledger.schema.errors import UsageError


@dataclass(frozen=True)
class Address:
    """Where to listen; port 0 takes a free one."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str, flag: str) -> Self:
        """Read HOST:PORT, [::1]:4317 too. Raises UsageError, which names the flag."""
        host, _, port = text.rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not host or not (port.isascii() and port.isdigit()) or int(port) > 65_535:
            raise UsageError(f"not HOST:PORT: {text!r}", where=flag, fix=f"{flag} 127.0.0.1:4317")
        return cls(host, int(port))

    @property
    def is_loopback(self) -> bool:
        """Return whether only this host can reach it."""
        return is_loopback(self.host)

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def is_loopback(host: str) -> bool:
    """Return whether only this host can reach an address, by name or number."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
