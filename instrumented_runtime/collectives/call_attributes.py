"""The attributes of `collective` and `copy` spans, the same from our ranks and from user code."""

from perfledger.instrumented_runtime.collectives.observed import (
    NOT_OBSERVED,
    CollectiveCall,
    CopyCall,
)

Attributes = dict[str, str | int | bool]


def collective_attributes(call: CollectiveCall, ranks: int, members: str) -> Attributes:
    """Return what a span tells of a call in a group of `ranks`, written out as `members`.

    What was not observed has no attribute; whether start and end were is said.
    """
    attributes: Attributes = {
        "perfledger.collective.op": call.op,
        "perfledger.collective.group": call.group,
        "perfledger.collective.dimension": call.dimension,
        "perfledger.collective.ranks": ranks,
        "perfledger.collective.members": members,
        "perfledger.collective.bytes": call.bytes,
        "perfledger.collective.sequence": call.sequence,
        "perfledger.collective.start_observed": call.start_ns != NOT_OBSERVED,
        "perfledger.collective.end_observed": call.end_ns != NOT_OBSERVED,
    }
    if call.dtype:
        attributes["perfledger.dtype"] = call.dtype
    if call.wire_bytes != NOT_OBSERVED:
        attributes["perfledger.collective.wire_bytes"] = call.wire_bytes
    if call.peer != NOT_OBSERVED:
        attributes["perfledger.collective.peer"] = call.peer
    if call.start_ns != NOT_OBSERVED:
        attributes["perfledger.collective.queued_ns"] = call.start_ns - call.enqueue_ns
    if call.step_seq != NOT_OBSERVED:
        attributes["perfledger.step.seq"] = call.step_seq
    return attributes


def copy_attributes(call: CopyCall) -> Attributes:
    """Return what a span tells of a copy."""
    attributes: Attributes = {
        "perfledger.copy.boundary": call.boundary,
        "perfledger.copy.source": call.source,
        "perfledger.copy.target": call.target,
        "perfledger.copy.bytes": call.bytes,
        "perfledger.dtype": call.dtype,
    }
    if call.step_seq != NOT_OBSERVED:
        attributes["perfledger.step.seq"] = call.step_seq
    return attributes


def members_text(ranks: tuple[int, ...]) -> str:
    """Return ranks as text, like 0-3, 1-7:2 (every second one), or all of irregular ones: 0,3,4."""
    first, count = ranks[0], len(ranks)
    if count == 1:
        return str(first)
    stride = ranks[1] - first
    if stride < 1 or ranks != tuple(range(first, first + stride * count, stride)):
        return ",".join(map(str, ranks))
    step = "" if stride == 1 else f":{stride}"
    return f"{first}-{ranks[-1]}{step}"
