"""Pipeline parallelism: each rank computes some layers, and rows pass from stage to stage.

A step is cut between its sequences into microbatches, so that a stage computes one while the next
stage computes the one before it ("GPipe", Huang et al. 2019, without a backward pass). The last
stage computes the logits of sampled rows and sends them to the first.
"""

import torch
from torch import Tensor

from perfledger.instrumented_runtime.attention import (
    ChunkRows,
    DecodeRows,
    PagedKvCache,
    StepRows,
)
from perfledger.instrumented_runtime.collectives import calls
from perfledger.instrumented_runtime.collectives.copies import Crossing
from perfledger.instrumented_runtime.model import Decoder
from perfledger.instrumented_runtime.parallel.groups import Group
from perfledger.instrumented_runtime.parallel.splits import runs_of


class PipelineStage:
    """A decoder over the ranks of a pp group, each of which holds some layers."""

    def __init__(
        self, decoder: Decoder, group: Group, microbatches: int, *, answers: bool = True
    ) -> None:
        """`microbatches` is how many a step is cut into at most; 0 takes one a stage. With
        `answers` the logits go back to the first stage: where it has several ranks, one of them
        is enough."""
        self._decoder, self._group = decoder, group
        self._microbatches = microbatches or group.size
        self._answers = answers
        self.config, self.dtype, self.device = decoder.config, decoder.dtype, decoder.device
        self.parameters, self.routing = decoder.parameters, decoder.routing
        self.weights_bytes = decoder.weights_bytes

    @torch.inference_mode()
    def forward(self, rows: StepRows, cache: PagedKvCache) -> Tensor:
        """Compute one step with the other stages; return the logits of the sampled rows.

        Only the first stage gets them: the others return none, [0, vocab_size].
        """
        if rows.moves is not None:
            cache.apply(rows.moves)
        pieces = split_rows(rows, self._microbatches)
        group, sending = self._group, []
        first, last = group.position == 0, group.position == group.size - 1
        for piece in pieces:
            hidden = self._decoder.hidden(piece, cache, None if first else self._receive(piece))
            if not last:
                sending.append(calls.start_send(hidden, group.ranks[group.position + 1], group))
                continue
            if piece.sampled is not None:
                hidden = hidden.index_select(0, piece.sampled)
            if len(hidden):
                logits = self._decoder.logits(hidden)  # of every rank: the head may be split too
                if self._answers:
                    sending.append(calls.start_send(logits, group.ranks[0], group))
        logits = self._collect(pieces) if first and self._answers else self._logits(0)
        for one in sending:
            one.wait()
        return logits

    def _receive(self, piece: StepRows) -> Tensor:
        shape = (len(piece.tokens), self.config.hidden_size)
        hidden = torch.empty(shape, dtype=self.dtype, device=self.device)
        with self._crossing(hidden, self._group.position - 1):
            calls.recv(hidden, self._group.ranks[self._group.position - 1], self._group)
        return hidden

    def _crossing(self, tensor: Tensor, source: int) -> Crossing:
        """Return what tells of a tensor that comes here from another stage."""
        stages = (f"pp={source}", f"pp={self._group.position}")
        size = tensor.numel() * tensor.element_size()
        return Crossing("stage", *stages, tensor.dtype, size, tensor.device.type)

    def _collect(self, pieces: list[StepRows]) -> Tensor:
        """Return the logits of all pieces, which come in their order."""
        counts = [len(one.tokens if one.sampled is None else one.sampled) for one in pieces]
        logits = self._logits(sum(counts))
        start = 0
        for count in counts:
            if count:
                part = logits[start : start + count]
                with self._crossing(part, self._group.size - 1):
                    calls.recv(part, self._group.ranks[-1], self._group)
            start += count
        return logits

    def _logits(self, rows: int) -> Tensor:
        shape = (rows, self.config.vocab_size)
        return torch.empty(shape, dtype=self.dtype, device=self.device)


def split_rows(rows: StepRows, pieces: int) -> list[StepRows]:
    """Cut a step between sequences into at most `pieces` parts of about as many rows each.

    Their order is that of the rows: a later part may read what an earlier one stores. Moves are
    in none of them.
    """
    decoding = rows.decode.count if rows.decode is not None else 0
    bounds = runs_of([1] * decoding + [one.tokens for one in rows.chunks], pieces)
    sampled = None if rows.sampled is None else rows.sampled.cpu()
    return [_part(rows, sampled, decoding, start, end) for start, end in bounds]


def _part(rows: StepRows, sampled: Tensor | None, decoding: int, start: int, end: int) -> StepRows:
    """Return sequences `[start, end)` of a step, those that decode counted first."""
    chunks = rows.chunks[max(0, start - decoding) : max(0, end - decoding)]
    decode = None
    first = min(start, decoding)
    if start < decoding:
        assert rows.decode is not None
        end_decoding = min(end, decoding)
        blocks = len(rows.decode.table) // decoding
        decode = DecodeRows(
            end_decoding - start,
            rows.decode.table[start * blocks : end_decoding * blocks],
            rows.decode.mask[start:end_decoding],
        )
    else:
        first = chunks[0].start
    last = chunks[-1].start + chunks[-1].tokens if chunks else min(end, decoding)
    own = slice(first, last)
    if sampled is not None:
        sampled = sampled[(sampled >= first) & (sampled < last)] - first
    return StepRows(
        tokens=rows.tokens[own],
        positions=rows.positions[own],
        slots=rows.slots[own],
        decode=decode,
        chunks=tuple(
            ChunkRows(one.start - first, one.tokens, one.context, one.table, one.mask)
            for one in chunks
        ),
        sampled=None if sampled is None else sampled.to(rows.tokens.device),
    )
