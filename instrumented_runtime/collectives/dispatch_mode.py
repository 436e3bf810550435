"""Sees what every operator of a program calls: also the collectives that start in C++."""

from typing import Any

import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.utils._python_dispatch import TorchDispatchMode

from perfledger.instrumented_runtime.collectives import calls
from perfledger.instrumented_runtime.collectives.group_facts import GroupFacts, facts_of
from perfledger.instrumented_runtime.collectives.messages_of import (
    FUNCTIONAL_OPERATORS,
    METHODS,
    OPERATORS,
    Message,
    message_of_function,
)
from perfledger.instrumented_runtime.collectives.observing import Observation, group_of, key_of


class CollectiveMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Tells an observation of the collectives among the operators that run while it is on."""

    def __init__(self, observation: Observation) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observation = observation

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(kind, _SUBCLASSES) for kind in types):
            return NotImplemented  # it becomes plain operators first, and those come here
        space = func.namespace
        if space == "c10d" and not calls.is_explicit():
            return self._operator(func, args, kwargs or {})
        if space == "_c10d_functional" and not calls.is_explicit():
            return self._functional(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))

    def _operator(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        operator = OPERATORS.get(func._opname)
        if operator is None:
            return func(*args, **kwargs)
        method, group_at, arguments = operator

        def describe() -> tuple[Message, GroupFacts]:
            group = dist.ProcessGroup.unbox(args[group_at])
            return METHODS[method]([args[at] for at in arguments]), facts_of(group)

        pending = self._observation.begin(describe)
        result = func(*args, **kwargs)
        if pending is not None:
            boxed = result[-1] if isinstance(result, tuple) else result
            self._watch(pending, boxed)
        return result

    def _watch(self, pending: Any, boxed: Any) -> None:
        """Hear of the end of what nobody in Python waits for; where that cannot be, it stays
        unknown."""
        key = object()
        self._observation.started(pending, key)
        try:
            self._observation.watch(key, dist.Work.unbox(boxed).get_future())
        except Exception:  # send, recv and some backends have none
            return

    def _functional(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func._opname == "wait_tensor":
            result = func(*args, **kwargs)
            self._observation.ended(key_of(args[0]))
            return result
        function = FUNCTIONAL_OPERATORS.get(func._opname)
        if function is None:
            return func(*args, **kwargs)

        def describe() -> tuple[Message, GroupFacts]:
            group = group_of(args[function.group_at])
            return message_of_function(function, args), facts_of(group)

        pending = self._observation.begin(describe)
        result = func(*args, **kwargs)
        self._observation.started(pending, key_of(result))
        return result


def _subclasses() -> tuple[type, ...]:
    from torch.distributed.tensor import DTensor

    return (DTensor, functional.AsyncCollectiveTensor)


_SUBCLASSES = _subclasses()
