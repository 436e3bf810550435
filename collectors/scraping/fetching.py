"""Asks one target for its page, within limits of time and bytes."""

import asyncio
import ssl
import zlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from perfledger.collectors.scraping.config import ScrapeConfig
from perfledger.collectors.scraping.exposition import UnusableScrape
from perfledger.schema.errors import UsageError

_ACCEPT = (
    "application/openmetrics-text;version=1.0.0;q=0.9,"
    "text/plain;version=0.0.4;q=0.8,text/plain;q=0.5,*/*;q=0.1"
)
_GZIP = 16 + zlib.MAX_WBITS
_LONGEST_TOKEN_BYTES = 4096
# Members of a few bytes each would cost more than they bring.
_MOST_MEMBERS = 100


@dataclass(frozen=True)
class Page:
    """A target's answer, decompressed."""

    body: bytes
    openmetrics: bool


def open_session(config: ScrapeConfig) -> aiohttp.ClientSession:
    """Return a session for one job: no cookies, no proxies, a new connection for each scrape.

    Raises UsageError where `ca_file` cannot be used.
    """
    context: ssl.SSLContext | bool = True
    try:
        if config.ca_file is not None:
            context = ssl.create_default_context(cafile=config.ca_file)
    except OSError as error:
        where = f"[[scrape]] {config.job}"
        raise UsageError(f"ca_file: {config.ca_file}: {error}", where=where) from error
    # A kept connection may be closed by the target just as the next scrape is sent.
    connector = aiohttp.TCPConnector(limit=0, force_close=True, ssl=context)
    return aiohttp.ClientSession(
        connector=connector,
        cookie_jar=aiohttp.DummyCookieJar(),
        auto_decompress=False,
        timeout=aiohttp.ClientTimeout(),
    )


async def fetch(
    session: aiohttp.ClientSession, url: str, config: ScrapeConfig, take: Callable[[int], None]
) -> Page:
    """Return the page; `take` is told the bytes that it holds, and may refuse them.

    Redirects are not followed: they could lead a token elsewhere. Raises UnusableScrape.
    """
    try:
        # Not aiohttp's own timeout: when that and a cancellation meet, the cancellation is lost.
        async with (
            asyncio.timeout(config.timeout_s),
            session.get(url, headers=_headers(config), allow_redirects=False) as response,
        ):
            if response.status != 200:
                raise UnusableScrape(f"http_{response.status}")
            encoding = response.headers.get("Content-Encoding", "").strip().lower()
            chunks = response.content.iter_any()
            body = await _read(chunks, encoding, config.limits.max_bytes, take)
            return Page(body, "openmetrics" in response.headers.get("Content-Type", ""))
    except TimeoutError:
        raise UnusableScrape("timeout") from None
    except (ssl.SSLError, aiohttp.ClientSSLError):
        raise UnusableScrape("tls") from None
    except (aiohttp.ClientError, OSError, ValueError):
        raise UnusableScrape("connection") from None


async def _read(
    chunks: AsyncIterator[bytes], encoding: str, max_bytes: int, take: Callable[[int], None]
) -> bytes:
    if encoding not in ("", "identity", "gzip", "x-gzip"):
        raise UnusableScrape("encoding")
    unpack = _Unpacking() if "gzip" in encoding else None
    body, received = bytearray(), 0
    async for chunk in chunks:
        received += len(chunk)
        part = unpack.take(chunk, max_bytes - len(body)) if unpack else chunk
        if max(len(body) + len(part), received) > max_bytes:
            raise UnusableScrape("too_large")
        take(len(part))
        body += part
    if unpack and not unpack.is_whole:
        raise UnusableScrape("encoding")
    return bytes(body)


class _Unpacking:
    """Gzip, one member after the other, never more than was asked for."""

    def __init__(self) -> None:
        self._inflate = zlib.decompressobj(_GZIP)
        self._members = 1

    @property
    def is_whole(self) -> bool:
        """Return whether the last member has ended."""
        return self._inflate.eof

    def take(self, chunk: bytes, at_most: int) -> bytes:
        """Return what a chunk holds; more than `at_most` only to show that there is more."""
        unpacked = b""
        while chunk and len(unpacked) <= at_most:
            if self._inflate.eof:
                self._next_member()
            try:
                unpacked += self._inflate.decompress(chunk, at_most + 1 - len(unpacked))
            except zlib.error:
                raise UnusableScrape("encoding") from None
            chunk = self._inflate.unused_data or self._inflate.unconsumed_tail
        return unpacked

    def _next_member(self) -> None:
        self._members += 1
        if self._members > _MOST_MEMBERS:
            raise UnusableScrape("encoding")
        self._inflate = zlib.decompressobj(_GZIP)


def _headers(config: ScrapeConfig) -> dict[str, str]:
    headers = {
        "Accept": _ACCEPT,
        "Accept-Encoding": "gzip",
        "User-Agent": "perfledger",
        "X-Prometheus-Scrape-Timeout-Seconds": f"{config.timeout_s:g}",
    }
    if config.bearer_token_file is not None:
        headers["Authorization"] = f"Bearer {_token(config.bearer_token_file)}"
    return headers


def _token(path: Path) -> str:
    """Read the token anew, as clusters replace it. Raises UnusableScrape."""
    try:
        with path.open("rb") as file:
            token = file.read(_LONGEST_TOKEN_BYTES).decode("ascii").strip()
    except (OSError, ValueError):
        raise UnusableScrape("bearer_token_file") from None
    if not token or not token.isprintable() or " " in token:
        raise UnusableScrape("bearer_token_file")
    return token
