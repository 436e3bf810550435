"""What a rank does in the tests of the work model: compute steps, record them, count operators."""

import dataclasses
from pathlib import Path
from typing import Any

import torch
from known_steps import run_steps
from operator_counter import CountedModel, Counts
from torch import Tensor

from perfledger.instrumented_runtime.attention import StepRows
from perfledger.instrumented_runtime.checkpoints.config import read_config
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.parallel.following import follow, record_step
from perfledger.instrumented_runtime.parallel.groups import join
from perfledger.instrumented_runtime.parallel.layout import RankPlace
from perfledger.instrumented_runtime.parallel.leading import LeadingModel
from perfledger.instrumented_runtime.parallel.served_model import (
    Placement,
    load_model,
    make_cache,
)
from perfledger.instrumented_runtime.recorder import Recorder
from perfledger.instrumented_runtime.work_shape import rank_shapes

BLOCKS, BLOCK_SIZE, SWAP_BLOCKS = 24, 16, 8


# The text of a rank's shape, its records as (kind, fields), and what torch called in each step.
CountedRank = tuple[str, list[tuple[int, tuple[int, ...]]], list[Counts]]


def compute(place: RankPlace, folder: Path) -> CountedRank:
    """Compute all steps of known_steps with the other ranks."""
    device, options = torch.device("cpu"), RuntimeOptions(block_size=BLOCK_SIZE)
    peers, config = join(place, device), read_config(folder)
    placement = Placement(config, place, torch.float32, device, peers)
    model = CountedModel(load_model(folder, options, placement))
    cache = make_cache(placement, BLOCKS, BLOCK_SIZE, SWAP_BLOCKS)
    records: list[tuple[int, tuple[int, ...]]] = []
    recorder = Recorder(lambda kind, fields: records.append((kind, fields)))
    if place.rank:
        follow(model, cache, peers, recorder, None)
        peers.leave()
    else:
        leading: Any = LeadingModel(model, peers)
        leading.warmed_up(None)

        def forward(rows: StepRows) -> Tensor:
            asked = dataclasses.replace(rows, sampled=_last_rows(rows))
            logits: Tensor = leading.forward(asked, cache)
            record_step(recorder, len(model.steps), (1, 2, 3), asked, BLOCK_SIZE)
            return logits

        run_steps(forward, config.vocab_size, BLOCKS, BLOCK_SIZE)
        leading.end()
    return rank_shapes(placement, options)[place.rank], records, model.steps


def _last_rows(rows: StepRows) -> Tensor | None:
    """Return the rows that a served step samples; None for all of them."""
    decoding = 0 if rows.decode is None else rows.decode.count
    last = [*range(decoding), *(one.start + one.tokens - 1 for one in rows.chunks)]
    return None if len(last) == len(rows.tokens) else torch.tensor(last)
