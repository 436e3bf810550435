"""Steps over sequences whose tokens are known, and the logits that a model gives for every row."""

import dataclasses
import random
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from perfledger.instrumented_runtime.attention import BlockMoves, ChunkRows, DecodeRows, StepRows


@dataclass
class Known:
    """A sequence: all its tokens, its blocks and how many tokens have been computed."""

    tokens: list[int]
    blocks: list[int]
    computed: int = 0


@dataclass
class Step:
    """The sequences that decode in a step, and (sequence, tokens) of its chunks."""

    decodes: list[int] = field(default_factory=list)
    chunks: list[tuple[int, int]] = field(default_factory=list)
    copied: list[int] = field(default_factory=list)  # sequences that get other blocks before it
    swapped: list[int] = field(default_factory=list)  # the same, by way of the host


# Whole prompts, later chunks (odd ones, one of a single token), and decodes beside both.
STEPS = [
    Step(chunks=[(0, 33)]),
    Step(decodes=[0]),
    Step(decodes=[0], chunks=[(1, 1), (2, 16)]),
    Step(decodes=[0], chunks=[(1, 20), (2, 7)]),
    Step(decodes=[0, 2], chunks=[(1, 9)]),
    *[Step(decodes=[0, 1, 2])] * 2,
    Step(decodes=[0, 1, 2], copied=[0], swapped=[2]),
    Step(decodes=[0, 1, 2], swapped=[0, 1]),
    Step(decodes=[1], chunks=[(3, 50)]),
    *[Step(decodes=[3, 0])] * 2,
]
LENGTHS = (60, 50, 40, 60)


def known_sequences(vocab_size: int, blocks: int, block_size: int) -> list[Known]:
    """Sequences of LENGTHS over shuffled blocks."""
    draw = random.Random(17)
    free = list(range(blocks))
    draw.shuffle(free)
    return [
        Known(
            [draw.randrange(vocab_size) for _ in range(length)],
            [free.pop() for _ in range(-(-length // block_size))],
        )
        for length in LENGTHS
    ]


def run_steps(
    forward: Callable[[StepRows], Tensor], vocab_size: int, blocks: int, block_size: int
) -> list[Tensor]:
    """Return what `forward` gives for each of STEPS, with the logits of every row asked for.

    Every other step asks for a few rows only, the last one twice.
    """
    sequences = known_sequences(vocab_size, blocks, block_size)
    results = []
    for number, step in enumerate(STEPS):
        moves = _move(step, sequences, blocks)
        rows = dataclasses.replace(step_rows(step, sequences, block_size), moves=moves)
        if number % 2:
            last = len(rows.tokens) - 1
            rows = dataclasses.replace(rows, sampled=torch.tensor([0, last, last]))
        results.append(forward(rows))
        for one in step.decodes:
            sequences[one].computed += 1
        for one, tokens in step.chunks:
            sequences[one].computed += tokens
    return results


def step_rows(step: Step, sequences: list[Known], block_size: int) -> StepRows:
    """Return the rows of a step; the logits of all of them are wanted."""
    pieces = [(sequences[one], 1) for one in step.decodes]
    pieces += [(sequences[one], tokens) for one, tokens in step.chunks]
    tokens, positions, slots, chunks = [], [], [], []
    for number, (one, count) in enumerate(pieces):
        here = range(one.computed, one.computed + count)
        if number >= len(step.decodes):
            chunks.append(_chunk(one, len(tokens), count, block_size))
        tokens += one.tokens[here.start : here.stop]
        positions += here
        slots += [one.blocks[p // block_size] * block_size + p % block_size for p in here]
    decode = None
    if step.decodes:
        decode = _decodes([sequences[one] for one in step.decodes], block_size)
    return StepRows(
        torch.tensor(tokens),
        torch.tensor(positions),
        torch.tensor(slots),
        decode,
        tuple(chunks),
        None,
    )


def _move(step: Step, sequences: list[Known], blocks: int) -> BlockMoves | None:
    """Give sequences other blocks."""
    free = sorted(set(range(blocks)) - {block for one in sequences for block in one.blocks})
    copies, out, back = [], [], []
    for number in step.copied + step.swapped:
        old = sequences[number].blocks
        sequences[number].blocks = new = [free.pop() for _ in old]
        if number in step.copied:
            copies += list(zip(old, new, strict=True))
            continue
        hosts = list(range(len(out), len(out) + len(old)))
        out += list(zip(old, hosts, strict=True))
        back += list(zip(hosts, new, strict=True))
    if not copies and not out:
        return None
    return BlockMoves(*(torch.tensor(pairs) if pairs else None for pairs in (out, copies, back)))


def _chunk(one: Known, start: int, count: int, block_size: int) -> ChunkRows:
    if not one.computed:
        return ChunkRows(start, count, 0, None, None)
    end = one.computed + count
    table = torch.tensor(one.blocks[: -(-end // block_size)])
    mask = torch.arange(end) <= torch.arange(one.computed, end)[:, None]
    return ChunkRows(start, count, one.computed, table, mask)


def _decodes(decoding: list[Known], block_size: int) -> DecodeRows:
    width = max(-(-(one.computed + 1) // block_size) for one in decoding)
    tables = torch.zeros(len(decoding), width, dtype=torch.int64)
    for table, one in zip(tables, decoding, strict=True):
        held = one.blocks[:width]
        table[: len(held)] = torch.tensor(held)
    lengths = torch.tensor([[one.computed + 1] for one in decoding])
    mask = torch.arange(width * block_size) < lengths
    return DecodeRows(len(decoding), tables.flatten(), mask[:, None, None])
