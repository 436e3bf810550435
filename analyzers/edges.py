"""The ledger of data movement: what went over each edge of the hierarchy, and how near its ceiling.

Every number says where it is from. `measured`: a counter or a span of the thing itself. `derived`:
exact integers from the model's shapes and the batch, what operators ask for, not what a DRAM bus
carried. `datasheet`: a vendor's number. `not observable`: nobody here can tell, and why.
"""

from dataclasses import dataclass

from perfledger.analyzers.contention import Contender
from perfledger.analyzers.roofline import Roofline

MEASURED, DERIVED, DATASHEET = "measured", "derived", "datasheet"
NOT_OBSERVABLE = "not observable"


@dataclass(frozen=True)
class Part:
    """A share of an edge's bytes: an operator class, a copy boundary, a collective, a device."""

    name: str
    forward_bytes: int
    backward_bytes: int | None  # null where the source tells of one way only
    transfers: int | None


@dataclass(frozen=True)
class Flow:
    """What one source says went over an edge: forward from `source` to `target`, and backward.

    `active_ns` is the union of the intervals in which it moved; for counters it is the window.
    """

    told_by: str
    provenance: str
    forward_bytes: int
    backward_bytes: int | None  # null where the source tells of one way only
    transfers: int | None
    active_ns: int
    bytes_per_s: float | None  # both ways, while active; null where the interval has no length
    transfers_per_s: float | None
    latency_ns: float | None  # mean time of one transfer, where transfers are seen one by one
    bytes_per_token: float | None  # both ways, a token computed (prompt and new)
    devices: int  # as many separate ways carried it: memories, NICs, disks
    parts: tuple[Part, ...]
    note: str


@dataclass(frozen=True)
class CeilingShare:
    """The ceiling that an edge is held against, and what share of it the first flow reached."""

    operation: str
    variant: str
    bytes_per_s: float
    provenance: str  # measured or datasheet
    share: float | None
    note: str


@dataclass(frozen=True)
class EdgeLine:
    """One edge. `flows` is empty where it is not observable; the first one is the answer."""

    edge: str
    source: str
    target: str
    forward: str  # the direction's word, like read, sent, to device
    backward: str
    provenance: str  # of the first flow
    why: str  # why not observable; empty else
    flows: tuple[Flow, ...]
    ceiling: CeilingShare | None
    no_ceiling: str  # why there is none
    latency_floor_ns: float | None  # measured by `perfledger ceilings`
    contenders: tuple[Contender, ...]
    contention: str  # what is not known of contention
    topology: str


@dataclass(frozen=True)
class Held:
    """Bytes that something holds in a node."""

    name: str
    bytes: int


@dataclass(frozen=True)
class NodeLine:
    """One place that holds bytes; `limit_bytes` is null where nobody told it."""

    node: str
    meaning: str
    limit_bytes: int | None
    held: tuple[Held, ...]
    provenance: str
    why: str


@dataclass(frozen=True)
class Nearest:
    """The edge that is nearest its ceiling, and what that rests on."""

    edge: str
    share: float
    certainty: str  # certain, likely or weak
    rests_on: str


@dataclass(frozen=True)
class CeilingSource:
    """Which ceilings were used: of which host and when, or why none."""

    provenance: str  # measured, datasheet or not observable
    host: str
    created_ns: int | None
    note: str


@dataclass(frozen=True)
class EdgeLedger:
    """The ledger of a selection. Times are wall ns; `from_ns` to `to_ns` is what was looked at."""

    selection: str
    from_ns: int
    to_ns: int
    steps: int
    steps_without_work: int  # whose bytes and FLOPs nobody could derive
    tokens: int
    nodes: tuple[NodeLine, ...]
    edges: tuple[EdgeLine, ...]
    nearest: Nearest | None
    unranked: tuple[str, ...]  # edges without a share, each with the reason
    roofline: Roofline
    ceilings: CeilingSource
    losses: tuple[str, ...]
    active_share: float | None = None  # of the time, in which steps ran; mean over devices
