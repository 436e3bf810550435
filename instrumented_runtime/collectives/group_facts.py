"""What a process group of torch says about itself, asked once: name, ranks, backends."""

from collections.abc import Hashable
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch.distributed as dist

from perfledger.instrumented_runtime.collectives.observed import CollectiveCall

_WORLD_DESCRIPTIONS = ("default_pg", "undefined", "")
_MESH_PREFIX = "mesh_"  # DeviceMesh describes its groups as mesh_tp
WORLD = "world"


class GroupFacts(NamedTuple):
    """A group as telemetry names it."""

    key: str  # torch's own name: equal on all ranks of the group, of no other group
    name: str
    dimension: str
    ranks: tuple[int, ...]  # global
    position: int
    backends: dict[str, str]  # by device type
    described: dict[Hashable, CollectiveCall]  # calls by what they are, times and numbers unset

    def backend(self, device: str) -> str:
        """Return the backend that serves a type of device."""
        return self.backends.get(device, "")


# A program that destroys a group must not find it kept alive by us.
_known: WeakKeyDictionary[dist.ProcessGroup, GroupFacts] = WeakKeyDictionary()


def facts_of(handle: dist.ProcessGroup) -> GroupFacts:
    """Return the facts of a group that this rank is in, asked at the first time."""
    facts = _known.get(handle)
    if facts is None:
        facts = _known[handle] = _ask(handle)
    return facts


def rename(handle: dist.ProcessGroup, name: str, dimension: str) -> None:
    """Give a group the name of its use, like the dimension of a mesh that covers the world."""
    _known[handle] = facts_of(handle)._replace(name=name, dimension=dimension, described={})


def _ask(handle: dist.ProcessGroup) -> GroupFacts:
    described = handle.group_desc.removeprefix(_MESH_PREFIX)
    if described in _WORLD_DESCRIPTIONS:
        everyone = handle.size() == dist.get_world_size()
        described = WORLD if everyone else handle.group_name
    config = str(dist.get_backend_config(handle))
    backends = dict(part.split(":", 1) for part in config.split(",") if ":" in part)
    ranks = tuple(dist.get_process_group_ranks(handle))
    return GroupFacts(
        handle.group_name,
        described,
        described,
        ranks,
        ranks.index(dist.get_rank()),
        backends,
        {},
    )
