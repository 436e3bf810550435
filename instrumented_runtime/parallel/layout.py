"""How the ranks of one replica or job are laid out over the parallel dimensions."""

from dataclasses import dataclass

from perfledger.schema.errors import UsageError

# Outermost first: neighbours in the last dimension are neighbouring ranks.
DIMENSIONS = ("pp", "dp", "fsdp", "cp", "ep", "tp")


@dataclass(frozen=True, slots=True)
class Layout:
    """Ranks in each parallel dimension; 1 means that the dimension is not used."""

    pp: int = 1
    dp: int = 1
    fsdp: int = 1
    cp: int = 1
    ep: int = 1
    tp: int = 1

    @property
    def world(self) -> int:
        """How many ranks there are: the product."""
        world = 1
        for dimension in DIMENSIONS:
            world *= getattr(self, dimension)
        return world

    def used(self) -> dict[str, int]:
        """Return the dimensions of more than one rank, outermost first."""
        return {name: size for name in DIMENSIONS if (size := getattr(self, name)) > 1}

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the place of a rank in every dimension. Raises UsageError outside the world."""
        if not 0 <= rank < self.world:
            raise UsageError(f"rank {rank} is not one of {self.world}")
        places = {}
        for dimension in reversed(DIMENSIONS):
            rank, places[dimension] = divmod(rank, getattr(self, dimension))
        return places

    def __str__(self) -> str:
        return ",".join(f"{name}={size}" for name, size in self.used().items()) or "single"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """One process of a replica or job, and where its peers meet it."""

    layout: Layout
    rank: int = 0
    rendezvous: str = ""  # a file:// URL on this host, for torch.distributed's store
    replica: str = "0"

    @property
    def alone(self) -> bool:
        """Whether there are no peers: no process group is made."""
        return self.layout.world == 1


def name_of(place: RankPlace, rank: int | None = None) -> str:
    """Return how a rank is called in messages, like "rank 1 (tp=1)"."""
    rank = place.rank if rank is None else rank
    places = place.layout.coordinates(rank)
    return f"rank {rank} ({', '.join(f'{name}={places[name]}' for name in place.layout.used())})"
