"""The block tables of requests: found in the prefix cache, grown, shared, copied, swapped.

Everything that must be copied before the next step computes is noted in `moves`; who builds the
step takes it with `take_moves`.
"""

from perfledger.instrumented_runtime.kv.blocks import KvBlocks, blocks_for
from perfledger.instrumented_runtime.kv.prefix_hashes import extend_hashes, prefix_salt
from perfledger.instrumented_runtime.kv.swapping import HostBlocks, Move, PlannedMoves
from perfledger.instrumented_runtime.scheduling.sequences import Request, Sequence


class KvTables:
    """All block tables of one engine. `identity` is what the cached K and V depend on."""

    def __init__(
        self, blocks: KvBlocks, host: HostBlocks, *, prefix_cache: bool, identity: tuple[str, ...]
    ) -> None:
        self.blocks, self.host = blocks, host
        self._prefix_cache, self._identity = prefix_cache, identity
        self._moves = PlannedMoves()
        self._host_leaving: set[int] = set()  # read by moves that are not yet taken

    def take_moves(self) -> PlannedMoves | None:
        """Return what must be copied before the step that is being built, if anything."""
        if not self._moves:
            return None
        moves, self._moves = self._moves, PlannedMoves()
        self.host.release(self._host_leaving)
        self._host_leaving = set()
        return moves

    # --- admission ---

    def admit(self, request: Request, reserve: int) -> bool:
        """Give a waiting request blocks for all its tokens; False if fewer than `reserve` are left.

        `computed` of its sequences says what need not be computed: found in the prefix cache, or
        swapped in.
        """
        evicted = self.blocks.counts.evicted
        place = self._swap_in if request.host_tables else self._find_and_grow
        if not place(request, reserve):
            return False
        account = request.account
        account.evicted_blocks += self.blocks.counts.evicted - evicted
        self._note_peak(request)
        if not request.admitted:
            account.cached_tokens = request.sequences[0].computed
        return True

    def _find_and_grow(self, request: Request, reserve: int) -> bool:
        """Admit a request that has no block anywhere."""
        request.account.swapped_in_last = 0
        blocks, size, first = self.blocks, self.blocks.block_size, request.sequences[0]
        shared = request.prompt_tokens // size  # that all its sequences have in common
        found, room = self._find(first), blocks.free - reserve
        if len(found) * size == len(first.tokens) and self._needed(request, found) > room:
            found.pop()  # no room for a copy of the last one beside it: compute it again
        if self._needed(request, found) > room:
            return False
        # The last token is always computed: its logits are wanted.
        cached = min(len(found) * size, len(first.tokens) - 1)
        self._start_table(first, blocks.hold(found), cached)
        for sequence in request.sequences[1:]:
            self._start_table(sequence, blocks.share(first.blocks[:shared]), shared * size)
        return True

    def _needed(self, request: Request, found: list[int]) -> int:
        """Return how many free blocks an admission takes whose first ones were found."""
        size, shared = self.blocks.block_size, request.prompt_tokens // self.blocks.block_size
        first, *others = [len(sequence.tokens) for sequence in request.sequences]
        copied = 1 if len(found) * size == first else 0
        own = blocks_for(first, size) - len(found) + self.blocks.unreferenced(found) + copied
        return own + sum(blocks_for(tokens, size) - shared for tokens in others)

    def _start_table(self, sequence: Sequence, table: list[int], computed: int) -> None:
        size = self.blocks.block_size
        sequence.blocks, sequence.computed = table, computed
        sequence.stored = computed // size
        if computed % size:
            # All its tokens were found, and the last one is computed again: into a copy.
            self._copy(sequence, computed // size)
        self.blocks.grow(table, len(sequence.tokens))

    def _find(self, sequence: Sequence) -> list[int]:
        if not self._prefix_cache:
            return []
        self._hash(sequence)
        return self.blocks.find_prefix(sequence.hashes)

    def cached_tokens(self, sequence: Sequence) -> int:
        """Return how many leading tokens need not be computed if it were admitted now."""
        return min(len(self._find(sequence)) * self.blocks.block_size, len(sequence.tokens) - 1)

    # --- growing ---

    def extend(self, request: Request) -> bool:
        """Make room for the newest token of each sequence; False (no change) if blocks run out."""
        if request.tail_shared or len(request.sequences) > 1:
            return self._extend_all(request)
        sequence = request.sequences[0]
        if len(sequence.tokens) <= len(sequence.blocks) * self.blocks.block_size:
            return True
        evicted = self.blocks.counts.evicted
        if not self.blocks.grow(sequence.blocks, len(sequence.tokens)):
            return False
        account = request.account
        account.evicted_blocks += self.blocks.counts.evicted - evicted
        account.peak_blocks = max(account.peak_blocks, len(sequence.blocks))
        return True

    def _extend_all(self, request: Request) -> bool:
        blocks, account = self.blocks, request.account
        missing = [blocks.missing(one.blocks, len(one.tokens)) for one in request.sequences]
        copies = len(request.sequences) - 1 if request.tail_shared else 0
        if sum(missing) + copies > blocks.free:
            return False
        if not copies:
            request.tail_shared = False  # the others have ended
            if not any(missing):
                return True
        evicted = blocks.counts.evicted
        for sequence in request.sequences:
            index = sequence.computed // blocks.block_size
            if request.tail_shared and not blocks.writable(sequence.blocks[index]):
                self._copy(sequence, index)
            blocks.grow(sequence.blocks, len(sequence.tokens))
        request.tail_shared = False
        account.evicted_blocks += blocks.counts.evicted - evicted
        self._note_peak(request)
        return True

    def share_prompt(self, request: Request, others: list[Sequence]) -> None:
        """Give the other choices of a request the blocks of its first one."""
        first = request.sequences[0]
        for sequence in others:
            sequence.blocks = self.blocks.share(first.blocks)
            sequence.stored = first.stored
        request.tail_shared = bool(others) and len(first.tokens) % self.blocks.block_size != 0

    def unshare_prompt(self, request: Request) -> None:
        """Undo `share_prompt` and the fork before it: no choice has got a token."""
        for sequence in request.sequences[1:]:
            self.blocks.release(sequence.blocks)
        del request.sequences[1:]
        request.forked = request.tail_shared = False

    def inherit(self, heir: Sequence, ended: Sequence) -> None:
        """Let another sequence go on with the blocks they share where the first one ended.

        Only the first computes them again after a preemption; the others count on it.
        """
        heir.computed = min(heir.computed, ended.computed)
        heir.stored = min(heir.stored, ended.stored)

    def store_full(self, sequence: Sequence) -> None:
        """Make the blocks that `computed` has just filled findable."""
        full = sequence.computed // self.blocks.block_size
        if full <= sequence.stored or not self._prefix_cache:
            return
        if full > len(sequence.hashes):
            self._hash(sequence)
        for index in range(sequence.stored, full):
            self.blocks.store(sequence.blocks[index], sequence.hashes[index])
        sequence.stored = full

    # --- letting go ---

    def release(self, sequence: Sequence) -> None:
        """Let go of the blocks of a sequence that has ended; others of its request go on."""
        self.blocks.release(sequence.blocks)
        request = sequence.of
        if request.host_tables:
            table = set(request.host_tables.pop(request.sequences.index(sequence)))
            self._leave_host(table.difference(*request.host_tables))

    def release_all(self, request: Request) -> None:
        """Let go of all blocks of a request, on the device and on the host."""
        for sequence in request.sequences:
            self.blocks.release(sequence.blocks)
        self._leave_host({block for table in request.host_tables for block in table})
        request.host_tables = []

    def drop(self, request: Request) -> None:
        """Preempt by recompute: let go of the blocks; all tokens have to be computed again."""
        for sequence in request.sequences:
            sequence.recompute_below = max(sequence.computed, sequence.recompute_below)
            self.blocks.release(sequence.blocks)
            sequence.computed = sequence.stored = 0
        request.tail_shared = False

    def forget_swapped(self, request: Request) -> None:
        """The blocks on the host are not to be trusted: have all tokens computed again."""
        self._leave_host({block for table in request.host_tables for block in table})
        request.host_tables, request.decoding = [], False
        self.drop(request)

    # --- swapping ---

    def swap_out(self, request: Request) -> bool:
        """Preempt by swap: move what is computed to the host; False if it has no room.

        False also while several sequences are computed again: what they share is not whole yet.
        """
        if len(request.sequences) > 1 and not request.decoding:
            return False
        size = self.blocks.block_size
        kept = [one.blocks[: blocks_for(one.computed, size)] for one in request.sequences]
        unique = list(dict.fromkeys(block for table in kept for block in table))
        if not unique or len(unique) > self.host.free:
            return False
        place = dict(zip(unique, self.host.take(len(unique)), strict=True))
        self._moves.swap_out += place.items()
        request.host_tables = [[place[block] for block in table] for table in kept]
        for sequence in request.sequences:
            self.blocks.release(sequence.blocks)
            sequence.stored = 0
        request.tail_shared = False
        request.account.swapped_blocks += len(unique)
        self.blocks.counts.swapped_out += len(unique)
        return True

    def _swap_in(self, request: Request, reserve: int) -> bool:
        """Admit a request from the host; what its sequences shared in full they share again."""
        blocks, size = self.blocks, self.blocks.block_size
        tables = list(zip(request.sequences, request.host_tables, strict=True))
        full = {block for one, table in tables for block in table[: one.computed // size]}
        own = sum(blocks_for(len(one.tokens), size) - one.computed // size for one, _ in tables)
        if len(full) + own + reserve > blocks.free:
            return False
        place: dict[int, int] = {}
        moves: list[Move] = []
        for sequence, table in tables:
            for index, host in enumerate(table):
                if index < sequence.computed // size and host in place:
                    sequence.blocks += blocks.share([place[host]])
                    continue
                blocks.grow(sequence.blocks, (index + 1) * size)
                moves.append((host, sequence.blocks[-1]))
                place[host] = sequence.blocks[-1]
            blocks.grow(sequence.blocks, len(sequence.tokens))
        self._moves.swap_in += moves
        request.account.swapped_blocks += len(moves)
        request.account.swapped_in_last = len(moves)
        blocks.counts.swapped_in += len(moves)
        self._host_leaving.update(*request.host_tables)
        request.host_tables = []
        return True

    def _leave_host(self, held: set[int]) -> None:
        self._moves.swap_out = [move for move in self._moves.swap_out if move[1] not in held]
        self.host.release(held)

    # --- of one sequence ---

    def _hash(self, sequence: Sequence) -> None:
        tenant = sequence.of.tenant
        if not tenant.salt:
            tenant.salt = prefix_salt(tenant.name, *self._identity)
        extend_hashes(sequence.hashes, sequence.tokens, self.blocks.block_size, tenant.salt)

    def _copy(self, sequence: Sequence, index: int) -> None:
        self._moves.copies.append(self.blocks.copy_for_write(sequence.blocks, index))
        sequence.of.account.copied_blocks += 1

    def _note_peak(self, request: Request) -> None:
        held = {block for sequence in request.sequences for block in sequence.blocks}
        request.account.peak_blocks = max(request.account.peak_blocks, len(held))
