"""Rank 0 leads: its model tells the other ranks of every step, and they compute it with it."""

import contextlib

from torch import Tensor

from perfledger.instrumented_runtime.attention import PagedKvCache, StepRows
from perfledger.instrumented_runtime.collectives.recording import RingSink
from perfledger.instrumented_runtime.parallel.groups import Peers
from perfledger.instrumented_runtime.parallel.layout import name_of
from perfledger.instrumented_runtime.parallel.served_model import StepModel
from perfledger.instrumented_runtime.parallel.step_messages import (
    STEP,
    WARM_UP,
    StepMessages,
)
from perfledger.schema.errors import PerfledgerError


class LeadingModel:
    """Rank 0's part of a model, as its engine sees it: a model like any other."""

    def __init__(self, part: StepModel, peers: Peers) -> None:
        self._part, self._peers = part, peers
        self._messages = StepMessages(peers, part.device)
        self._kind, self._seq = WARM_UP, 0
        self._sink: RingSink | None = None
        self.config, self.dtype, self.device = part.config, part.dtype, part.device
        self.parameters, self.routing = part.parameters, part.routing
        self.weights_bytes = part.weights_bytes

    def forward(self, rows: StepRows, cache: PagedKvCache) -> Tensor:
        """Compute one step with all ranks. Raises PerfledgerError with the rank that is gone."""
        self._seq += 1
        if self._sink is not None:
            self._sink.step_seq = self._seq
        try:
            with self._peers.named():
                self._messages.send(self._kind, self._seq, rows)
                return self._part.forward(rows, cache)
        except (RuntimeError, MemoryError) as error:
            # The others wait in the middle of the step: it can be neither ended nor left.
            raise PerfledgerError(
                f"{name_of(self._peers.place)} failed in a step: {error}"
            ) from error

    def warmed_up(self, sink: RingSink | None) -> None:
        """From now on steps count, from 1, and the sink is told which one runs."""
        self._kind, self._seq, self._sink = STEP, 0, sink

    def end(self) -> None:
        """Let the other ranks end, and leave them."""
        with contextlib.suppress(RuntimeError):  # they may be gone
            self._messages.send_end()
        self._peers.leave()
