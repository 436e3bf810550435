"""Programs that test_collective_calls.py runs on every rank."""

import os
import socket
import struct
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from perfledger.instrumented_runtime.collectives import calls
from perfledger.instrumented_runtime.collectives.observed import CollectiveCall, CopyCall
from perfledger.instrumented_runtime.parallel.groups import Group, join
from perfledger.instrumented_runtime.parallel.layout import RankPlace

ROWS = 24  # divides by 2, 3 and 4
TCP_INFO, NOT_SENT_AT, SENT_AT = 11, 144, 200


class Listener:
    """A sink that keeps what it hears."""

    step_seq = 7

    def __init__(self) -> None:
        self.calls: list[CollectiveCall] = []

    def collective(self, call: CollectiveCall) -> None:
        self.calls.append(call)

    def copy(self, call: CopyCall) -> None:
        raise AssertionError("nothing is copied here")


@contextmanager
def met(place: RankPlace) -> Iterator[Group]:
    """Meet the other ranks, and leave them when all are done."""
    torch.set_num_threads(1)
    peers = join(place, torch.device("cpu"))
    yield peers.groups["tp"]
    dist.barrier()
    peers.leave()


def every_call(place: RankPlace) -> dict[str, Any]:
    """Use every call once, observed; return what was computed and what the sink heard."""
    with met(place) as group:
        return use_every_call(group, True)


def quiet_then_loud(place: RankPlace) -> dict[str, Any]:
    """Use every call once unobserved and then observed; return what was heard of each."""
    with met(place) as group:
        first = use_every_call(group, False)
        return {"first": first["calls"], "calls": use_every_call(group, True)["calls"]}


def use_every_call(group: Group, observed: bool) -> dict[str, Any]:
    """Use every call once; return what was computed and what the sink heard."""
    warnings.simplefilter("error")
    sink = Listener()
    rank, ranks = group.position, group.size
    calls.observe(sink if observed else None)
    following, before = (rank + 1) % ranks, (rank - 1) % ranks
    mine = torch.arange(ROWS, dtype=torch.float32) + 100 * rank
    results = {}

    reduced = mine.clone()
    calls.all_reduce(reduced, group)
    highest = mine.bfloat16()
    calls.all_reduce(highest, group, op="max")
    gathered = torch.empty(ROWS * ranks)
    calls.all_gather(gathered, mine, group)
    share = torch.empty(ROWS // ranks)
    calls.reduce_scatter(share, mine, group)
    swapped = torch.empty(ROWS)
    calls.all_to_all(swapped, mine, group)
    # Rank r sends r + 1 rows to each other rank and 3 to itself.
    in_splits = [3 if other == rank else rank + 1 for other in range(ranks)]
    out_splits = [3 if other == rank else other + 1 for other in range(ranks)]
    uneven = torch.empty(sum(out_splits), 2)
    calls.all_to_all(
        uneven, torch.full((sum(in_splits), 2), float(rank)), group, out_splits, in_splits
    )
    told = mine.clone()
    calls.broadcast(told, ranks - 1, group)
    passed = torch.empty(ROWS)
    calls.start_sendrecv(mine, following, passed, before, group).wait()
    if rank == 0:
        calls.send(mine, 1, group)
    elif rank == 1:
        calls.recv(told, 0, group)
    calls.barrier(group)
    calls.observe(None)
    for name in ("reduced", "highest", "gathered", "share", "swapped", "uneven", "told", "passed"):
        results[name] = locals()[name].tolist()
    return {"results": results, "calls": [tuple(call) for call in sink.calls]}


def sent_by_kernel() -> int:
    """Return the bytes that this process's TCP sockets have sent or are about to."""
    total = 0
    for fd in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{fd}").startswith("socket:"):
                continue
        except OSError:  # closed meanwhile
            continue
        with socket.socket(fileno=os.dup(int(fd))) as one:
            if one.family in (socket.AF_INET, socket.AF_INET6) and one.type == socket.SOCK_STREAM:
                info = one.getsockopt(socket.IPPROTO_TCP, TCP_INFO, 256)
                if len(info) >= SENT_AT + 8:
                    total += struct.unpack_from("=Q", info, SENT_AT)[0]
                    total += struct.unpack_from("=I", info, NOT_SENT_AT)[0]
    return total


def sent_and_told(place: RankPlace) -> list[tuple[str, int, int]]:
    """Return op, bytes told, and bytes that the kernel counted, of large messages."""
    with met(place) as group:
        return send_and_tell(group)


def send_and_tell(group: Group) -> list[tuple[str, int, int]]:
    """See sent_and_told."""
    sink, rank, ranks = Listener(), group.position, group.size
    whole = torch.ones(16384 * ranks)
    gathered, share = torch.empty(len(whole) * ranks), torch.empty(len(whole) // ranks)

    def point_to_point() -> None:
        if rank < 2:
            (calls.send if rank == 0 else calls.recv)(whole, 1 - rank, group)

    operations = [
        lambda: calls.all_reduce(whole, group),
        lambda: calls.all_gather(gathered, whole, group),
        lambda: calls.reduce_scatter(share, whole, group),
        lambda: calls.all_to_all(torch.empty_like(whole), whole, group),
        lambda: calls.broadcast(whole, 1, group),
        point_to_point,
    ]
    found = []
    for operation in operations:
        dist.barrier()
        before = settled_count()
        calls.observe(sink)
        operation()
        calls.observe(None)
        sent = settled_count() - before
        if sink.calls:
            found.append((sink.calls[-1].op, sink.calls[-1].wire_bytes, sent))
        sink.calls.clear()
    return found


def settled_count() -> int:
    count, last = sent_by_kernel(), -1
    while count != last:
        time.sleep(0.05)
        count, last = sent_by_kernel(), count
    return count
