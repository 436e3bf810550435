"""Generated text to train on, with a structure that a model learns in a few steps; and its loss."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

WORDS = 64  # different tokens that occur, at most


def batch_of(
    step: int, *, batch: int, sequence: int, vocab_size: int, seed: int
) -> tuple[Tensor, Tensor]:
    """Return (tokens, targets) of one step, each [batch, sequence]; targets are the next tokens.

    Few of the vocabulary's tokens occur, and each is followed by its successor nine times out of
    ten. The same step and seed give the same tokens on every rank.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    words = min(WORDS, vocab_size)
    starts = torch.randint(words, (batch, 1), generator=generator)
    jumps = torch.rand((batch, sequence + 1), generator=generator) < 0.1
    hops = torch.randint(words, (batch, sequence + 1), generator=generator)
    walk = (starts + torch.where(jumps, hops, torch.ones_like(hops)).cumsum(1)) % words
    tokens = walk * (vocab_size // words)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def next_token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of the next tokens, in nats."""
    return cross_entropy(logits.flatten(0, -2).float(), targets.flatten())
