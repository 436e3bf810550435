"""Forwarding must not go round in circles: each collector adds its id to what it forwards.

A request that comes back to a collector is refused for good, so its sender drops it. The ids travel
in a header (of gRPC: metadata), which only our collectors pass on: a circle through another
vendor's collector is not seen.
"""

import re
import secrets

from google.rpc.code_pb2 import Code

from perfledger.collectors.forward.forward_target import FORWARDED_BY
from perfledger.collectors.transport.otlp_receiver import Refusal

_ID = re.compile(r"[0-9a-f]{16}")
_MOST_HOPS = 8


def new_instance_id() -> str:
    """Return the id of this collector process: 16 hex digits."""
    return secrets.token_hex(8)


def hops_of(header: str | None, own_id: str) -> tuple[str, ...]:
    """Return which collectors a request has passed, as its header FORWARDED_BY says.

    Raises Refusal (508, FAILED_PRECONDITION: no client retries it) where this one is among them,
    or where they are more than 8. An item that is no id is ignored.
    """
    hops = tuple(item for item in re.split(r"[,\s]+", header or "") if _ID.fullmatch(item))
    if own_id in hops:
        raise Refusal(
            508, Code.FAILED_PRECONDITION, "this collector forwarded this request: a loop"
        )
    if len(hops) > _MOST_HOPS:
        raise Refusal(508, Code.FAILED_PRECONDITION, f"forwarded more than {_MOST_HOPS} times")
    return hops


def hops_header(hops: tuple[str, ...], own_id: str) -> tuple[str, str]:
    """Return the header for what this collector forwards."""
    return FORWARDED_BY, ",".join((*hops, own_id))
