"""Who holds which KV block: a pool of numbered blocks with reference counts.

A sequence's block table is a plain list of block numbers, in the order of its tokens. A block may
stand in several tables (a shared prefix); it is free again when the last one lets it go.
"""


def blocks_for(tokens: int, block_size: int) -> int:
    """Return how many blocks of `block_size` tokens hold `tokens` tokens."""
    return -(-tokens // block_size)


class KvBlocks:
    """The pool. Freed blocks are taken again first, while they are warm in the CPU's caches."""

    def __init__(self, count: int, block_size: int) -> None:
        self.count = count
        self.block_size = block_size
        self._references = [0] * count
        self._free = list(range(count - 1, -1, -1))

    @property
    def free(self) -> int:
        """Blocks that no table holds."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Blocks that at least one table holds."""
        return self.count - len(self._free)

    def references(self, block: int) -> int:
        """Return how many tables hold `block`."""
        return self._references[block]

    def missing(self, table: list[int], tokens: int) -> int:
        """Return how many more blocks `table` needs to hold `tokens` tokens."""
        return max(0, blocks_for(tokens, self.block_size) - len(table))

    def grow(self, table: list[int], tokens: int) -> bool:
        """Extend `table` to hold `tokens` tokens; False (and no change) if blocks run out."""
        needed = self.missing(table, tokens)
        if needed > len(self._free):
            return False
        for _ in range(needed):
            block = self._free.pop()
            self._references[block] = 1
            table.append(block)
        return True

    def share(self, table: list[int]) -> list[int]:
        """Return a second table of the same blocks, each counted once more.

        It is the seam for prefix sharing, which comes next: until then every block that is held
        stands in one table.

        Raises ValueError for a block that nothing holds.
        """
        self._require_held(table)
        for block in table:
            self._references[block] += 1
        return list(table)

    def release(self, table: list[int]) -> None:
        """Let go of every block of `table` and empty it.

        Raises ValueError for a block that nothing holds (released twice), before any change.
        """
        self._require_held(table)
        for block in reversed(table):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free.append(block)
        table.clear()

    def _require_held(self, table: list[int]) -> None:
        for block in table:
            if self._references[block] == 0:
                raise ValueError(f"KV block {block} is not held by any table")
