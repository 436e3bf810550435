"""A pipeline stage under torch's 1F1B or GPipe schedule, its microbatches timed one by one."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from perfledger.instrumented_runtime.parallel.groups import Group
from perfledger.instrumented_runtime.training.model import Decoder
from perfledger.instrumented_runtime.training.options import TrainOptions
from perfledger.instrumented_runtime.training.parts import StepParts
from perfledger.instrumented_runtime.training.text import next_token_loss

SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class TimedStage(PipelineStage):
    """A stage that tells when each microbatch's forward and backward pass runs."""

    def __init__(self, parts: StepParts, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._parts = parts

    def forward_one_chunk(self, fwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        """See PipelineStage."""
        with self._parts.part("forward", fwd_chunk_id):
            return super().forward_one_chunk(fwd_chunk_id, *arguments, **named)

    def backward_one_chunk(self, bwd_chunk_id: int, *arguments: Any, **named: Any) -> Any:
        """See PipelineStage."""
        with self._parts.part("backward", bwd_chunk_id):
            return super().backward_one_chunk(bwd_chunk_id, *arguments, **named)


class PipelinePass:
    """Loss and gradients through all stages; each rank holds one."""

    def __init__(
        self,
        options: TrainOptions,
        decoder: Decoder,
        group: Group,
        parts: StepParts,
        device: torch.device,
    ) -> None:
        self._first, self._last = group.position == 0, group.position == group.size - 1
        shapes = _shapes(options, self._first, self._last, device)
        self._stage = TimedStage(
            parts, decoder, group.position, group.size, device, *shapes, group=group.handle
        )
        self._schedule = SCHEDULES[options.schedule](
            self._stage, options.pieces, loss_fn=next_token_loss
        )

    def run(self, tokens: Tensor, targets: Tensor) -> float | None:
        """Return the mean loss of the microbatches on the last stage; None on the others."""
        losses: list[Tensor] | None = [] if self._last else None
        self._schedule.step(
            *((tokens,) if self._first else ()),
            target=targets if self._last else None,
            losses=losses,
            return_outputs=False,
        )
        return float(torch.stack(losses).detach().mean()) if losses else None


def _shapes(
    options: TrainOptions, first: bool, last: bool, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return what a microbatch's input and output look like in a stage. Without them torch would
    find out by an additional pass, whose collectives are none of the training's."""
    rows = (options.batch // options.data_parallel // options.pieces, options.sequence)
    width = options.shape.vocab_size if last else options.shape.hidden_size
    tokens = torch.empty(rows, dtype=torch.int64, device=device)
    hidden = torch.empty(*rows, options.shape.hidden_size, device=device, requires_grad=True)
    return (
        tokens if first else hidden,
        torch.empty(*rows, width, device=device, requires_grad=True),
    )
