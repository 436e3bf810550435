"""What a caller says of its request in `x-perfledger-*` headers: whose it is and how urgent."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

from perfledger.instrumented_runtime.openai_protocol import PRIORITIES, RefusedError
from perfledger.instrumented_runtime.telemetry import AttributeValue

TENANT, CLASS, SESSION = "x-perfledger-tenant", "x-perfledger-class", "x-perfledger-session"
PRIORITY, DEADLINE = "x-perfledger-priority", "x-perfledger-deadline-ms"

MAX_DEADLINE_MS = 999_999_999
_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/@+-]{0,127}")
_PRIORITY = re.compile(r"[+-]?[0-9]{1,10}")
_DEADLINE_MS = re.compile(r"[0-9]{1,9}")


@dataclass(frozen=True, slots=True)
class Traffic:
    """Labels of a request, "" where the caller gave none; lower priorities go first."""

    tenant: str = ""
    traffic_class: str = ""
    session: str = ""
    priority: int | None = None
    deadline_ms: int | None = None  # from arrival

    def attributes(self) -> dict[str, AttributeValue]:
        """Return the attributes of the root span."""
        given: dict[str, str | int | None] = {
            "perfledger.tenant": self.tenant or None,
            "perfledger.class": self.traffic_class or None,
            "perfledger.session": self.session or None,
            "perfledger.priority": self.priority,
            "perfledger.deadline_ms": self.deadline_ms,
        }
        return {name: value for name, value in given.items() if value is not None}

    def or_of_body(self, priority: int | None) -> "Traffic":
        """Return this with the body's priority. Raises RefusedError where the header's differs."""
        if priority is None or priority == self.priority:
            return self
        if self.priority is None:
            return replace(self, priority=priority)
        what = f"priority is {priority} but {PRIORITY} is {self.priority}: give one of them"
        raise RefusedError(what, param="priority")


def parse_traffic(headers: Mapping[str, str]) -> Traffic:
    """Return what the headers say. Raises RefusedError, naming the header."""
    return Traffic(
        _label(headers, TENANT),
        _label(headers, CLASS),
        _label(headers, SESSION),
        _priority(headers.get(PRIORITY)),
        _deadline_ms(headers.get(DEADLINE)),
    )


def _label(headers: Mapping[str, str], header: str) -> str:
    label = headers.get(header)
    if label is None:
        return ""
    if not _LABEL.fullmatch(label):
        raise _bad_header(header, "1 to 128 letters, digits or . _ : / @ + -")
    return label


def _priority(text: str | None) -> int | None:
    if text is None:
        return None
    if not _PRIORITY.fullmatch(text) or not -PRIORITIES <= int(text) < PRIORITIES:
        raise _bad_header(PRIORITY, f"an integer from {-PRIORITIES} to {PRIORITIES - 1}")
    return int(text)


def _deadline_ms(text: str | None) -> int | None:
    if text is None:
        return None
    if not _DEADLINE_MS.fullmatch(text) or int(text) == 0:
        raise _bad_header(DEADLINE, f"milliseconds, 1 to {MAX_DEADLINE_MS}")
    return int(text)


def _bad_header(header: str, expected: str) -> RefusedError:
    return RefusedError(f"{header} must be {expected}", code="invalid_header", param=header)
