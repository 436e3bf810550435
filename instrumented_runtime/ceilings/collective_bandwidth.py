"""Collectives between ranks on this host: algorithm and bus bandwidth, as nccl-tests defines them.

gloo between processes on the CPU, NCCL where there are several CUDA devices. The ranks are
processes of their own; they end with this one.
"""

import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

from perfledger.instrumented_runtime.child_processes import end, make_rendezvous, remove_rendezvous
from perfledger.instrumented_runtime.engine import prepare_process
from perfledger.instrumented_runtime.parallel.layout import Layout, RankPlace
from perfledger.schema.ceilings import Absent, Ceiling, size_text
from perfledger.schema.communication import bus_factor

if TYPE_CHECKING:
    import torch

KIB, MIB = 1 << 10, 1 << 20
OPERATIONS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
SIZES = (4 * KIB, 64 * KIB, MIB, 16 * MIB)
QUICK_OPERATIONS, QUICK_SIZES = ("all_reduce",), (64 * KIB, MIB)
ROUNDS, LEAST_S, END_S, ANSWER_S = 8, 0.01, 5.0, 90.0
Measured = tuple[str, int, list[float]]  # operation, bytes, seconds of one call


def plan(*, quick: bool) -> list[tuple[str, int]]:
    """Return which operations of which sizes are measured."""
    operations, sizes = (QUICK_OPERATIONS, QUICK_SIZES) if quick else (OPERATIONS, SIZES)
    return [(operation, size) for operation in operations for size in sizes]


def measure_collectives(
    ranks: int, device: str, advance: Callable[[], None], *, quick: bool
) -> Iterator[Ceiling | Absent]:
    """Yield the ceilings of collectives between `ranks` processes, or why there are none."""
    context, tasks, meet = get_context("spawn"), plan(quick=quick), make_rendezvous()
    places = [RankPlace(Layout(tp=ranks), rank, meet) for rank in range(ranks)]
    pipes = [context.Pipe() for _ in places]
    started = [
        context.Process(target=run_rank, args=(place, device, tasks, far), daemon=True)
        for place, (_, far) in zip(places, pipes, strict=True)
    ]
    try:
        for process, (_, far) in zip(started, pipes, strict=True):
            process.start()
            far.close()
        yield from _listen(pipes[0][0], len(tasks), ranks, device, advance)
    finally:
        for near, _ in pipes:
            near.close()
        for process in started:
            if process.pid is not None:
                end(process, END_S)
        remove_rendezvous(places[0])


def _listen(
    pipe: Connection, tasks: int, ranks: int, device: str, advance: Callable[[], None]
) -> Iterator[Ceiling | Absent]:
    for done in range(tasks):
        if not pipe.poll(ANSWER_S):
            yield Absent("scale_up", "collectives", f"the ranks did not answer in {ANSWER_S:.0f} s")
            return
        try:
            measured: Measured | str = pipe.recv()
        except (EOFError, ConnectionResetError):
            measured = "a rank ended without a word"
        if isinstance(measured, str):
            yield Absent("scale_up", "collectives", measured)
            for _ in range(tasks - done):
                advance()
            return
        yield from _ceilings(measured, ranks, device)
        advance()


def _ceilings(measured: Measured, ranks: int, device: str) -> Iterator[Ceiling]:
    operation, size, seconds = measured
    variant = f"ranks={ranks} size={size_text(size)}"
    note = "NCCL" if device == "cuda" else "gloo over the loopback, one thread a rank"
    factor = bus_factor(operation, ranks)
    for kind, scale in (("algbw", 1.0), ("busbw", factor)):
        rates = [scale * size / one for one in seconds]
        yield Ceiling.best("scale_up", f"{operation} {kind}", variant, "bytes/s", rates, note)


def run_rank(place: RankPlace, device: str, tasks: list[tuple[str, int]], pipe: Connection) -> None:
    """Be one rank: the entry of its process. Rank 0 sends what was measured, or why not."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # Ctrl-C reaches the whole group; the parent ends us
    prepare_process()
    import torch

    from perfledger.instrumented_runtime.parallel.groups import join
    from perfledger.schema.errors import PerfledgerError

    torch.set_num_threads(1)
    here = torch.device("cuda", place.rank) if device == "cuda" else torch.device("cpu")
    try:
        peers = join(place, here)
        for operation, size in tasks:
            seconds = _measure(operation, size, place.layout.world, here)
            if place.rank == 0:
                pipe.send((operation, size, seconds))
        peers.leave()
    except (PerfledgerError, RuntimeError) as error:
        if place.rank == 0:
            pipe.send(str(error).splitlines()[0])
    except (BrokenPipeError, ConnectionResetError):
        return  # whoever asked has gone


def _measure(operation: str, size: int, ranks: int, device: "torch.device") -> list[float]:
    """Return the seconds of one call, of the slowest rank, for some rounds of calls."""
    import torch
    import torch.distributed as dist

    call = _calling(operation, size, ranks, device)
    first = _timed(call, 3, device)
    shared = torch.tensor([first], dtype=torch.float64, device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)  # all ranks must call equally often
    calls = max(2, round(LEAST_S / float(shared)))
    seconds = [_timed(call, calls, device) for _ in range(ROUNDS)]
    slowest = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return [float(one) for one in slowest]


def _timed(call: Callable[[], object], calls: int, device: "torch.device") -> float:
    import torch
    import torch.distributed as dist

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    dist.barrier()
    wait()
    started = time.perf_counter()
    for _ in range(calls):
        call()
    wait()
    return (time.perf_counter() - started) / calls


def _calling(
    operation: str,
    size: int,
    ranks: int,
    device: "torch.device",
) -> Callable[[], object]:
    """Return one call of an operation, of nccl-tests' S = `size` bytes."""
    import torch
    import torch.distributed as dist

    whole = torch.ones(size // 4, device=device)
    share = torch.ones(size // 4 // ranks, device=device)
    other = torch.ones_like(whole)
    calls: dict[str, Callable[[], object]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: dist.all_gather_single(whole, share),
        "reduce_scatter": lambda: dist.reduce_scatter_single(share, whole),
        "all_to_all": lambda: dist.all_to_all_single(other, whole),
        "broadcast": lambda: dist.broadcast(whole, 0),
    }
    return calls[operation]
