"""Expert parallelism where one rank gets all rows: nothing breaks and nothing differs."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from spawned_ranks import run_ranks

from perfledger.instrumented_runtime.parallel.layout import Layout, RankPlace
from perfledger.instrumented_runtime.training.options import TrainOptions

ONE = TrainOptions(model_size="tiny-moe", steps=3, batch=8, sequence=16, learning_rate=1e-3)


def train(place: RankPlace, options: TrainOptions) -> Any:
    """Return (losses, bytes of all-to-all messages, whole parameters) of a model whose routers
    send every row to the first two of four experts."""
    from perfledger.instrumented_runtime.parallel.groups import join
    from perfledger.instrumented_runtime.training.sharding import whole_parameters
    from perfledger.instrumented_runtime.training.steps import Trainer

    peers = None if place.alone else join(place, torch.device("cpu"), 30)
    trainer = Trainer(options, place, peers, torch.device("cpu"))
    decoder = trainer.model.decoder
    with torch.no_grad():
        decoder.embed_tokens.weight[:, 0] = 10  # what the routers look at, positive everywhere
        for layer in decoder.layers.values():
            layer.mlp.router.weight.zero_()
            layer.mlp.router.weight[:, 0] = torch.tensor([5.0, 4.0, -4.0, -5.0])
    losses = [trainer.step(number)[0] for number in range(options.steps)]
    parameters = {name: v.numpy() for name, v in whole_parameters(trainer.model).items()}
    if peers is not None:
        peers.leave()
    return losses, parameters


def test_experts_without_a_row_train_as_in_one_process(tmp_path: Path) -> None:
    whole_losses, whole = train(RankPlace(Layout()), ONE)
    ranks = run_ranks(
        train, Layout(ep=2), tmp_path / "meet", replace(ONE, layout=Layout(ep=2)), timeout_s=120
    )
    assert all(isinstance(one, tuple) for one in ranks), ranks
    losses = [sum(pair) / 2 for pair in zip(*(losses for losses, _ in ranks), strict=True)]
    assert losses == pytest.approx(whole_losses, abs=2e-5)
    initial = train(RankPlace(Layout()), replace(ONE, steps=0))[1]
    for _, parameters in ranks:
        for name, value in parameters.items():
            assert value == pytest.approx(whole[name], abs=2e-3), name
            if name.endswith((".gate_up", ".down")):  # weights decay, and nothing else
                decayed = initial[name][2:] * (1 - 1e-3 * 1e-2) ** ONE.steps
                assert value[2:] == pytest.approx(decayed, abs=1e-6), name
                assert abs(value[:2] - initial[name][:2]).max() > 1e-3
