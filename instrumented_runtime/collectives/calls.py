"""The collectives of our own ranks: torch.distributed's, and each tells the process's sink.

Without a sink a call costs its number in the group (so that ranks agree on it whenever they start
to observe) and nothing else. Tensors are contiguous; ranks given are global ones, as torch's.
All calls end before they return, but for `start_send` and `start_sendrecv`.
"""

import threading
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from perfledger.instrumented_runtime.collectives.device_times import DEVICE_TIMES
from perfledger.instrumented_runtime.collectives.group_facts import GroupFacts, facts_of
from perfledger.instrumented_runtime.collectives.listening import LISTENER
from perfledger.instrumented_runtime.collectives.listening import observe as observe  # set here too
from perfledger.instrumented_runtime.collectives.observed import (
    NOT_OBSERVED,
    POINT_TO_POINT,
    CollectiveCall,
    CollectiveSink,
)
from perfledger.instrumented_runtime.collectives.sent_bytes import (
    bytes_of,
    dtype_name,
    sent_bytes,
    sent_of_splits,
)
from perfledger.schema.clocks import monotonic_ns

if TYPE_CHECKING:
    from perfledger.instrumented_runtime.parallel.groups import Group

_REDUCE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
}


def flush(wait: bool = False) -> None:
    """Tell the sink of calls that the device has ended meanwhile; with `wait`, of all."""
    DEVICE_TIMES.flush(wait)


def current_sink() -> CollectiveSink | None:
    """Return who is told of calls now."""
    return LISTENER.sink


def all_reduce(tensor: Tensor, group: "Group", *, op: str = "sum") -> None:
    """Reduce a tensor over all ranks, in place. `op` is sum, avg, max or min."""
    with _observed("all_reduce", tensor, group):
        dist.all_reduce(tensor, _REDUCE_OPS[op], group.handle)


def all_gather(out: Tensor, tensor: Tensor, group: "Group") -> None:
    """Gather equal tensors of all ranks into `out`, one after another."""
    with _observed("all_gather", out, group):
        # Flat: gloo takes no dimension for the ranks in `out`.
        dist.all_gather_single(out.view(-1), tensor.view(-1), group.handle)


def reduce_scatter(out: Tensor, tensor: Tensor, group: "Group", *, op: str = "sum") -> None:
    """Reduce a tensor over all ranks and keep this rank's equal share of it in `out`."""
    with _observed("reduce_scatter", tensor, group):
        dist.reduce_scatter_single(out, tensor, _REDUCE_OPS[op], group.handle)


def all_to_all(
    out: Tensor,
    tensor: Tensor,
    group: "Group",
    out_splits: list[int] | None = None,
    in_splits: list[int] | None = None,
) -> None:
    """Send a piece of the tensor to each rank and get one of each; splits are rows per rank."""
    with _observed("all_to_all", tensor, group, in_splits=in_splits):
        dist.all_to_all_single(out, tensor, out_splits, in_splits, group.handle)


def broadcast(tensor: Tensor, src: int, group: "Group") -> None:
    """Give all ranks the tensor that rank `src` has, in place."""
    with _observed("broadcast", tensor, group, src):
        dist.broadcast(tensor, src, group.handle)


def send(tensor: Tensor, dst: int, group: "Group") -> None:
    """Send a tensor to one rank."""
    with _observed("send", tensor, group, dst):
        dist.send(tensor, dst, group.handle)


def recv(tensor: Tensor, src: int, group: "Group") -> None:
    """Fill a tensor with what one rank sends."""
    with _observed("recv", tensor, group, src):
        dist.recv(tensor, src, group.handle)


def barrier(group: "Group") -> None:
    """Wait until all ranks are here."""
    with _observed("barrier", None, group):
        dist.barrier(group.handle)


def start_send(tensor: Tensor, dst: int, group: "Group") -> "Exchange":
    """Start to send to one rank; compute meanwhile, then `wait()`."""
    observed = (_observed("send", tensor, group, dst),)
    with Explicit():
        work = dist.isend(tensor, dst, group.handle)
        assert work is not None  # it is only None in ranks outside the group
        return Exchange([work], observed)


def start_sendrecv(tensor: Tensor, dst: int, out: Tensor, src: int, group: "Group") -> "Exchange":
    """Start to send to one rank and to receive from one; compute meanwhile, then `wait()`."""
    observed = (_observed("send", tensor, group, dst), _observed("recv", out, group, src))
    with Explicit():
        operations = [
            dist.P2POp(dist.isend, tensor, dst, group.handle),
            dist.P2POp(dist.irecv, out, src, group.handle),
        ]
        return Exchange(dist.batch_isend_irecv(operations), observed)


class Exchange:
    """What is on its way between ranks; the tensors must stay as they are until `wait`."""

    def __init__(self, works: list[dist.Work], observed: "tuple[_Observed, ...]") -> None:
        self._works, self._observed = works, observed

    def wait(self) -> None:
        """Wait until all have ended."""
        for work in self._works:
            work.wait()
        for one in self._observed:
            one.end()


def is_explicit() -> bool:
    """Whether what this thread does now is part of a call that is told of already."""
    return getattr(_inside, "explicit", False)


def numbered(facts: GroupFacts, op: str, peer: int) -> int:
    """Return the number of the next call in a group, from 0.

    Point-to-point is counted for each way between two ranks, as only those two take part.
    """
    key = facts.key
    if op in POINT_TO_POINT:
        here = facts.ranks[facts.position]
        source, target = (here, peer) if op == "send" else (peer, here)
        key = f"{key} {source} {target}"
    number = _state.sequences.get(key, 0)
    _state.sequences[key] = number + 1
    return number


class _State:
    """What this process counts."""

    def __init__(self) -> None:
        self.sequences: dict[str, int] = {}


_state = _State()
_inside = threading.local()


class Explicit:
    """Marks what this thread does meanwhile as a call that is told of already."""

    def __enter__(self) -> None:
        _inside.explicit = True

    def __exit__(self, *_: object) -> None:
        _inside.explicit = False


class _Observed:
    """One call, told to the sink when it ends; one that raises is not told. None: nothing is."""

    __slots__ = ("_call", "_device_start", "_enqueue_ns", "_sequence", "_sink", "_step_seq")

    def __init__(
        self, sink: CollectiveSink | None, call: CollectiveCall, sequence: int, on_device: bool
    ) -> None:
        self._sink, self._call, self._sequence = sink, call, sequence
        if sink is not None:
            self._step_seq = sink.step_seq
            self._device_start = DEVICE_TIMES.mark() if on_device else None
            self._enqueue_ns = monotonic_ns()

    def __enter__(self) -> None:
        if self._sink is not None:
            _inside.explicit = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._sink is not None:
            _inside.explicit = False
            if kind is None:
                self.end()

    def end(self) -> None:
        """The call has ended, or on a device has been enqueued."""
        if self._sink is None:
            return
        if self._device_start is None:
            self._tell(NOT_OBSERVED, monotonic_ns())
        else:
            DEVICE_TIMES.ends(self._device_start, self._tell)

    def _tell(self, start_ns: int, end_ns: int) -> None:
        assert self._sink is not None
        what, when = self._call[:_NUMBERED_FROM], (self._enqueue_ns, start_ns, end_ns)
        self._sink.collective(CollectiveCall._make((*what, self._sequence, self._step_seq, *when)))


_UNKNOWN = CollectiveCall("", "", "", (), NOT_OBSERVED, "", 0, 0, *[NOT_OBSERVED] * 5)
_NUMBERED_FROM = CollectiveCall._fields.index("sequence")
_NOTHING = _Observed(None, _UNKNOWN, 0, False)
_MOST_DESCRIBED = 4096


def _observed(
    op: str,
    tensor: Tensor | None,
    group: "Group",
    peer: int = NOT_OBSERVED,
    in_splits: list[int] | None = None,
) -> _Observed:
    """Number a call, and describe it if anybody wants to know. `peer` is the other end or root."""
    facts = facts_of(group.handle)
    sequence = numbered(facts, op, peer)
    sink = LISTENER.sink
    if sink is None:
        return _NOTHING
    on_device = tensor is not None and tensor.is_cuda
    # A step makes the same calls again and again: most are described already.
    size = None if tensor is None else tensor.numel()
    kind = (op, group.name, peer, size, None if tensor is None else tensor.dtype, on_device)
    call = facts.described.get(kind) if in_splits is None else None
    if call is None:
        call = _describe(op, tensor, group, facts, peer, in_splits)
        if in_splits is None:
            if len(facts.described) >= _MOST_DESCRIBED:
                facts.described.clear()
            facts.described[kind] = call
    return _Observed(sink, call, sequence, on_device)


def _describe(
    op: str,
    tensor: Tensor | None,
    group: "Group",
    facts: GroupFacts,
    peer: int,
    in_splits: list[int] | None,
) -> CollectiveCall:
    """Return what a call is, without its numbers and times."""
    size, device = bytes_of(tensor), tensor.device.type if tensor is not None else ""
    if in_splits is None or tensor is None:
        sent = sent_bytes(op, size, facts, device, peer)
    else:
        sent = sent_of_splits(tensor, in_splits, facts.position)
    return _UNKNOWN._replace(
        op=op,
        group=group.name,
        dimension=group.dimension,
        ranks=facts.ranks,
        peer=peer,
        dtype=dtype_name(tensor),
        bytes=size,
        wire_bytes=sent,
    )
