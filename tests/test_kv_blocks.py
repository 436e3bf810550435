"""The block pool against a model of it: nothing leaks, nothing is freed twice, counts are exact."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from perfledger.instrumented_runtime.kv.blocks import KvBlocks, blocks_for
from perfledger.instrumented_runtime.kv.swapping import HostBlocks

COUNT, BLOCK_SIZE = 12, 4


class Pool(RuleBasedStateMachine):
    """Grows, shares, stores, copies and releases tables in any order.

    `held` is what the tables must hold; `names` are the prefixes told so far, by block.
    """

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.kv = KvBlocks(COUNT, BLOCK_SIZE)
        self.held: list[list[int]] = []
        self.names: dict[int, bytes] = {}
        self.told = 0

    @rule(target=tables)
    def start_table(self) -> list[int]:
        table: list[int] = []
        self.held.append(table)
        return table

    @rule(table=tables, tokens=st.integers(0, 80))
    def grow(self, table: list[int], tokens: int) -> None:
        before, free = list(table), self.kv.free
        needed = max(0, blocks_for(tokens, BLOCK_SIZE) - len(table))
        assert self.kv.missing(table, tokens) == needed
        assert self.kv.grow(table, tokens) is (needed <= free)
        assert table[: len(before)] == before
        assert len(table) - len(before) == (needed if needed <= free else 0)
        self._taken(table[len(before) :])

    @rule(target=tables, table=tables)
    def share(self, table: list[int]) -> list[int]:
        twin = self.kv.share(table)
        assert twin == table and twin is not table
        self.held.append(twin)
        return twin

    @rule(table=tables, data=st.data())
    def store(self, table: list[int], data: st.DataObject) -> None:
        if table:
            block, digest = data.draw(st.sampled_from(table)), bytes([self.told % 256])
            self.told += 1
            self.kv.store(block, digest)
            self.names.setdefault(block, digest)

    @precondition(lambda self: self.names)
    @rule(target=tables, data=st.data())
    def find(self, data: st.DataObject) -> list[int]:
        block = data.draw(st.sampled_from(sorted(self.names)))
        found = self.kv.find_prefix([self.names[block], b"of nothing"])
        assert found == [block]
        assert self.kv.unreferenced(found) == (self.kv.references(block) == 0)
        table = self.kv.hold(found)
        self.held.append(table)
        return table

    @rule(table=tables, data=st.data())
    def copy_for_write(self, table: list[int], data: st.DataObject) -> None:
        if not table or not self.kv.free:
            return
        index = data.draw(st.integers(0, len(table) - 1))
        before = table[index]
        expected = sum(other.count(before) for other in self.held) == 1 and before not in self.names
        assert self.kv.writable(before) is expected
        source, own = self.kv.copy_for_write(table, index)
        assert (source, own) == (before, table[index]) and self.kv.writable(own)
        self._taken([own])

    @rule(target=tables, table=consumes(tables))
    def release(self, table: list[int]) -> object:
        again = list(table)
        self.kv.release(table)
        assert table == []
        self.held = [one for one in self.held if one is not table]
        if again and not any(set(again) & set(one) for one in self.held):
            with pytest.raises(ValueError, match="not held"):
                self.kv.release(again)
        return multiple()

    @invariant()
    def counts_are_exact(self) -> None:
        expected = [sum(table.count(block) for table in self.held) for block in range(COUNT)]
        assert [self.kv.references(block) for block in range(COUNT)] == expected
        assert self.kv.used == sum(count > 0 for count in expected)
        assert self.kv.free == COUNT - self.kv.used
        assert self.kv.cached == sum(not expected[block] for block in self.names)
        assert self.kv.counts.stored - self.kv.counts.evicted == len(self.names)

    def _taken(self, blocks: list[int]) -> None:
        """A block given to new tokens is no longer found by its old name, and was the oldest."""
        for block in blocks:
            assert self.kv.references(block) == 1
            if name := self.names.pop(block, None):
                assert self.kv.find_prefix([name]) == []


TestPool = Pool.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_share_refuses_a_free_block() -> None:
    kv = KvBlocks(2, BLOCK_SIZE)
    table: list[int] = []
    kv.grow(table, 4)
    stale = list(table)
    kv.release(table)
    with pytest.raises(ValueError, match="KV block 0 is not held by any table"):
        kv.share(stale)


def test_a_table_that_names_a_block_too_often_is_refused_before_any_change() -> None:
    kv, table = KvBlocks(2, BLOCK_SIZE), list[int]()
    kv.grow(table, 8)
    with pytest.raises(ValueError, match="KV block 1 is not held 2 times"):
        kv.release([0, 1, 1])
    assert kv.used == 2


def test_the_end_of_the_prefix_used_longest_ago_is_evicted_first() -> None:
    kv = KvBlocks(4, BLOCK_SIZE)
    tables: list[list[int]] = [[], []]
    for number, table in enumerate(tables):
        kv.grow(table, 8)
        for at, block in enumerate(table):
            kv.store(block, bytes([number, at]))
    for table in tables:
        kv.release(table)
    kv.release(kv.hold(kv.find_prefix([b"\0\0", b"\0\1"])))  # now 1 is the older one
    new: list[int] = []
    kv.grow(new, 4)
    assert [len(kv.find_prefix([bytes([n, 0]), bytes([n, 1])])) for n in (0, 1)] == [2, 1]
    kv.grow(new, 8)
    assert [len(kv.find_prefix([bytes([n, 0]), bytes([n, 1])])) for n in (0, 1)] == [2, 0]
    assert kv.counts.evicted == 2


def test_host_blocks_are_given_once_and_taken_back_once() -> None:
    host = HostBlocks(3)
    first = host.take(2)
    with pytest.raises(ValueError, match="2 host blocks are wanted, 1 are free"):
        host.take(2)
    host.release(set(first))
    assert host.free == 3
    with pytest.raises(ValueError, match="are not held"):
        host.release({first[0]})
    assert host.free == 3


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks
