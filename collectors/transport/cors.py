"""Cross-origin requests: which web pages may send telemetry from a browser. None by default."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

Headers = list[tuple[bytes, bytes]]

DEFAULT_HEADERS = ("authorization", "content-encoding", "content-type")
DEFAULT_MAX_AGE_S = 7200


@dataclass(frozen=True)
class Cors:
    """Origins such as `https://app.example.org`, `https://*.example.org` or `*` for all.

    Cookies are never allowed: who sends is told by a token.
    """

    origins: tuple[str, ...] = ()
    headers: tuple[str, ...] = DEFAULT_HEADERS
    max_age_s: int = DEFAULT_MAX_AGE_S

    def allows(self, origin: str) -> bool:
        """Return whether a page of this origin may send; a `*` inside stands for no slash."""
        return "*" in self.origins or self._pattern.fullmatch(origin) is not None

    def preflight(self, method: str, request: Mapping[str, str]) -> Headers | None:
        """Return the headers that answer a preflight, or None where the request is none.

        An origin that is not allowed gets none of them, and the browser keeps its request.
        """
        asked = request.get("access-control-request-method")
        if not self.origins or method != "OPTIONS" or asked is None:
            return None
        vary = b"origin, access-control-request-method, access-control-request-headers"
        origin = request.get("origin")
        if asked != "POST" or origin is None or not self.allows(origin):
            return [(b"vary", vary)]
        wanted = request.get("access-control-request-headers", "").lower().split(",")
        allowed = {name.lower() for name in self.headers}
        granted = [name.strip() for name in wanted if "*" in allowed or name.strip() in allowed]
        return [
            (b"vary", vary),
            (b"access-control-allow-origin", self._shown(origin)),
            (b"access-control-allow-methods", b"POST"),
            (b"access-control-allow-headers", ", ".join(filter(None, granted)).encode("latin-1")),
            (b"access-control-max-age", b"%d" % self.max_age_s),
        ]

    def answer(self, request: Mapping[str, str]) -> Headers:
        """Return the headers that let the page read the answer to its request."""
        if not self.origins or (origin := request.get("origin")) is None:
            return []
        if not self.allows(origin):
            return [(b"vary", b"origin")]
        return [
            (b"vary", b"origin"),
            (b"access-control-allow-origin", self._shown(origin)),
            (b"access-control-expose-headers", b"retry-after"),
        ]

    def _shown(self, origin: str) -> bytes:
        return b"*" if "*" in self.origins else origin.encode("latin-1")

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        patterns = (re.escape(origin).replace(r"\*", "[^/]*") for origin in self.origins)
        return re.compile("|".join(patterns), re.IGNORECASE)
