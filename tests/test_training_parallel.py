"""Every parallelism computes what one process computes: losses, gradients, parameters."""

import traceback
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from spawned_ranks import run_ranks

from perfledger.instrumented_runtime.parallel.layout import Layout, RankPlace
from perfledger.instrumented_runtime.training.options import TrainOptions
from perfledger.instrumented_runtime.training.traffic import Traffic, TrafficCount
from perfledger.schema import communication

pytestmark = pytest.mark.timeout(600)  # the first test starts all processes

TINY = TrainOptions(model_size="tiny", steps=3, batch=8, sequence=16, seed=7, learning_rate=1e-2)
MOE = replace(TINY, model_size="tiny-moe")
# float32 sums in another order.
LOSS_TOLERANCE, PARAMETER_TOLERANCE = 2e-5, 2e-3


def train_all(place: RankPlace, cases: list[TrainOptions]) -> list[Any]:
    """Train each case in turn in this rank's process; return what `train` returns of each."""
    found: list[Any] = []
    for number, options in enumerate(cases):
        there = replace(place, layout=options.layout, rendezvous=f"{place.rendezvous}{number}")
        try:
            found.append(train(there, options))
        except Exception as error:
            traceback.print_exc()
            found.append(error)
    if place.layout.world == 2:
        for keep in (False, True):
            there = replace(place, layout=Layout(fsdp=2), rendezvous=f"{place.rendezvous}-{keep}")
            found.append(copies_left(there, keep))
    return found


def train(place: RankPlace, options: TrainOptions) -> Any:
    """Return (loss of each step, whole parameters, bytes held after each step, what the last
    step sent)."""
    from perfledger.instrumented_runtime.collectives.observing import observe_collectives
    from perfledger.instrumented_runtime.parallel.groups import join
    from perfledger.instrumented_runtime.training.sharding import whole_parameters
    from perfledger.instrumented_runtime.training.steps import Trainer

    device = torch.device("cpu")
    peers = None if place.alone else join(place, device, 30)
    trainer = Trainer(options, place, peers, device)
    done = [trainer.step(number) for number in range(options.steps - 1)]
    trainer.parts.take()
    traffic = TrafficCount(place.rank)
    with observe_collectives(traffic):
        done.append(trainer.step(options.steps - 1))
    sent = traffic.take(trainer.parts.take())
    parameters = {name: v.numpy() for name, v in whole_parameters(trainer.model).items()}
    if peers is not None:
        peers.leave()
    return [loss for loss, _ in done], parameters, [held for _, held in done], sent


def copies_left(place: RankPlace, keep: bool) -> int:
    """Return the bytes of full copies that an FSDP model holds after a forward pass."""
    from torch.distributed.fsdp import fully_shard

    from perfledger.instrumented_runtime.parallel.groups import join
    from perfledger.instrumented_runtime.training.memory import FullCopies
    from perfledger.instrumented_runtime.training.model import build, rotary

    peers = join(place, torch.device("cpu"), 30)
    decoder = build(TINY.shape, 0, range(TINY.shape.layers), first=True, last=True)
    decoder.cos, decoder.sin = rotary(TINY.shape, torch.arange(8))
    for module in (*decoder.layers.values(), decoder):
        fully_shard(module, mesh=peers.mesh["fsdp"], reshard_after_forward=not keep)
    copies = FullCopies(decoder)
    decoder(torch.zeros(2, 8, dtype=torch.int64))
    left = copies.take()[1]
    peers.leave()
    return left


def mean_losses(ranks: list[Any]) -> list[float]:
    """Return the loss of each step: the mean over the ranks that have one."""
    by_step = zip(*(losses for losses, *_ in ranks if losses[0] is not None), strict=True)
    return [sum(one) / len(one) for one in by_step]


def largest_difference(ranks: list[Any], whole: dict[str, Any]) -> float:
    """Return the largest difference of a parameter on any rank from the single process's."""
    seen: set[str] = set()
    worst = 0.0
    for _, parameters, *_ in ranks:
        for name, value in parameters.items():
            assert value.shape == whole[name].shape, name
            worst = max(worst, float(abs(value - whole[name]).max()))
            seen.add(name)
    assert seen == set(whole)
    return worst


CASES = {
    "dp": replace(TINY, layout=Layout(dp=2)),
    "fsdp": replace(TINY, layout=Layout(fsdp=2)),
    "tp": replace(TINY, layout=Layout(tp=2)),
    "pp": replace(TINY, layout=Layout(pp=2)),
    "pp-gpipe": replace(TINY, layout=Layout(pp=2), schedule="gpipe"),
    "cp": replace(TINY, layout=Layout(cp=2)),
    "ep": replace(MOE, layout=Layout(ep=2)),
}
PAIRS = {
    "tp-pp": replace(TINY, layout=Layout(tp=2, pp=2)),
    "fsdp-tp": replace(TINY, layout=Layout(fsdp=2, tp=2)),
    "dp-ep": replace(MOE, layout=Layout(dp=2, ep=2)),
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """What each rank found, by case. Processes are started once for all cases of two ranks, and
    once for those of four."""
    found: dict[str, list[Any]] = {}
    for cases, world in ((CASES, Layout(dp=2)), (PAIRS, Layout(dp=4))):
        meet = tmp_path_factory.mktemp("ranks") / "meet"
        ranks = run_ranks(train_all, world, meet, list(cases.values()), timeout_s=240)
        assert all(isinstance(one, list) for one in ranks), ranks
        names = [*cases, *(("freed", "kept") if world.world == 2 else ())]
        found |= {name: [rank[at] for rank in ranks] for at, name in enumerate(names)}
    return found


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    """What one process finds, by model."""
    return {one.model_size: train(RankPlace(Layout()), one) for one in (TINY, MOE)}


@pytest.mark.parametrize("name", [*CASES, *PAIRS])
def test_equal_to_one_process(
    name: str, trained: dict[str, list[Any]], alone: dict[str, Any]
) -> None:
    ranks, options = trained[name], (CASES | PAIRS)[name]
    assert all(isinstance(one, tuple) for one in ranks), ranks
    losses, whole, *_ = alone[options.model_size]
    assert mean_losses(ranks) == pytest.approx(losses, abs=LOSS_TOLERANCE)
    assert largest_difference(ranks, whole) < PARAMETER_TOLERANCE
    assert losses[-1] < losses[0] - 0.1


def sent(rank: Any, dimension: str, op: str, part: str) -> Traffic:
    """Return what a rank sent in one dimension by one operation in one part of its last step."""
    (row,) = [row for row in rank[3] if row[:3] == (dimension, op, part)]
    return row


def test_dp_all_reduces_the_gradients(trained: dict[str, list[Any]], alone: dict[str, Any]) -> None:
    for rank in trained["dp"]:
        assert len(rank[3]) == 1
        row = sent(rank, "dp", "all_reduce", "backward")
        assert row.bytes == elements(alone["tiny"]) * 4
        assert row.wire_bytes == communication.data_parallel_bytes(row.bytes, 2)


def test_fsdp_gathers_parameters_and_scatters_gradients(
    trained: dict[str, list[Any]], alone: dict[str, Any]
) -> None:
    """gloo has no reduce-scatter: an all-reduce of the whole input moves twice as much."""
    whole_bytes = elements(alone["tiny"]) * 4
    for rank in trained["fsdp"]:
        forward = sent(rank, "fsdp", "all_gather", "forward")
        backward = sent(rank, "fsdp", "all_gather", "backward")
        scatter = sent(rank, "fsdp", "reduce_scatter", "backward")
        assert len(rank[3]) == 3
        assert forward.bytes == backward.bytes == scatter.bytes == whole_bytes
        assert forward.calls == scatter.calls == 3  # two layers, and the rest
        on_nccl = communication.fsdp_bytes(whole_bytes, 2)
        assert total_wire(rank) == on_nccl + communication.data_parallel_bytes(whole_bytes, 2) / 2


def test_fsdp_frees_the_full_copies(trained: dict[str, list[Any]], alone: dict[str, Any]) -> None:
    whole_bytes = elements(alone["tiny"]) * 4
    for _, _, held, _ in trained["fsdp"]:
        for step in held:
            assert step.parameters == step.gradients == whole_bytes // 2
            assert whole_bytes / 2 < step.full_peak < whole_bytes
            assert step.full_left == 0


def test_full_copies_that_are_not_freed_show(
    trained: dict[str, list[Any]], alone: dict[str, Any]
) -> None:
    assert trained["freed"] == [0, 0]
    assert trained["kept"] == [elements(alone["tiny"]) * 4] * 2


def test_tp_all_reduces_each_half_of_a_layer_twice(trained: dict[str, list[Any]]) -> None:
    tokens, hidden, layers = 8 * 16, 32, 2
    for rank in trained["tp"]:
        for part in ("forward", "backward"):
            row = sent(rank, "tp", "all_reduce", part)
            assert (row.calls, row.bytes) == (2 * layers, 2 * layers * tokens * hidden * 4)
        expected = communication.tensor_parallel_bytes(tokens, hidden, 4, layers, 2, training=True)
        assert total_wire(rank) == expected


@pytest.mark.parametrize("name", ["pp", "pp-gpipe"])
def test_pp_sends_each_microbatch_forward_and_back(
    name: str, trained: dict[str, list[Any]]
) -> None:
    tokens, hidden, microbatches = 8 * 16, 32, 4
    first, last = trained[name]
    forward, backward = sent(first, "pp", "send", "forward"), sent(last, "pp", "send", "backward")
    assert forward.calls == backward.calls == microbatches
    assert forward.bytes + backward.bytes == communication.pipeline_bytes(
        tokens, hidden, 4, training=True
    )
    assert sent(last, "pp", "recv", "forward")[3:] == (microbatches, forward.bytes, 0)
    assert sent(first, "pp", "recv", "backward")[3:] == (microbatches, backward.bytes, 0)


def test_cp_passes_keys_and_values_round(
    trained: dict[str, list[Any]], alone: dict[str, Any]
) -> None:
    """Backward they go round again, and their gradients one hop more, to arrive at home."""
    ranks, rank_tokens = 2, 8 * 16 // 2
    ring = communication.ring_attention_bytes(rank_tokens, 2, 8, 4, layers=2, ranks=ranks)
    for rank in trained["cp"]:
        assert sent(rank, "cp", "send", "forward").bytes == ring
        assert sent(rank, "cp", "send", "backward").bytes == ring + ring * ranks // (ranks - 1)
        gradients = sent(rank, "cp", "all_reduce", "backward")
        assert gradients.bytes == elements(alone["tiny"]) * 4


def test_ep_sends_each_row_to_its_experts_and_back(
    trained: dict[str, list[Any]], alone: dict[str, Any]
) -> None:
    tokens, per_token, layers, hidden = 8 * 16, 2, 2, 32
    rows_bytes = communication.expert_parallel_bytes(tokens * per_token * layers, hidden, 4)
    for part in ("forward", "backward"):
        rows = [sent(rank, "ep", "all_to_all", part) for rank in trained["ep"]]
        assert [row.calls for row in rows] == [2 * layers] * 2
        assert sum(row.bytes for row in rows) == rows_bytes  # there and back, all ranks
        assert 0 < sum(row.wire_bytes or 0 for row in rows) < rows_bytes  # those that stay are less
    shared = elements(alone["tiny-moe"], lambda name: not is_expert(name)) * 4
    for rank in trained["ep"]:
        assert sent(rank, "ep", "all_reduce", "backward").bytes == shared


def test_tp_in_pipeline_stages(trained: dict[str, list[Any]]) -> None:
    tokens, hidden = 8 * 16, 32
    for rank in trained["tp-pp"]:
        for part in ("forward", "backward"):  # one layer a stage, four microbatches
            row = sent(rank, "tp", "all_reduce", part)
            assert (row.calls, row.bytes) == (2 * 4, 2 * tokens * hidden * 4)
    for rank in trained["tp-pp"][:2]:  # ranks of the first stage
        assert sent(rank, "pp", "send", "forward").bytes == tokens * hidden * 4


def test_fsdp_of_tensor_shards(trained: dict[str, list[Any]], alone: dict[str, Any]) -> None:
    split = elements(alone["tiny"], lambda name: "_proj" in name)
    held_bytes = (elements(alone["tiny"]) - split // 2) * 4
    for rank in trained["fsdp-tp"]:
        for op, part in (("all_gather", "forward"), ("reduce_scatter", "backward")):
            assert sent(rank, "fsdp", op, part).bytes == held_bytes
        row = sent(rank, "tp", "all_reduce", "forward")
        assert (row.calls, row.bytes) == (4, 4 * 4 * 16 * 32 * 4)  # half of the sequences
        assert rank[2][-1].parameters == held_bytes // 2
        assert rank[2][-1].full_left == 0


def test_dp_of_dealt_out_experts(trained: dict[str, list[Any]], alone: dict[str, Any]) -> None:
    dealt = elements(alone["tiny-moe"], is_expert) * 4
    shared = elements(alone["tiny-moe"]) * 4 - dealt
    for rank in trained["dp-ep"]:
        assert sent(rank, "dp", "all_reduce", "backward").bytes == dealt // 2
        row = sent(rank, "dp_ep", "all_reduce", "backward")
        assert (row.bytes, row.wire_bytes) == (
            shared,
            communication.data_parallel_bytes(shared, 4),
        )


def is_expert(name: str) -> bool:
    return name.endswith((".gate_up", ".down"))


def elements(one_process: Any, of: Callable[[str], bool] = lambda name: True) -> int:
    """Return the elements of the whole model's parameters, or of those that `of` names."""
    return sum(value.size for name, value in one_process[1].items() if of(name))


def total_wire(rank: Any) -> int:
    return sum(row.wire_bytes for row in rank[3])
