"""What torch's ways to start a collective are called with: the operation, its message, its group.

Three forms of one thing: methods of a ProcessGroup (what torch.distributed's functions call), the
`c10d` operators below them (which DDP's reducer calls from C++), and the functional collectives.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor


class Message(NamedTuple):
    """One call. `tensors` hold the message, or one rank's share of it where `share` is true."""

    op: str
    tensors: list[Tensor]
    share: bool = False
    root: int | None = None  # rank within the group: of a root, or of a point-to-point's other end
    in_splits: Sequence[int] | None = None  # rows for each rank, of an uneven all_to_all


Arguments = Sequence[Any]


def _flat(tensors: Any) -> list[Tensor]:
    if isinstance(tensors, Tensor):
        return [tensors]
    return [one for part in tensors for one in _flat(part)]


def _root(arguments: Arguments, at: int) -> int:
    given: Any = arguments[at]
    root: int = getattr(given, "rootRank", given)
    return root


def _whole(op: str, at: int = 0) -> Callable[[Arguments], Message]:
    return lambda arguments: Message(op, _flat(arguments[at]))


def _per_device(op: str, at: int) -> Callable[[Arguments], Message]:
    """One list of tensors for each device of this process; there is one device."""
    return lambda arguments: Message(op, _flat(arguments[at][0]))


def _rooted(op: str, at: int, root_at: int, *, share: bool) -> Callable[[Arguments], Message]:
    return lambda arguments: Message(op, _flat(arguments[at]), share, _root(arguments, root_at))


def _uneven(arguments: Arguments) -> Message:
    return Message("all_to_all", _flat(arguments[1]), in_splits=list(arguments[3]) or None)


# Methods of ProcessGroup, by their arguments without `self`.
METHODS: dict[str, Callable[[Arguments], Message]] = {
    "allreduce": _whole("all_reduce"),
    "allreduce_coalesced": _whole("all_reduce"),
    "broadcast": _rooted("broadcast", 0, 1, share=False),
    "reduce": _rooted("reduce", 0, 1, share=False),
    "allgather": _per_device("all_gather", 0),
    "allgather_coalesced": _whole("all_gather"),
    "all_gather_single": _whole("all_gather"),
    "_allgather_base": _whole("all_gather"),
    "all_gather_single_coalesced": _whole("all_gather"),
    "allgather_into_tensor_coalesced": _whole("all_gather"),
    "gather": _rooted("gather", 1, 2, share=True),
    "scatter": _rooted("scatter", 0, 2, share=True),
    "reduce_scatter": _per_device("reduce_scatter", 1),
    "reduce_scatter_single": _whole("reduce_scatter", 1),
    "_reduce_scatter_base": _whole("reduce_scatter", 1),
    "reduce_scatter_single_coalesced": _whole("reduce_scatter", 1),
    "reduce_scatter_tensor_coalesced": _whole("reduce_scatter", 1),
    "all_to_all_single": _uneven,
    "alltoall_base": _uneven,
    "alltoall": _whole("all_to_all", 1),
    "send": _rooted("send", 0, 1, share=False),
    "recv": _rooted("recv", 0, 1, share=False),
    "recv_anysource": _whole("recv"),
    "barrier": lambda _: Message("barrier", []),
}

# Operators of c10d: the method they stand for, where the group is, and the method's arguments.
OPERATORS: dict[str, tuple[str, int, tuple[int, ...]]] = {
    "allreduce_": ("allreduce", 1, (0,)),
    "allreduce_coalesced_": ("allreduce_coalesced", 1, (0,)),
    "broadcast_": ("broadcast", 1, (0, 2)),
    "reduce_": ("reduce", 1, (0, 3)),
    "allgather_": ("allgather", 2, (0,)),
    "allgather_coalesced_": ("allgather_coalesced", 2, (0,)),
    "_allgather_base_": ("_allgather_base", 2, (0,)),
    "allgather_into_tensor_coalesced_": ("allgather_into_tensor_coalesced", 2, (0,)),
    "gather_": ("gather", 2, (0, 1, 3)),
    "scatter_": ("scatter", 2, (0, 1, 3)),
    "reduce_scatter_": ("reduce_scatter", 2, (0, 1)),
    "_reduce_scatter_base_": ("_reduce_scatter_base", 2, (0, 1)),
    "reduce_scatter_tensor_coalesced_": ("reduce_scatter_tensor_coalesced", 2, (0, 1)),
    "alltoall_base_": ("alltoall_base", 2, (0, 1, 3, 4)),
    "alltoall_": ("alltoall", 2, (0, 1)),
    "send": ("send", 1, (0, 2)),
    "recv_": ("recv", 1, (0, 2)),
    "recv_any_source_": ("recv_anysource", 1, (0,)),
    "barrier": ("barrier", 1, ()),
}


class Functional(NamedTuple):
    """A functional collective: its first argument is the input on this rank."""

    op: str
    group_at: int  # place of the group among the arguments
    splits_at: int | None = None
    root_at: int | None = None


# Functions of torch.distributed._functional_collectives.
FUNCTIONS: dict[str, Functional] = {
    "all_reduce": Functional("all_reduce", 2),
    "all_reduce_coalesced": Functional("all_reduce", 2),
    "broadcast": Functional("broadcast", 2, root_at=1),
    "all_gather_single": Functional("all_gather", 2),
    "all_gather_single_autograd": Functional("all_gather", 2),
    "all_gather_single_coalesced": Functional("all_gather", 1),
    "reduce_scatter_single": Functional("reduce_scatter", 3),
    "reduce_scatter_single_autograd": Functional("reduce_scatter", 3),
    "reduce_scatter_single_coalesced": Functional("reduce_scatter", 3),
    "all_to_all_single": Functional("all_to_all", 3, splits_at=2),
    "all_to_all_single_autograd": Functional("all_to_all", 3, splits_at=2),
}

# Operators of _c10d_functional; the group's name comes last.
FUNCTIONAL_OPERATORS: dict[str, Functional] = {
    "all_reduce": Functional("all_reduce", -1),
    "all_reduce_": Functional("all_reduce", -1),
    "all_reduce_coalesced": Functional("all_reduce", -1),
    "all_reduce_coalesced_": Functional("all_reduce", -1),
    "broadcast": Functional("broadcast", -1, root_at=1),
    "broadcast_": Functional("broadcast", -1, root_at=1),
    "all_gather_into_tensor": Functional("all_gather", -1),
    "all_gather_into_tensor_out": Functional("all_gather", -1),
    "all_gather_into_tensor_coalesced": Functional("all_gather", -1),
    "reduce_scatter_tensor": Functional("reduce_scatter", -1),
    "reduce_scatter_tensor_out": Functional("reduce_scatter", -1),
    "reduce_scatter_tensor_coalesced": Functional("reduce_scatter", -1),
    "all_to_all_single": Functional("all_to_all", -1, splits_at=2),
}


def message_of_function(function: Functional, arguments: Arguments) -> Message:
    """Return the call of a functional collective."""
    return Message(
        function.op,
        _flat(arguments[0]),
        share=function.op == "all_gather",
        root=None if function.root_at is None else int(arguments[function.root_at]),
        in_splits=None if function.splits_at is None else arguments[function.splits_at],
    )
