"""Process groups: the ranks of one replica or job meet, group by dimension, and part again.

gloo on the CPU, NCCL on CUDA (with gloo beside it for what stays on the host). A rank that does
not come, or comes with other facts than the rest, is named.
"""

import json
import os
import re
import socket
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore, PrefixStore, Store
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from perfledger.instrumented_runtime.parallel.layout import RankPlace, name_of
from perfledger.instrumented_runtime.parallel.peer_watch import PeerWatch
from perfledger.schema.errors import PerfledgerError, UsageError

JOIN_S = 60.0  # from a rank's own arrival until it gives up on the others
STALL_S = 120.0  # in one collective, before a peer that lives but does not answer is given up
POLL_S = 0.02
WORLD = "world"


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that communicate with each other along one dimension of the layout."""

    name: str  # of this use: "tp", "world", …
    dimension: str  # of DIMENSIONS, or "world"
    ranks: tuple[int, ...]  # global ranks, by position in the group
    position: int  # of this process
    handle: dist.ProcessGroup

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self.ranks)


class Peers:
    """This process among its peers, from `join` to `leave`."""

    def __init__(self, place: RankPlace, mesh: DeviceMesh, store: Store, watch: PeerWatch):
        self.place, self.mesh = place, mesh
        self.groups = make_groups(mesh)
        self.watch = watch
        self._store = store

    def new_group(self, name: str, timeout_s: float) -> Group:
        """Make one more group of all ranks, on the host.

        `timeout_s` is how long this rank waits in one operation, whatever the others do.
        """
        handle = dist.new_group(backend="gloo", group_desc=name)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s), handle)
        world = self.groups[WORLD]
        return Group(name, WORLD, world.ranks, world.position, handle)

    def agree(self, facts: Mapping[str, str], timeout_s: float = JOIN_S) -> None:
        """Compare facts that must be equal on all ranks, like the hash of the checkpoint.

        Raises UsageError with the fact and the ranks that differ, PerfledgerError with the ranks
        that said nothing in time.
        """
        mine = json.dumps(dict(facts), sort_keys=True)
        said = _exchange(self._store, self.place, "facts", mine, timeout_s, "said what it holds")
        for name in facts:
            values = [json.loads(one).get(name, "nothing") for one in said]
            if len(set(values)) > 1:
                each = ", ".join(
                    f"{name_of(self.place, rank)} {value[:16]}" for rank, value in enumerate(values)
                )
                raise UsageError(
                    f"the ranks differ in {name}: {each}",
                    fix="start all ranks from the same checkpoint and the same version",
                )

    def leave(self) -> None:
        """Leave all groups; does not wait for peers."""
        self.watch.stop()
        dist.destroy_process_group()

    @contextmanager
    def named(self) -> Iterator[None]:
        """Turn an error of a collective into a PerfledgerError that names the rank behind it."""
        try:
            yield
        except RuntimeError as error:
            if not isinstance(error, dist.DistError) and "gloo" not in str(error):
                raise
            ended = self.watch.first_ended()
            who = (
                "a peer does not answer" if ended is None else f"{name_of(self.place, ended)} ended"
            )
            raise PerfledgerError(who, where=_first_sentence(error)) from error


def join(place: RankPlace, device: torch.device, timeout_s: float = JOIN_S) -> Peers:
    """Meet the other ranks and make the groups. `place.rendezvous` is file:///PATH.

    Raises PerfledgerError with the names of the ranks that have not come in `timeout_s`, and
    UsageError for a rendezvous that cannot be made.
    """
    _choose_interface()
    store = _open_store(place, timeout_s)
    mine = json.dumps({"pid": os.getpid(), "host": socket.gethostname()})
    arrived = _exchange(store, place, "joined", mine, timeout_s, "joined")
    watch = PeerWatch(_pids_here(arrived, place.rank))
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("torch", store),
            rank=place.rank,
            world_size=place.layout.world,
            timeout=timedelta(seconds=timeout_s),
            device_id=device if device.type == "cuda" else None,
        )
        sizes = place.layout.used()
        mesh = init_device_mesh(device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        return Peers(place, mesh, store, watch)
    except RuntimeError as error:  # of gloo, NCCL or the store
        watch.stop()
        raise PerfledgerError(
            f"{name_of(place)} could not connect to its peers: {_first_sentence(error)}"
        ) from error


def make_groups(mesh: DeviceMesh) -> dict[str, Group]:
    """Return the groups of this process by dimension, and "world" with all ranks."""
    handles = {name: mesh.get_group(name) for name in mesh.mesh_dim_names or ()}
    handles[WORLD] = dist.distributed_c10d._get_default_group()
    groups = {}
    for name, handle in handles.items():
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=STALL_S), handle)
        ranks = tuple(dist.get_process_group_ranks(handle))
        groups[name] = Group(name, name, ranks, dist.get_rank(handle), handle)
    return groups


def _open_store(place: RankPlace, timeout_s: float) -> Store:
    kind, _, path = place.rendezvous.partition("://")
    if kind != "file" or not path:
        raise UsageError(
            f"the rendezvous {place.rendezvous!r} is none", fix="file:///PATH, a file on this host"
        )
    try:  # the store itself would retry, and then not say why
        Path(path).touch()
    except OSError as error:
        raise UsageError(f"cannot make the rendezvous file: {error.strerror}", where=path) from None
    store = FileStore(path, place.layout.world)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _exchange(
    store: Store, place: RankPlace, topic: str, mine: str, timeout_s: float, did: str
) -> list[str]:
    """Say something to all ranks, and return what each has said, in the order of ranks."""
    store.set(f"{topic}/{place.rank}", mine)
    deadline = time.monotonic() + timeout_s
    missing = list(range(place.layout.world))
    while missing := [rank for rank in missing if not store.check([f"{topic}/{rank}"])]:
        if time.monotonic() > deadline:
            names = ", ".join(name_of(place, rank) for rank in missing)
            raise PerfledgerError(
                f"{names} {'has' if len(missing) == 1 else 'have'} not {did} in {timeout_s:.0f} s",
                where=name_of(place),
                fix="the output of that process may say why",
            )
        time.sleep(POLL_S)
    return [store.get(f"{topic}/{rank}").decode() for rank in range(place.layout.world)]


def _pids_here(arrived: list[str], own_rank: int) -> dict[int, int]:
    """Return the process of each other rank on this host."""
    here = socket.gethostname()
    members = {rank: json.loads(one) for rank, one in enumerate(arrived) if rank != own_rank}
    return {rank: one["pid"] for rank, one in members.items() if one["host"] == here}


def _choose_interface() -> None:
    """Let gloo talk over the loopback: it would take the address that the host's name resolves to,
    which other machines may reach. A choice of the user wins."""
    if "GLOO_SOCKET_IFNAME" not in os.environ:
        names = [name for _, name in socket.if_nameindex()]
        loopback = next((name for name in ("lo", "lo0") if name in names), None)
        if loopback:
            os.environ["GLOO_SOCKET_IFNAME"] = loopback


def _first_sentence(error: Exception) -> str:
    """Return what an error of gloo or NCCL says, without its source line and its advice."""
    text = re.sub(r"^\[[^]]*\]\s*", "", str(error).partition("\n")[0])
    return text.partition(". ")[0] or type(error).__name__
