"""Sees the collectives of any torch.distributed program, whoever calls them, and tells a sink.

While it observes, the methods of ProcessGroup and Work and the functional collectives are wrapped:
torch.distributed's functions, FSDP, DTensor and pipelines all come through them, however they were
imported. What C++ calls by itself (DDP's reducer) is seen by a dispatch mode, which costs some
25 us for every operator of the program: for steps that are sampled.

The program never notices: what goes wrong here is counted, and the call goes on as it would.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import distributed_c10d

from perfledger.instrumented_runtime.collectives import calls
from perfledger.instrumented_runtime.collectives.device_times import DEVICE_TIMES
from perfledger.instrumented_runtime.collectives.group_facts import GroupFacts, facts_of
from perfledger.instrumented_runtime.collectives.messages_of import (
    FUNCTIONS,
    METHODS,
    Message,
    message_of_function,
)
from perfledger.instrumented_runtime.collectives.observed import (
    NOT_OBSERVED,
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

MOST_PENDING = 4096  # calls that nobody has waited for yet
TOLD_WITHIN_S = 5.0


class Pending:
    """A call that has not ended, or whose end nobody has seen."""

    __slots__ = ("call", "device_start", "future")

    def __init__(self, call: CollectiveCall, device_start: torch.Event | None) -> None:
        self.call, self.device_start = call, device_start
        self.future: Any = None  # that tells of its end from a thread of its own


class Observation:
    """What observes: the calls on their way, and what went wrong on our side."""

    def __init__(self, sink: CollectiveSink) -> None:
        self.sink = sink
        self.errors = 0
        self.last_error = ""
        self._pending: dict[object, Pending] = {}
        self._telling = 0  # calls taken out of it, of which the sink does not know yet
        self._lock = threading.Lock()  # autograd and futures have threads of their own

    def begin(self, describe: Callable[[], tuple[Message, GroupFacts]]) -> Pending | None:
        """Note a call that is about to start; None if it cannot be described."""
        try:
            message, facts = describe()
            device = message.tensors[0].device.type if message.tensors else ""
            call = call_of(message, facts, device, self.sink.step_seq)
            on_device = DEVICE_TIMES.mark() if device == "cuda" else None
            return Pending(call, on_device)
        except Exception as error:
            self._failed(error)
            return None

    def started(self, pending: Pending | None, key: object) -> None:
        """The call goes on by itself until `ended` is told the same key."""
        if pending is None:
            return
        with self._lock:
            left = self._pending.pop(key, None)  # the key of a thing that is gone is used again
            if left is None and len(self._pending) >= MOST_PENDING:
                left = self._pending.pop(next(iter(self._pending)))
            self._pending[key] = pending
        if left is not None:
            self._tell(left.call)

    def watch(self, key: object, future: Any) -> None:
        """The end of the call is told by a torch Future."""
        if (pending := self._pending.get(key)) is not None:
            pending.future = future
        future.add_done_callback(lambda _: self.ended(key))

    def ended(self, key: object) -> None:
        """Somebody waited for a call, and it has ended."""
        with self._lock:
            pending = self._pending.pop(key, None)
            self._telling += pending is not None
        if pending is not None:
            self.end(pending)
            with self._lock:
                self._telling -= 1

    def end(self, pending: Pending | None) -> None:
        """A call has ended, or on a device has been enqueued."""
        if pending is None:
            return
        if pending.device_start is None:
            self._tell(pending.call._replace(end_ns=monotonic_ns()))
            return
        call = pending.call
        try:
            DEVICE_TIMES.ends(
                pending.device_start,
                lambda start_ns, end_ns: self._tell(
                    call._replace(start_ns=start_ns, end_ns=end_ns)
                ),
            )
        except Exception as error:
            self._failed(error)

    def finish(self) -> None:
        """Tell of the calls that nobody waited for: their end is not known.

        A future that is done wakes the program first and tells us second: that is waited for.
        """
        give_up_s = time.monotonic() + TOLD_WITHIN_S
        while time.monotonic() < give_up_s and self._is_being_told():
            time.sleep(0.001)
        with self._lock:
            left, self._pending = list(self._pending.values()), {}
        for pending in left:
            self._tell(pending.call)

    def _is_being_told(self) -> bool:
        with self._lock:
            futures = [pending.future for pending in self._pending.values()]
            telling = self._telling
        return telling > 0 or any(future is not None and future.done() for future in futures)

    def _tell(self, call: CollectiveCall) -> None:
        try:
            with self._lock:
                self.sink.collective(call)
        except Exception as error:
            self._failed(error)

    def _failed(self, error: Exception) -> None:
        self.errors += 1
        self.last_error = repr(error)


@contextmanager
def observe_collectives(sink: CollectiveSink, *, full: bool = True) -> Iterator[Observation]:
    """Tell `sink` of all collectives of this process while inside, also of those of `calls`.

    With `full` also of those that only C++ knows of. An observation inside another one adds
    nothing: the outer one sees all.
    """
    outer = _active.observation
    if outer is not None:
        with dispatching(outer) if full else nullcontext():
            yield outer
        return
    observation = Observation(sink)
    before = calls.current_sink()
    calls.observe(sink)
    _active.observation = observation
    undo = _wrap_all()
    try:
        with dispatching(observation) if full else nullcontext():
            yield observation
    finally:
        for restore in undo:
            restore()
        _active.observation = None
        calls.observe(before)
        observation.finish()


def dispatching(observation: Observation) -> AbstractContextManager[object]:
    """Return a context in which also the calls of C++ are seen."""
    from perfledger.instrumented_runtime.collectives.dispatch_mode import CollectiveMode

    return CollectiveMode(observation)


def call_of(message: Message, facts: GroupFacts, device: str, step_seq: int) -> CollectiveCall:
    """Number and describe a call that is about to start."""
    peer = NOT_OBSERVED if message.root is None else facts.ranks[message.root]
    size = sum(bytes_of(one) for one in message.tensors)
    if message.share:
        size *= len(facts.ranks)
    if message.in_splits:
        sent = sent_of_splits(message.tensors[0], message.in_splits, facts.position)
    elif message.op == "all_to_all" and len(message.tensors) == len(facts.ranks):
        sent = size - bytes_of(message.tensors[facts.position])
    else:
        sent = sent_bytes(message.op, size, facts, device, peer)
    return CollectiveCall(
        op=message.op,
        group=facts.name,
        dimension=facts.dimension,
        ranks=facts.ranks,
        peer=peer,
        dtype=dtype_name(message.tensors[0] if message.tensors else None),
        bytes=size,
        wire_bytes=sent,
        sequence=calls.numbered(facts, message.op, peer),
        step_seq=step_seq,
        enqueue_ns=monotonic_ns(),
        start_ns=NOT_OBSERVED,
        end_ns=NOT_OBSERVED,
    )


class _Active:
    """Who observes now. Wrappers look here once a call: they may outlive the observation."""

    observation: Observation | None = None


_active = _Active()


def _wrap_all() -> list[Callable[[], None]]:
    """Wrap all ways to start and to wait for a collective; return what undoes it, in order."""
    undo = []
    for name in METHODS:
        if name in vars(dist.ProcessGroup):
            undo.append(_wrap(dist.ProcessGroup, name, _method))
    undo.append(_wrap(dist.Work, "wait", _wait))
    undo.append(_wrap(dist.Work, "get_future", _get_future))
    for name in FUNCTIONS:
        if name in vars(functional):
            undo.append(_wrap(functional, name, _function))
    undo.append(_wrap(functional, "wait_tensor", _wait_tensor))
    return undo[::-1]


Wrapper = Callable[..., Any]


def _wrap(owner: Any, name: str, make: Callable[[str, Wrapper], Wrapper]) -> Callable[[], None]:
    declared = vars(owner)[name]  # of a class in C++ a descriptor, without which nothing binds
    original = getattr(owner, name)
    setattr(owner, name, wraps(original)(make(name, original)))
    return lambda: setattr(owner, name, declared)


def _observing() -> Observation | None:
    """Return who observes, unless this call is part of one that is told of, or is traced."""
    if torch.compiler.is_compiling() or calls.is_explicit():
        return None
    return _active.observation


def _method(name: str, original: Wrapper) -> Wrapper:
    describe = METHODS[name]

    def call(group: dist.ProcessGroup, *args: Any, **kwargs: Any) -> Any:
        observation = _observing()
        if observation is None:
            return original(group, *args, **kwargs)
        pending = observation.begin(lambda: (describe(args), facts_of(group)))
        with calls.Explicit():
            work = original(group, *args, **kwargs)
        observation.started(pending, id(work))
        return work

    return call


def _wait(_: str, original: Wrapper) -> Wrapper:
    def wait(work: dist.Work, *args: Any, **kwargs: Any) -> Any:
        result = original(work, *args, **kwargs)
        if (observation := _active.observation) is not None:
            observation.ended(id(work))
        return result

    return wait


def _get_future(_: str, original: Wrapper) -> Wrapper:
    def get_future(work: dist.Work) -> Any:
        future = original(work)
        if (observation := _active.observation) is not None:
            key = id(work)
            observation.watch(key, future)
        return future

    return get_future


def _function(name: str, original: Wrapper) -> Wrapper:
    function = FUNCTIONS[name]

    def call(*args: Any, **kwargs: Any) -> Any:
        observation = _observing()
        if observation is None:
            return original(*args, **kwargs)

        def describe() -> tuple[Message, GroupFacts]:
            group = kwargs["group"] if "group" in kwargs else args[function.group_at]
            return message_of_function(function, args), facts_of(group_of(group))

        pending = observation.begin(describe)
        with calls.Explicit():
            result = original(*args, **kwargs)
        if is_on_its_way(result):
            observation.started(pending, key_of(result))
        else:  # it was waited for inside
            observation.end(pending)
        return result

    return call


def _wait_tensor(_: str, original: Wrapper) -> Wrapper:
    def wait_tensor(tensor: Any) -> Any:
        result = original(tensor)
        if not torch.compiler.is_compiling() and (observation := _active.observation) is not None:
            observation.ended(key_of(tensor))
        return result

    return wait_tensor


def group_of(group: Any) -> dist.ProcessGroup:
    """Return the process group that a functional collective was given, in whatever form."""
    found = functional._resolve_group(group)
    if isinstance(found, str):
        found = distributed_c10d._resolve_process_group(found)  # type: ignore[attr-defined]
    return found


def is_on_its_way(result: Any) -> bool:
    """Return whether the result of a functional collective must still be waited for."""
    first: Any = result[0] if isinstance(result, (list, tuple)) else result
    return isinstance(first, functional.AsyncCollectiveTensor)


def key_of(result: Any) -> object:
    """Return what names the result of a functional collective: where its first tensor lies."""
    first: Any = result[0] if isinstance(result, (list, tuple)) else result
    tensor: torch.Tensor = getattr(first, "elem", first)
    return ("tensor", tensor.data_ptr())
