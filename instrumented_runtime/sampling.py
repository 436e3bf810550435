"""From logits to tokens: greedy for a whole batch, or temperature and top-p with own seeds.

Each request draws its uniform numbers from its own generator and picks by inverse transform over
its own row, so a seed gives the same answer whoever else is in the batch (but for rounding: a
matrix product of another width may sum in another order).
"""

import torch
from torch import Tensor

from perfledger.instrumented_runtime.collectives.copies import recorded_copy
from perfledger.instrumented_runtime.scheduling.sequences import Sequence

# Tokens tried before a whole row is sorted for top-p: the nucleus seldom holds more.
_NUCLEUS_GUESS = 256


@torch.inference_mode()
def sample(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    """Return one token for each row of `logits` [rows, vocab_size]; draws from each random row."""
    tokens = greedy(logits)
    drawn = [row for row, one in enumerate(sequences) if one.sampling.temperature > 0]
    if drawn:
        chosen = _draw(
            recorded_copy(logits[drawn], dtype=torch.float32), [sequences[row] for row in drawn]
        )
        for row, token in zip(drawn, chosen, strict=True):
            tokens[row] = token
    return tokens


def greedy(logits: Tensor) -> list[int]:
    """Return the likeliest token of each row of `logits` [rows, vocab_size]."""
    if logits.device.type == "cpu":
        # numpy's argmax is vectorised, torch's is not: 20 times slower on 16 rows of 50,000.
        return list(recorded_copy(logits, dtype=torch.float32).numpy().argmax(-1).tolist())
    return list(recorded_copy(logits.argmax(dim=-1), device=torch.device("cpu")).tolist())


def _draw(logits: Tensor, sequences: list[Sequence]) -> list[int]:
    def column(values: list[float]) -> Tensor:
        return torch.tensor(values, device=logits.device).unsqueeze(1)

    temperature = column([max(one.sampling.temperature, 1e-6) for one in sequences])
    uniform = column([one.random.random() for one in sequences])
    top_p = column([one.sampling.top_p for one in sequences])
    # Subtracting the maximum first keeps a tiny temperature from overflowing.
    centred = logits - logits.amax(dim=-1, keepdim=True)
    probabilities = (centred / temperature).softmax(dim=-1)
    chosen = _invert(probabilities, uniform)
    nucleus = (top_p < 1).squeeze(1).nonzero().squeeze(1)
    if len(nucleus):
        chosen[nucleus] = _draw_nucleus(probabilities[nucleus], uniform[nucleus], top_p[nucleus])
    return chosen.tolist()


def _draw_nucleus(probabilities: Tensor, uniform: Tensor, top_p: Tensor) -> Tensor:
    """Draw from the smallest set of likeliest tokens whose probability reaches `top_p`.

    Definition: Holtzman et al. 2020, "The Curious Case of Neural Text Degeneration", section 3.1.
    """
    ranked, token = probabilities.topk(min(_NUCLEUS_GUESS, probabilities.shape[-1]), dim=-1)
    short = (ranked.sum(dim=-1, keepdim=True) < top_p).squeeze(1).nonzero().squeeze(1)
    chosen = _pick_in_nucleus(ranked, token, uniform, top_p)
    if len(short) and ranked.shape[-1] < probabilities.shape[-1]:
        ranked, token = probabilities[short].sort(dim=-1, descending=True)
        chosen[short] = _pick_in_nucleus(ranked, token, uniform[short], top_p[short])
    return chosen


def _pick_in_nucleus(ranked: Tensor, token: Tensor, uniform: Tensor, top_p: Tensor) -> Tensor:
    before = ranked.cumsum(dim=-1) - ranked
    kept = ranked * (before < top_p)
    return token.gather(1, _invert(kept, uniform).unsqueeze(1)).squeeze(1)


def _invert(weights: Tensor, uniform: Tensor) -> Tensor:
    """Return for each row the first index whose cumulated weight exceeds its share `uniform`."""
    cumulated = weights.cumsum(dim=-1)
    target = uniform * cumulated[:, -1:]
    index = torch.searchsorted(cumulated, target, right=True).squeeze(1)
    # Rounding may put the target on the very end; the last token with any weight is meant then.
    last = (cumulated < cumulated[:, -1:]).sum(dim=-1)
    return torch.minimum(index, last)
