"""The pure parts of a training run: shares, stages, text, totals, tables."""

import io
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perfledger.instrumented_runtime.collectives.observed import NOT_OBSERVED, CollectiveCall
from perfledger.instrumented_runtime.parallel.layout import DIMENSIONS, Layout, RankPlace
from perfledger.instrumented_runtime.training.launcher import TrainRun
from perfledger.instrumented_runtime.training.messages import (
    Finished,
    HeldBytes,
    Joined,
    StepDone,
)
from perfledger.instrumented_runtime.training.model import build
from perfledger.instrumented_runtime.training.options import TrainOptions
from perfledger.instrumented_runtime.training.shapes import SHAPES
from perfledger.instrumented_runtime.training.sharding import layers_of_stage
from perfledger.instrumented_runtime.training.steps import share_of
from perfledger.instrumented_runtime.training.text import batch_of
from perfledger.instrumented_runtime.training.traffic import Part, Traffic, TrafficCount, summed
from perfledger.train_summary import as_json, print_start, print_summary, size, step_rows

TINY = TrainOptions(model_size="tiny", batch=8, sequence=16)


@given(st.integers(1, 40), st.integers(1, 40))
def test_stages_have_all_layers_once_and_differ_by_one(layers: int, stages: int) -> None:
    dealt = [layers_of_stage(layers, stages, stage) for stage in range(stages)]
    assert [layer for stage in dealt for layer in stage] == list(range(layers))
    assert max(map(len, dealt)) - min(map(len, dealt)) <= 1


@given(st.sampled_from(["dp", "fsdp", "ep", "cp"]), st.sampled_from([1, 2, 4]), st.integers(0, 9))
def test_shares_of_all_ranks_are_the_whole_step(dimension: str, ranks: int, step: int) -> None:
    options = replace(TINY, layout=Layout(**{dimension: ranks}))
    whole = batch_of(step, batch=8, sequence=16, vocab_size=256, seed=0)
    pairs: Counter[tuple[int, int]] = Counter()
    for rank in range(ranks):
        tokens, targets = share_of(step, options, RankPlace(options.layout, rank))
        assert tokens.numel() == 8 * 16 // ranks
        pairs.update(zip(tokens.flatten().tolist(), targets.flatten().tolist(), strict=True))
    assert pairs == Counter(zip(*(rows.flatten().tolist() for rows in whole), strict=True))


@given(st.integers(0, 2**31), st.integers(0, 1000), st.sampled_from(["tiny", "reference-small"]))
def test_text_is_the_same_everywhere_and_within_the_vocabulary(
    seed: int, step: int, name: str
) -> None:
    vocabulary = SHAPES[name].vocab_size
    tokens, targets = batch_of(step, batch=3, sequence=9, vocab_size=vocabulary, seed=seed)
    again, _ = batch_of(step, batch=3, sequence=9, vocab_size=vocabulary, seed=seed)
    assert torch.equal(tokens, again)
    assert torch.equal(tokens[:, 1:], targets[:, :-1])
    assert int(tokens.min()) >= 0 and int(tokens.max()) < vocabulary


def test_a_stage_has_the_weights_of_the_whole_model() -> None:
    shape = SHAPES["tiny"]
    whole = dict(build(shape, 3, range(2), first=True, last=True).named_parameters())
    second = dict(build(shape, 3, range(1, 2), first=False, last=True).named_parameters())
    assert set(second) == {n for n in whole if n.startswith(("layers.1.", "norm.", "lm_head."))}
    assert all(torch.equal(second[name], whole[name]) for name in second)
    other = dict(build(shape, 4, range(2), first=True, last=True).named_parameters())
    assert not torch.equal(other["lm_head.weight"], whole["lm_head.weight"])


TRAFFIC = st.builds(
    Traffic,
    st.sampled_from(DIMENSIONS),
    st.sampled_from(["all_reduce", "send"]),
    st.sampled_from(["forward", "backward"]),
    st.integers(1, 9),
    st.integers(0, 10**9),
    st.none() | st.integers(0, 10**9),
)


@given(st.lists(TRAFFIC), st.lists(TRAFFIC))
def test_totals_do_not_depend_on_the_order(one: list[Traffic], other: list[Traffic]) -> None:
    assert summed([*one, *other]) == summed([*summed(other), *summed(one)])
    assert sum(row.bytes for row in summed(one)) == sum(row.bytes for row in one)
    unknown = any(row.wire_bytes is None for row in one)
    assert any(row.wire_bytes is None for row in summed(one)) is unknown


def call(op: str, dimension: str, enqueue_ns: int, peer: int = NOT_OBSERVED) -> CollectiveCall:
    unknown = NOT_OBSERVED
    return CollectiveCall(
        op, dimension, dimension, (0, 1, 2), peer, "float32", 8, 8, 0, 0, enqueue_ns, unknown, 60
    )


def test_a_call_belongs_to_the_part_that_enqueued_it() -> None:
    """Also one that a thread of torch ends later, and a pipeline's, which lies between parts."""
    count = TrafficCount(rank=1)
    for one in (
        call("all_reduce", "dp", 15),
        call("all_reduce", "dp", 25),
        call("all_reduce", "dp", 99),
        call("send", "pp", 21, peer=2),
        call("recv", "pp", 21, peer=0),
        call("send", "pp", 21, peer=0),
        call("recv", "pp", 21, peer=2),
    ):
        count.collective(one)
    parts = [Part("forward", -1, 10, 20), Part("backward", -1, 20, 30)]
    assert count.take(parts) == (
        Traffic("dp", "all_reduce", "backward", 1, 8, 8),
        Traffic("dp", "all_reduce", "exchange", 1, 8, 8),
        Traffic("dp", "all_reduce", "forward", 1, 8, 8),
        Traffic("pp", "recv", "backward", 1, 8, 8),
        Traffic("pp", "recv", "forward", 1, 8, 8),
        Traffic("pp", "send", "backward", 1, 8, 8),
        Traffic("pp", "send", "forward", 1, 8, 8),
    )
    assert count.take(parts) == ()


@pytest.fixture
def run() -> TrainRun:
    """Two ranks that ended two steps, the first observed, and rank 0 a third."""
    run = TrainRun(replace(TINY, layout=Layout(fsdp=2), steps=3))
    held = HeldBytes(1000, 1000, 2000, 1_500_000, 0, 2_500_000_000)
    sent = (
        Traffic("fsdp", "all_gather", "forward", 3, 4000, 2000),
        Traffic("fsdp", "reduce_scatter", "backward", 3, 4000, 4000),
    )
    for rank in range(2):
        run.take(Joined(rank, 100 + rank, "cpu", "gloo", 17_488, 1))
        for number in range(2 if rank else 3):
            start_ns = number * 10_000_000 + rank * 1_000_000
            loss, traffic = 5.0 - number + rank, None if number else sent
            run.take(StepDone(rank, number, start_ns, start_ns + 4_000_000, loss, held, traffic))
    run.take(Finished(0, (Traffic("fsdp", "all_gather", "save", 3, 4000, 2000),)))
    return run


def test_tables_fit_80_columns(run: TrainRun) -> None:
    printed = io.StringIO()
    with redirect_stdout(printed):
        print_start(run)
        print_summary(run)
    assert (
        printed.getvalue()
        == """\
model    tiny: 2 layers, hidden size 32, 17,488 parameters on rank 0
layout   fsdp=2, 2 x cpu (gloo)
step    loss    time  tokens/s     sent
────  ──────  ──────  ────────  ───────
0     5.5000  5.0 ms    25,600  12.0 kB
1     4.5000  5.0 ms    25,600        –

what moved in step 0, all ranks together
operation                      calls   bytes  on the wire
─────────────────────────────  ─────  ──────  ───────────
fsdp all_gather, forward           6  8.0 kB       4.0 kB
fsdp reduce_scatter, backward      6  8.0 kB       8.0 kB

layouts that it changed
what                                                         bytes  on the wire
──────────────────────────────────────────────────────────  ──────  ───────────
fsdp parameters: shards → full copy                         8.0 kB       4.0 kB
fsdp gradients: of each rank's tokens → shards of the mean  8.0 kB       8.0 kB

what moved to save the whole model
operation              calls   bytes  on the wire
─────────────────────  ─────  ──────  ───────────
fsdp all_gather, save      3  4.0 kB       2.0 kB

layouts that it changed
what                                  bytes  on the wire
───────────────────────────────────  ──────  ───────────
fsdp parameters: shards → full copy  4.0 kB       2.0 kB

what each rank holds at the end of its last step
rank  parameters  gradients  optimizer  full copies  left  process
────  ──────────  ─────────  ─────────  ───────────  ────  ───────
0         1.0 kB     1.0 kB     2.0 kB       1.5 MB   0 B   2.5 GB
1         1.0 kB     1.0 kB     2.0 kB       1.5 MB   0 B   2.5 GB
"""
    )
    assert max(len(line) for line in printed.getvalue().splitlines()) <= 80


def test_a_step_is_as_long_as_its_slowest_rank_made_it(run: TrainRun) -> None:
    assert step_rows(run)[0] == {
        "step": 0,
        "loss": 5.5,
        "wall_ns": 5_000_000,
        "tokens": 128,
        "tokens_per_s": 25_600.0,
        "wire_bytes": 12_000,
    }
    assert step_rows(run)[1]["wire_bytes"] is None
    said = as_json(run)
    assert (said["observed_step"], said["world"], said["schedule"]) == (0, 2, None)


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (None, "–"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (999_960, "1.0 MB"),
        (2_500_000, "2.5 MB"),
        (7_000_000_000_000, "7000.0 GB"),
    ],
)
def test_sizes_have_units(count: int | None, text: str) -> None:
    assert size(count) == text
