"""The rows of a step as sums, from which its bytes and FLOPs follow: from records to attributes.

What the sums are of, says schema.step_work.BatchShape. Nothing here imports torch: the exporter
process uses it too.
"""

from collections.abc import Iterable, Sequence

from perfledger.instrumented_runtime.finished_spans import Attributes
from perfledger.instrumented_runtime.kv.blocks import blocks_for
from perfledger.instrumented_runtime.parallel.splits import runs_of
from perfledger.instrumented_runtime.records import NOT_READ, Chunk, Step

_HALF = 32  # bits: a step has one word left for both numbers of its decodes
_LOW = (1 << _HALF) - 1


def pack_decodes(context_tokens: int, gathered_blocks: int) -> int:
    """Return the word of a STEP that holds both."""
    return context_tokens << _HALF | gathered_blocks


def chunk_sums(pieces: Sequence[tuple[int, int]], block_size: int) -> tuple[int, ...]:
    """Return the last words of a CHUNK of pieces (tokens before it, its tokens)."""
    if len(pieces) == 1:  # nearly always, and in the engine's hot path
        start, tokens = pieces[0]
        end = start + tokens
        pairs = tokens * end
        return (
            (1, 1, end, pairs, pairs, -(-end // block_size)) if start else (1, 0, end, pairs, 0, 0)
        )
    continued = [(start, tokens) for start, tokens in pieces if start]
    return (
        len(pieces),
        len(continued),
        sum([start + tokens for start, tokens in pieces]),
        sum([tokens * (start + tokens) for start, tokens in pieces]),
        sum([tokens * (start + tokens) for start, tokens in continued]),
        sum([blocks_for(start + tokens, block_size) for start, tokens in continued]),
    )


class StepWork:
    """Gathers the CHUNKs of the coming step."""

    def __init__(self) -> None:
        self.microbatches = 1  # into which the engine cuts a step at most
        self._chunks: list[Chunk] = []

    def take(self, chunk: Chunk) -> None:
        """Take the next record."""
        self._chunks.append(chunk)

    def attributes(self, step: Step, *, complete: bool) -> Attributes:
        """Return the attributes of a step that has ended; none unless all its records are there."""
        chunks = [one for one in self._chunks if one.seq == step.seq]
        self._chunks = []
        known = step.decodes != NOT_READ and all(one.pieces != NOT_READ for one in chunks)
        if not complete or not known or step.prefill_tokens != sum(one.tokens for one in chunks):
            return {}
        told = _decode_attributes(step) if step.decode_tokens else {}
        if chunks:
            told |= _chunk_attributes(step, chunks)
        if self.microbatches > 1:
            told |= _microbatch_attributes(step, chunks, self.microbatches)
        return told


def _decode_attributes(step: Step) -> Attributes:
    return {
        "perfledger.step.decode_context_tokens": step.decodes >> _HALF,
        "perfledger.step.decode_gathered_blocks": step.decodes & _LOW,
    }


def _chunk_attributes(step: Step, chunks: list[Chunk]) -> Attributes:
    return {
        "perfledger.step.chunks": sum(one.pieces for one in chunks),
        "perfledger.step.continued_chunks": sum(one.continued for one in chunks),
        "perfledger.step.chunk_key_tokens": sum(one.key_tokens for one in chunks),
        "perfledger.step.chunk_pairs": sum(one.pairs for one in chunks),
        "perfledger.step.continued_pairs": sum(one.continued_pairs for one in chunks),
        "perfledger.step.chunk_gathered_blocks": sum(one.gathered_blocks for one in chunks),
        "perfledger.step.sampled_rows": step.decode_tokens + sum(one.samples for one in chunks),
    }


def _microbatch_attributes(step: Step, chunks: list[Chunk], most: int) -> Attributes:
    """Return into how many parts a pipeline cut the step; nothing where a part's size is lost."""
    if any(one.pieces != 1 for one in chunks):
        return {}
    sizes = [1] * step.decode_tokens + [one.tokens for one in chunks]
    samples = [1] * step.decode_tokens + [one.samples for one in chunks]
    parts = runs_of(sizes, most)
    return {
        "perfledger.step.microbatches": len(parts),
        "perfledger.step.decode_microbatches": sum(a < step.decode_tokens for a, _ in parts),
        "perfledger.step.sampled_microbatches": _with_any(samples[a:b] for a, b in parts),
    }


def _with_any(parts: Iterable[list[int]]) -> int:
    return sum(any(part) for part in parts)
