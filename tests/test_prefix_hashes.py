"""Names of blocks: equal for equal prefixes of one tenant and model, different for all else."""

from hypothesis import given
from hypothesis import strategies as st

from perfledger.instrumented_runtime.kv.prefix_hashes import (
    block_hashes,
    extend_hashes,
    prefix_salt,
)

TOKENS = st.lists(st.integers(0, 3), max_size=40)
SALT = prefix_salt("tenant", "weights", "tokenizer", "template")


@given(TOKENS, TOKENS, st.integers(1, 6))
def test_as_many_names_are_equal_as_full_blocks_of_the_common_prefix(
    one: list[int], other: list[int], size: int
) -> None:
    ours, theirs = block_hashes(one, size, SALT), block_hashes(other, size, SALT)
    assert len(ours) == len(one) // size
    common = 0
    while common < min(len(ours), len(theirs)):
        end = (common + 1) * size
        if one[:end] != other[:end]:
            break
        common += 1
    equal = [a == b for a, b in zip(ours, theirs, strict=False)]
    assert equal == [True] * common + [False] * (len(equal) - common)
    assert len(set(ours)) == len(ours)


@given(TOKENS, st.integers(1, 6), st.integers(0, 40))
def test_extended_as_made_at_once(tokens: list[int], size: int, first: int) -> None:
    hashes = block_hashes(tokens[:first], size, SALT)
    extend_hashes(hashes, tokens, size, SALT)
    assert hashes == block_hashes(tokens, size, SALT)


def test_every_part_of_the_salt_counts_and_none_runs_into_the_next() -> None:
    salts = [
        SALT,
        prefix_salt("tenan", "tweights", "tokenizer", "template"),
        prefix_salt("", "weights", "tokenizer", "template"),
        prefix_salt("tenant", "weights", "tokenizer", ""),
        prefix_salt("tenant", "weights", "tokenizer"),
    ]
    names = {block_hashes([1, 2], 2, salt)[0] for salt in salts}
    assert len(names) == len(salts)


def test_the_names_stay_as_they_are() -> None:
    """The router and the engines of one service must agree, also across a rolling restart."""
    assert [one.hex() for one in block_hashes([1, 2, 3, 4], 2, SALT)] == [
        "b096fb9533e53af72a5ed89ff98ee254",
        "69faaebc0f94a3a80190c470e28b1c3d",
    ]
