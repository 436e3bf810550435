"""Ring attention: a sequence over several ranks, keys and values travelling round.

Each rank keeps the queries of its tokens; keys and values of all go from rank to rank, and each
hop adds a part to the online softmax ("Ring Attention with Blockwise Transformers", Liu et al.
2023). Going backward, their gradients travel with them and arrive at home after a full round.

Causal masking leaves the ranks of a plain split with very unequal work. So the sequence is cut into
2n pieces, and rank r of n holds pieces r and 2n - 1 - r ("zigzag"): one early, one late, and each
hop costs every rank two pieces against two.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from perfledger.instrumented_runtime.collectives import calls
from perfledger.instrumented_runtime.parallel.groups import Group
from perfledger.instrumented_runtime.parallel.partial_attention import add_part, attend_part
from perfledger.schema.errors import UsageError


def zigzag_positions(tokens: int, ranks: int, rank: int) -> Tensor:
    """Return the positions of the tokens that a rank holds, [tokens / ranks], in its order.

    Raises UsageError if the sequence does not divide into 2 * ranks equal pieces.
    """
    if tokens % (2 * ranks):
        raise UsageError(
            f"{tokens} tokens do not divide into {2 * ranks} pieces for {ranks} ranks (cp)"
        )
    pieces = torch.arange(tokens).view(2 * ranks, -1)
    return torch.cat((pieces[rank], pieces[2 * ranks - 1 - rank]))


def ring_attention(query: Tensor, key: Tensor, value: Tensor, group: Group) -> Tensor:
    """Return causal attention over the whole sequence, for this rank's tokens.

    `query` is [batch, heads, tokens, head_dim], `key` and `value` [batch, kv_heads, tokens,
    head_dim]: the tokens of `zigzag_positions`, keys rotated by their positions. Every rank of the
    group calls it together, going backward too. Softmax and sums are in float32.
    """
    result: Tensor = _RingAttention.apply(query, key, value, group)  # type: ignore[no-untyped-call]
    return result


class Passing:
    """A tensor on its way to the next rank of the ring, while that of the rank before comes."""

    def __init__(self, tensor: Tensor, group: Group) -> None:
        following = group.ranks[(group.position + 1) % group.size]
        before = group.ranks[(group.position - 1) % group.size]
        self._sent, self._received = tensor, torch.empty_like(tensor)
        self._exchange = calls.start_sendrecv(tensor, following, self._received, before, group)

    def wait(self) -> Tensor:
        """Return what the rank before sent, when it and what was sent have arrived."""
        self._exchange.wait()
        return self._received


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, query: Tensor, key: Tensor, value: Tensor, group: Group) -> Tensor:
        grouped = _by_kv_head(query, key)
        output = torch.zeros_like(grouped, dtype=torch.float32)
        log_sum = output.new_full((*output.shape[:-1], 1), -torch.inf)
        held = torch.stack((key, value))
        for hop in range(group.size):
            passing = Passing(held, group) if hop + 1 < group.size else None
            keys, values = held.unsqueeze(3).unbind(0)  # shared by the heads of a group
            for mine, theirs, mask in _visible(hop, group, held):
                part = attend_part(
                    grouped[..., mine, :], keys[..., theirs, :], values[..., theirs, :], mask
                )
                add_part(output[..., mine, :], log_sum[..., mine, :], *part)
            held = held if passing is None else passing.wait()
        context.save_for_backward(query, key, value, output, log_sum)
        context.group = group
        return output.flatten(1, 2).to(query.dtype)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        query, key, value, output, log_sum = context.saved_tensors
        group: Group = context.group
        grouped, gradient = _by_kv_head(query, key).float(), _by_kv_head(gradients[0], key).float()
        # The softmax's backward needs, of each row, the gradient's share in its own output.
        shares = (gradient * output).sum(-1, keepdim=True)
        query_gradient = torch.zeros_like(grouped)
        held = torch.stack((key, value))
        held_gradient = torch.zeros_like(held, dtype=torch.float32)
        for hop in range(group.size):
            passing = Passing(held, group) if hop + 1 < group.size else None
            keys, values = held.float().unsqueeze(3).unbind(0)
            for mine, theirs, mask in _visible(hop, group, held):
                of_query, of_key, of_value = _part_backward(
                    grouped[..., mine, :],
                    gradient[..., mine, :],
                    log_sum[..., mine, :],
                    shares[..., mine, :],
                    keys[..., theirs, :],
                    values[..., theirs, :],
                    mask,
                )
                query_gradient[..., mine, :] += of_query
                held_gradient[0, ..., theirs, :] += of_key
                held_gradient[1, ..., theirs, :] += of_value
            held = held if passing is None else passing.wait()
            held_gradient = Passing(held_gradient, group).wait()
        of_key, of_value = held_gradient.unbind(0)
        return (
            query_gradient.flatten(1, 2).to(query.dtype),
            of_key.to(key.dtype),
            of_value.to(value.dtype),
            None,
        )


def _by_kv_head(query: Tensor, key: Tensor) -> Tensor:
    """Return [batch, kv_heads, heads of each, tokens, head_dim]."""
    return query.view(len(query), key.shape[1], -1, *query.shape[2:])


def _visible(hop: int, group: Group, held: Tensor) -> Iterator[tuple[slice, slice, Tensor | None]]:
    """Yield (own rows, held rows, mask) of each pair of pieces in which rows see keys.

    A piece sees all of an earlier one, the lower triangle of itself, and nothing of a later one.
    """
    length, last = held.shape[-2] // 2, 2 * group.size - 1
    owner = (group.position - hop) % group.size
    for mine, piece in enumerate((group.position, last - group.position)):
        for theirs, other in enumerate((owner, last - owner)):
            if other <= piece:
                mask = held.new_ones(length, length, dtype=torch.bool).tril()
                rows = slice(mine * length, (mine + 1) * length)
                keys = slice(theirs * length, (theirs + 1) * length)
                yield rows, keys, mask if other == piece else None


def _part_backward(
    query: Tensor,
    gradient: Tensor,
    log_sum: Tensor,
    shares: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients that one part gives to query, key and value.

    As in "FlashAttention" (Dao et al. 2022), appendix B: weights are computed again from the
    log-sum-exp over all keys.
    """
    scale = query.shape[-1] ** -0.5
    weights = ((query @ key.transpose(-1, -2)) * scale - log_sum).exp()
    if mask is not None:
        weights = weights.masked_fill(~mask, 0.0)
    of_scores = weights * (gradient @ value.transpose(-1, -2) - shares) * scale
    of_value = (weights.transpose(-1, -2) @ gradient).sum(2)  # over the heads of a group
    of_key = (of_scores.transpose(-1, -2) @ query).sum(2)
    return of_scores @ key, of_key, of_value
