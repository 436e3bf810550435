"""Programs of a user of torch.distributed, that test_observing.py observes on every rank."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from collective_programs import Listener, met
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from perfledger.instrumented_runtime.collectives import calls
from perfledger.instrumented_runtime.collectives.observing import observe_collectives
from perfledger.instrumented_runtime.parallel.layout import RankPlace

WIDTH = 8
Program = Callable[[int, int, DeviceMesh], object]


def explicit(rank: int, ranks: int, _: DeviceMesh) -> list[float]:
    """Every function of torch.distributed that computes on tensors."""
    mine, everyone = torch.full((WIDTH,), float(rank)), torch.empty(WIDTH * ranks)
    reduced = mine.clone()
    dist.all_reduce(reduced)
    dist.all_gather_single(everyone, mine)
    dist.all_gather(list(everyone.chunk(ranks)), mine)
    dist.reduce_scatter_single(mine, everyone)
    dist.reduce_scatter(mine, list(everyone.chunk(ranks)))
    dist.all_to_all_single(everyone.clone(), everyone)
    dist.all_to_all(list(everyone.clone().chunk(ranks)), list(everyone.chunk(ranks)))
    dist.broadcast(mine, 1)
    dist.reduce(mine, 1)
    dist.gather(mine, list(everyone.chunk(ranks)) if rank == 1 else None, dst=1)
    dist.scatter(mine, list(everyone.chunk(ranks)) if rank == 1 else None, src=1)
    following, before = (rank + 1) % ranks, (rank - 1) % ranks
    operations = [
        dist.P2POp(dist.isend, mine, following),
        dist.P2POp(dist.irecv, torch.empty(WIDTH), before),
    ]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    if rank == 0:
        dist.send(mine, 1)
    elif rank == 1:
        dist.recv(mine, 0)
    dist.barrier()
    return reduced.tolist()


def asynchronous(rank: int, ranks: int, _: DeviceMesh) -> list[float]:
    """One call that is waited for, one whose future is, one that nobody waits for."""
    tensors = [torch.full((WIDTH,), float(rank)) for _ in range(3)]
    waited, future, left = (dist.all_reduce(one, async_op=True) for one in tensors)
    waited.wait()
    future.get_future().wait()
    while not left.is_completed():
        pass
    return [one.sum().item() for one in tensors]


def functional_calls(rank: int, ranks: int, mesh: DeviceMesh) -> list[float]:
    """Functional collectives, waited for by the use of what they return."""
    mine = torch.full((WIDTH, ranks), float(rank))
    group = mesh.get_group()
    total = functional.all_reduce(mine, "sum", group) + 0
    whole = functional.all_gather_single(mine, 1, (mesh, 0)) + 0
    share = functional.reduce_scatter_single(whole, "sum", 0, group) + 0
    swapped = functional.all_to_all_single(whole, None, None, group) + 0
    return [float(one.sum()) for one in (total, whole, share, swapped)]


def ddp(rank: int, ranks: int, _: DeviceMesh) -> float:
    """Gradients all-reduced by a reducer in C++, behind Python's back."""
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(nn.Linear(WIDTH, WIDTH))
    loss = model(torch.full((2, WIDTH), float(rank))).square().mean()
    loss.backward()
    return float(model.module.weight.grad.sum())


def fsdp(rank: int, ranks: int, mesh: DeviceMesh) -> float:
    """Parameters gathered forward and backward, gradients reduced and scattered."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    loss = model(torch.full((2, WIDTH), float(rank + 1))).square().mean()
    loss.backward()
    return float(loss)


def tensor_parallel(rank: int, ranks: int, mesh: DeviceMesh) -> float:
    """An MLP by DTensor, whose output is all-reduced."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    parallelize_module(model, mesh, plan)
    loss = model(torch.ones(2, WIDTH)).square().mean()
    loss.backward()
    return float(loss)


PROGRAMS: dict[str, Program] = {
    one.__name__: one
    for one in (explicit, asynchronous, functional_calls, ddp, fsdp, tensor_parallel)
}


def observed(place: RankPlace, name: str, full: bool) -> dict[str, Any]:
    """Run a program, plain and then observed; return what both computed, and what was heard."""
    with met(place) as group:
        return run_observed(group.position, group.size, name, full)


def run_observed(rank: int, ranks: int, name: str, full: bool) -> dict[str, Any]:
    """See observed."""
    program, sink = PROGRAMS[name], Listener()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("model",))
    plain = program(rank, ranks, mesh)
    before = {name: vars(dist.ProcessGroup)[name] for name in ("allreduce", "send")}
    with observe_collectives(sink, full=full) as observation:
        result = program(rank, ranks, mesh)
    assert calls.current_sink() is None
    assert before == {name: vars(dist.ProcessGroup)[name] for name in before}, "not undone"
    return {
        "plain": plain,
        "observed": result,
        "calls": [tuple(call) for call in sink.calls],
        "errors": (observation.errors, observation.last_error),
    }
