"""What is known of one collective or copy, whoever saw it, and who wants to hear of it.

Times are monotonic ns. Nothing here imports torch: the exporter process reads these too.
"""

from typing import NamedTuple, Protocol

# Of a time, a peer, or a step number that nobody can tell: never 0, which would be a value.
NOT_OBSERVED = -1

POINT_TO_POINT = ("send", "recv")


class CollectiveCall(NamedTuple):
    """One call on one rank.

    `bytes` is the message as nccl-tests counts it: the whole output of an all_gather, the whole
    input of a reduce_scatter or all_to_all, else the tensor. `wire_bytes` is what this rank sends
    to others for it, by the algorithm of its backend, without the transport's own overhead.
    `sequence` counts the calls in the group, or for point-to-point those from one rank to another,
    and so is equal on all ranks that take part.
    """

    op: str
    group: str
    dimension: str  # of the layout, or "world"; "" where nothing tells
    ranks: tuple[int, ...]  # global, all of the group
    peer: int  # global rank of a point-to-point's other end or of a root; else NOT_OBSERVED
    dtype: str  # "" of a barrier
    bytes: int
    wire_bytes: int  # NOT_OBSERVED where the backend's algorithm is not known
    sequence: int
    step_seq: int  # NOT_OBSERVED outside a step
    enqueue_ns: int
    start_ns: int  # NOT_OBSERVED on gloo
    end_ns: int  # NOT_OBSERVED of an asynchronous call that nobody waited for


class CopyCall(NamedTuple):
    """Bytes that crossed a boundary on one rank: device and host, dtype, stage or offload."""

    boundary: str  # of records.BOUNDARIES
    source: str  # device, like cpu or cuda:0
    target: str
    dtype: str  # after the copy
    bytes: int  # written to the target
    step_seq: int
    start_ns: int
    end_ns: int


class CollectiveSink(Protocol):
    """Takes calls as they end. Must be quick and raise nothing: it runs between two steps' work."""

    @property
    def step_seq(self) -> int:
        """Number of the step that runs now, or NOT_OBSERVED."""

    def collective(self, call: CollectiveCall) -> None:
        """Take one collective or point-to-point call."""

    def copy(self, call: CopyCall) -> None:
        """Take one copy."""
