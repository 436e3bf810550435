"""Counts what torch operators read, write and compute, one by one as they are called."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from perfledger.instrumented_runtime.attention import PagedKvCache, StepRows
from perfledger.instrumented_runtime.parallel.served_model import StepModel

aten = torch.ops.aten
# Operators that move nothing: memory is taken, a kernel chosen, a number taken out of a tensor.
NOTHING = {
    "aten::empty",
    "aten::empty_like",
    "aten::new_empty",
    "aten::empty_strided",
    "aten::_unsafe_view",
    "aten::_fused_sdp_choice",
    "aten::_local_scalar_dense",
    "aten::scalar_tensor",
}


@dataclass
class Counts:
    """Of one step."""

    read: Counter[str] = field(default_factory=Counter)  # bytes, by operator
    written: Counter[str] = field(default_factory=Counter)
    calls: Counter[str] = field(default_factory=Counter)
    kv_read: int = 0  # of attention, K and V alone
    flops: Counter[str] = field(default_factory=Counter)


class OperatorCounter(TorchDispatchMode):
    """Each input is read once and each output written once, whole, with these exceptions.

    An expanded tensor has the bytes that are really there. A choice of rows reads the rows that it
    chooses, and a copy into rows writes those. What has no output element reads nothing. Views and
    what is in NOTHING move nothing.
    """

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        out = func(*args, **kwargs)
        if not func.is_view and func.namespace != "c10d":
            self._count(func._schema.name, args, kwargs, out)
        return out

    def _count(self, name: str, args: Any, kwargs: dict[str, Any], out: Any) -> None:
        written = [one for one in tree_leaves(out) if isinstance(one, Tensor)]
        if name in NOTHING or not written:
            return
        counts = self.counts
        counts.calls[name] += 1
        if not any(one.numel() for one in written):
            return
        target = kwargs.pop("out", None)
        read = [one for one in tree_leaves((args, kwargs)) if isinstance(one, Tensor)]
        if name == "aten::index_copy_":
            target, written = args[0], [args[3]]
            read = read[1:]
        elif name in ("aten::index_select", "aten::index", "aten::embedding"):
            read = [*written, *read[1:]]
        elif name in ("aten::copy_", "aten::fill_", "aten::zero_"):
            read = read[1:]
        elif name == "aten::_scaled_dot_product_flash_attention_for_cpu":
            counts.kv_read += size_of(read[1]) + size_of(read[2])
        elif name.startswith("quantized::linear"):
            counts.read[name] += packed_bytes(args[1])
        del target
        counts.read[name] += sum(map(size_of, read))
        counts.written[name] += sum(map(size_of, written))


def size_of(tensor: Tensor) -> int:
    """Return the bytes that a tensor has: what an expansion repeats counts once."""
    elements = 1
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        elements *= size if stride or not size else 1
    return elements * tensor.element_size()


def packed_bytes(packed: Any) -> int:
    weight, bias = torch.ops.quantized.linear_unpack(packed)
    scales = weight.q_per_channel_scales()
    return int(weight.numel() + 4 * len(scales) + (0 if bias is None else 4 * len(bias)))


def flop_counter() -> FlopCounterMode:
    """Torch's, told that attention on the CPU is attention."""

    def flops(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    on_cpu = {aten._scaled_dot_product_flash_attention_for_cpu: flops}
    return FlopCounterMode(display=False, custom_mapping=on_cpu)


class CountedModel:
    """A model like any other; `steps` are the counts of each of its steps."""

    def __init__(self, model: StepModel) -> None:
        self._model = model
        self.config, self.dtype, self.device = model.config, model.dtype, model.device
        self.parameters, self.weights_bytes = model.parameters, model.weights_bytes
        self.steps: list[Counts] = []

    @property
    def routing(self) -> Any:
        return self._model.routing

    def forward(self, rows: StepRows, cache: PagedKvCache) -> Tensor:
        with flop_counter() as flops, OperatorCounter() as counter:
            logits = self._model.forward(rows, cache)
        for operator, count in flops.get_flop_counts()["Global"].items():
            counter.counts.flops[str(operator)] += count
        self.steps.append(counter.counts)
        return logits
