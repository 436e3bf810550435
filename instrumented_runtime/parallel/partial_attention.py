"""Attention over a part of the keys, and how the parts become one: by log-sum-exp.

Softmax over all keys is the mean of the softmaxes over the parts, each weighed by the exponentials
it summed. "Online normalizer calculation for softmax" (Milakov and Gimelshein 2018).
"""

import torch
from torch import Tensor

LOWEST = torch.finfo(torch.float32).min  # instead of -inf, where -inf - -inf would be no number


def attend_part(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the attention over these keys and its log-sum-exp, in float32.

    `query` is [..., rows, head_dim], `key` and `value` [..., keys, head_dim] and `mask`
    [rows, keys] or [..., rows, keys], True where a row may look; what returns is
    [..., rows, head_dim] and [..., rows, 1]. A row that sees no key gets zeros and -inf.
    """
    scores = (query.float() @ key.float().transpose(-1, -2)) * query.shape[-1] ** -0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf)
    log_sum = scores.logsumexp(-1, keepdim=True)
    weights = (scores - log_sum.clamp(min=LOWEST)).exp()
    return weights @ value.float(), log_sum


def merge_parts(outputs: Tensor, log_sums: Tensor) -> Tensor:
    """Return the attention over all keys, from `attend_part` of each part: [parts, ...]."""
    total = log_sums.logsumexp(0).clamp(min=LOWEST)
    return (outputs * (log_sums - total).exp()).sum(0)


def add_part(output: Tensor, log_sum: Tensor, part: Tensor, part_log_sum: Tensor) -> None:
    """Take one more part into `output` and `log_sum`, in place; start with zeros and -inf."""
    total = torch.logaddexp(log_sum, part_log_sum)
    finite = total.clamp(min=LOWEST)
    output.mul_((log_sum - finite).exp()).add_(part * (part_log_sum - finite).exp())
    log_sum.copy_(total)
