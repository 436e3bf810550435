"""The host's pool of KV blocks, for sequences that had to make room; and moves not yet made."""

from dataclasses import dataclass, field

Move = tuple[int, int]  # from block, to block


@dataclass(slots=True)
class PlannedMoves:
    """Blocks that the next step copies before it computes: out to the host, on the device, in."""

    swap_out: list[Move] = field(default_factory=list)
    copies: list[Move] = field(default_factory=list)
    swap_in: list[Move] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.swap_out or self.copies or self.swap_in)


class HostBlocks:
    """Numbered blocks in host memory, each held by at most one request."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._held: set[int] = set()

    @property
    def free(self) -> int:
        """Blocks that no request holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Return `count` blocks. Raises ValueError where there are fewer."""
        if count > len(self._free):
            raise ValueError(f"{count} host blocks are wanted, {len(self._free)} are free")
        taken = [self._free.pop() for _ in range(count)]
        self._held.update(taken)
        return taken

    def release(self, blocks: set[int]) -> None:
        """Let go of blocks. Raises ValueError, before any change, for one that nobody holds."""
        if not blocks <= self._held:
            raise ValueError(f"host blocks {sorted(blocks - self._held)} are not held")
        self._held -= blocks
        self._free.extend(sorted(blocks, reverse=True))
