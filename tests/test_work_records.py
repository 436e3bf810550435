"""What records tell of a step's rows, as attributes of its span: whole, or not at all."""

from random import Random
from typing import Any

from perfledger.instrumented_runtime.record_spans import RecordSpans
from perfledger.instrumented_runtime.records import NOT_READ, Chunk, Kv, NoMemory, Record, Step
from perfledger.instrumented_runtime.ring import Gap
from perfledger.instrumented_runtime.telemetry import EngineRecord
from perfledger.instrumented_runtime.work_records import chunk_sums, pack_decodes
from perfledger.schema import metrics
from perfledger.schema.model_shape import ModelShape

PIPELINE = ModelShape(2, 32, 4, 2, 8, 48, 4, 4, 1000, microbatches=2)
BLOCK = 4


def chunk(request: int, seq: int, *pieces: tuple[int, int], samples: int = 0) -> Chunk:
    tokens = sum(tokens for _, tokens in pieces)
    return Chunk(request, seq, tokens, 0, samples, 1, samples, *chunk_sums(pieces, BLOCK))


def step(seq: int, prefill: int, decode: int, decodes: int = 0) -> Step:
    at = (100 * seq, 100 * seq + 1, 100 * seq + 80, 100 * seq + 90, 100 * seq + 99)
    return Step(seq, *at, decode + 1, prefill, decode, 0, 1, 9, 5, decodes)


def told(*records: Record | Gap | EngineRecord, rank: int = 0) -> list[dict[str, Any]]:
    """Return what each step says of its rows."""
    spans = RecordSpans(Random(1), rank=rank)
    made = [span for record in records for span in spans.feed(record)]
    names = (
        "decode_context",
        "decode_gathered",
        "chunk",
        "continued_",
        "sampled_",
        "microbatches",
        "decode_micro",
    )
    return [
        {
            short: value
            for key, value in span.attributes.items()
            if (short := key.removeprefix("perfledger.step.")).startswith(names)
        }
        for span in made
        if span.name.endswith("_step")
    ]


def test_sums_of_pieces() -> None:
    assert chunk_sums([(0, 5)], BLOCK) == (1, 0, 5, 25, 0, 0)
    assert chunk_sums([(6, 3)], BLOCK) == (1, 1, 9, 27, 27, 3)
    assert chunk_sums([(0, 5), (6, 3)], BLOCK) == (2, 1, 14, 52, 27, 3)


def test_a_step_tells_of_its_decodes_and_its_chunks() -> None:
    assert told(
        chunk(1, 1, (0, 5), samples=1),
        step(1, 5, 0),
        step(2, 0, 2, pack_decodes(17, 6)),
        chunk(2, 3, (4, 4)),
        chunk(3, 3, (0, 2), (3, 1), samples=2),
        step(3, 7, 2, pack_decodes(1 << 30, 1 << 30)),
    ) == [
        {
            "chunks": 1,
            "continued_chunks": 0,
            "chunk_key_tokens": 5,
            "chunk_pairs": 25,
            "continued_pairs": 0,
            "chunk_gathered_blocks": 0,
            "sampled_rows": 1,
        },
        {"decode_context_tokens": 17, "decode_gathered_blocks": 6},
        {
            "decode_context_tokens": 1 << 30,
            "decode_gathered_blocks": 1 << 30,
            "chunks": 3,
            "continued_chunks": 2,
            "chunk_key_tokens": 8 + 2 + 4,
            "chunk_pairs": 32 + 4 + 4,
            "continued_pairs": 32 + 4,
            "chunk_gathered_blocks": 2 + 1,
            "sampled_rows": 4,
        },
    ]


def test_nothing_is_told_of_a_step_that_lost_records() -> None:
    whole = step(5, 0, 2, pack_decodes(17, 6))
    assert told(Gap(1), step(1, 0, 1, pack_decodes(9, 3))) == [{}]  # a KV record may be missing
    assert told(step(4, 0, 1, pack_decodes(9, 3)), Gap(1), whole)[1] == {}
    assert told(Gap(1), step(4, 0, 1, pack_decodes(9, 3)), whole)[1] != {}
    assert told(chunk(1, 2, (0, 5)), step(2, 9, 0)) == [{}]  # of another request's chunk
    old = Chunk(1, 2, 5, 0, 0, 1, 0)
    assert told(old, step(2, 5, 0), step(3, 0, 1, NOT_READ)) == [{}, {}]


def test_a_failed_step_leaves_no_chunk_behind() -> None:
    failed = NoMemory(1, 1, 150, 1, NOT_READ, 1, 9, 1)
    (after,) = told(chunk(1, 1, (0, 5)), failed, chunk(2, 2, (0, 3), samples=1), step(2, 3, 0))
    assert (after["chunks"], after["chunk_pairs"]) == (1, 9)


def test_a_pipeline_tells_into_how_many_parts_it_cut_a_step() -> None:
    ready = EngineRecord({"perfledger.model.shape": str(PIPELINE)})
    parts = [
        tuple(one.get(f"{kind}microbatches") for kind in ("", "decode_", "sampled_"))
        for one in told(
            ready,
            step(1, 0, 1, pack_decodes(9, 3)),
            step(2, 0, 3, pack_decodes(9, 3)),
            chunk(1, 3, (0, 8)),
            chunk(2, 3, (0, 8)),
            step(3, 16, 0),
            chunk(1, 4, (8, 4)),
            step(4, 4, 4, pack_decodes(9, 3)),
            chunk(1, 5, (8, 1), (9, 1)),  # of two sequences, whose sizes are not told
            step(5, 2, 0),
        )
    ]
    assert parts == [(1, 1, 1), (2, 2, 2), (2, 0, 0), (2, 1, 1), (None,) * 3]


def test_a_rank_that_follows_counts_nothing_twice() -> None:
    spans = RecordSpans(Random(1), rank=1)
    for record in (chunk(NOT_READ, 1, (0, 5), samples=1), Kv(1, 0, 0, 2, 0, 0), step(1, 5, 0)):
        made = spans.feed(record)
    assert made[0].attributes["perfledger.step.kv_copied"] == 2
    assert made[0].attributes["perfledger.step.chunk_pairs"] == 25
    assert {metric for metric, _ in spans.counts} == {
        metrics.STEPS,
        metrics.ENGINE_CPU,
        metrics.TOKENS,
    }
