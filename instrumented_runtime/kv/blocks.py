"""Who holds which KV block: a pool of numbered blocks with reference counts and a prefix cache.

A sequence's block table is a plain list of block numbers, in the order of its tokens. A block may
stand in several tables: the choices of a request share their prompt, and requests share equal
prefixes. A full block is known by the hash of all tokens up to its end (prefix_hashes.py); when
the last table lets go of it, it stays in the cache until its room is needed, least recently used
first. A shared or cached block is never written: who must write takes a copy (copy-on-write).
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass


def blocks_for(tokens: int, block_size: int) -> int:
    """Return how many blocks of `block_size` tokens hold `tokens` tokens."""
    return -(-tokens // block_size)


@dataclass(slots=True)
class KvCounts:
    """Blocks since the start, by what happened to them."""

    stored: int = 0  # full, and findable by their hash
    evicted: int = 0  # taken from the cache for other tokens
    copied: int = 0  # on a write to a block that is shared or cached
    swapped_out: int = 0
    swapped_in: int = 0

    def told(self) -> tuple[int, int, int, int, int]:
        """Return the counts in the order of the KV record."""
        return (self.stored, self.evicted, self.copied, self.swapped_out, self.swapped_in)


class KvBlocks:
    """The pool. Freed blocks are taken again first, while they are warm in the CPU's caches."""

    def __init__(self, count: int, block_size: int) -> None:
        self.count = count
        self.block_size = block_size
        self.counts = KvCounts()
        self._references = [0] * count
        self._free = list(range(count - 1, -1, -1))
        self._hash: list[bytes | None] = [None] * count
        self._cached: dict[bytes, int] = {}
        self._unreferenced: OrderedDict[int, None] = OrderedDict()  # cached, the next to go first

    @property
    def free(self) -> int:
        """Blocks that no table holds; `cached` of them keep a prefix until they are needed."""
        return len(self._free) + len(self._unreferenced)

    @property
    def used(self) -> int:
        """Blocks that at least one table holds."""
        return self.count - len(self._free) - len(self._unreferenced)

    @property
    def cached(self) -> int:
        """Blocks that no table holds and whose prefix can still be found."""
        return len(self._unreferenced)

    def references(self, block: int) -> int:
        """Return how many tables hold `block`."""
        return self._references[block]

    def missing(self, table: list[int], tokens: int) -> int:
        """Return how many more blocks `table` needs to hold `tokens` tokens."""
        return max(0, blocks_for(tokens, self.block_size) - len(table))

    def grow(self, table: list[int], tokens: int) -> bool:
        """Extend `table` to hold `tokens` tokens; False (and no change) if blocks run out."""
        needed = self.missing(table, tokens)
        if needed > self.free:
            return False
        for _ in range(needed):
            table.append(self._take())
        return True

    def share(self, table: list[int]) -> list[int]:
        """Return a second table of the same blocks, each counted once more.

        Raises ValueError for a block that nothing holds.
        """
        self._require_held(table)
        for block in table:
            self._references[block] += 1
        return list(table)

    def release(self, table: list[int]) -> None:
        """Let go of every block of `table` and empty it; the ends of prefixes are evicted first.

        Raises ValueError for a block that is held less often than `table` names it (released
        twice), before any change.
        """
        self._require_held(table)
        for block in reversed(table):
            self._references[block] -= 1
            if self._references[block] == 0:
                if self._hash[block] is None:
                    self._free.append(block)
                else:
                    self._unreferenced[block] = None
        table.clear()

    # --- copy-on-write ---

    def writable(self, block: int) -> bool:
        """Whether the one table that holds `block` may write to it."""
        return self._references[block] == 1 and self._hash[block] is None

    def copy_for_write(self, table: list[int], index: int) -> tuple[int, int]:
        """Put a block of its own in place of the shared one at `index`; return (from, to).

        The caller checks that a block is free and sees to it that the content is copied before
        the next write to any block.
        """
        shared, own = table[index], self._take()
        table[index] = own
        self.release([shared])
        self.counts.copied += 1
        return shared, own

    # --- prefix cache ---

    def find_prefix(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the cached blocks of the longest prefix of `hashes` that is there throughout."""
        found = []
        for digest in hashes:
            block = self._cached.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def unreferenced(self, blocks: Iterable[int]) -> int:
        """Return how many of `blocks` no table holds: holding them takes that many free ones."""
        return sum(1 for block in blocks if not self._references[block])

    def hold(self, blocks: list[int]) -> list[int]:
        """Return a new table of blocks that `find_prefix` has just found."""
        for block in blocks:
            if not self._references[block]:
                del self._unreferenced[block]
            self._references[block] += 1
        return list(blocks)

    def store(self, block: int, digest: bytes) -> None:
        """Make a full block findable, unless another one with the same prefix is already."""
        if digest not in self._cached and self._hash[block] is None:
            self._cached[digest] = block
            self._hash[block] = digest
            self.counts.stored += 1

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._unreferenced.popitem(last=False)
            digest, self._hash[block] = self._hash[block], None
            if digest is not None:
                del self._cached[digest]
            self.counts.evicted += 1
        self._references[block] = 1
        return block

    def _require_held(self, table: list[int]) -> None:
        for block in table:
            if self._references[block] == 0:
                raise ValueError(f"KV block {block} is not held by any table")
        if len(set(table)) < len(table):
            for block, times in Counter(table).items():
                if self._references[block] < times:
                    raise ValueError(f"KV block {block} is not held {times} times")
