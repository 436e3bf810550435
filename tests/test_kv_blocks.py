"""The block pool against a model of it: nothing leaks, nothing is freed twice, counts are exact."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from perfledger.instrumented_runtime.kv_blocks import KvBlocks, blocks_for

COUNT, BLOCK_SIZE = 12, 4


class Pool(RuleBasedStateMachine):
    """Grows, shares and releases tables in any order; `held` is what they must hold."""

    tables = Bundle("tables")

    def __init__(self) -> None:
        super().__init__()
        self.kv = KvBlocks(COUNT, BLOCK_SIZE)
        self.held: list[list[int]] = []

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

    @rule(target=tables, table=tables)
    def share(self, table: list[int]) -> list[int]:
        twin = self.kv.share(table)
        assert twin == table and twin is not table
        self.held.append(twin)
        return twin

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


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_blocks_for_rounds_up(tokens: int, blocks: int) -> None:
    assert blocks_for(tokens, 16) == blocks
