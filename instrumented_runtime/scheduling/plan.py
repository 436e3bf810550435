"""What one step computes: sequences that decode, and chunks of prompts."""

from dataclasses import dataclass, field

from perfledger.instrumented_runtime.scheduling.sequences import Request, Sequence


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of a sequence, `[start, start + tokens)`, that a step computes.

    `samples` are the sequences that get a token from its last row: all choices of a request after
    its prompt, none of a request whose choices are resumed. `last` says that all its sequences
    decode from the next step on.
    """

    sequence: Sequence
    start: int
    tokens: int
    samples: tuple[Sequence, ...] = ()
    last: bool = False

    @property
    def recomputed(self) -> int:
        """How many of its tokens were computed before (and a preemption dropped them)."""
        return min(self.tokens, max(0, self.sequence.recompute_below - self.start))


@dataclass(slots=True)
class StepPlan:
    """What one step computes; `budget` is what is left of the tokens it may."""

    budget: int
    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    preempted: list[Request] = field(default_factory=list)
    context_tokens: int = 0  # that its decodes attended to, once it is computed

    def sampled(self) -> list[Sequence]:
        """Return the sequences that get a token, in the order of the batch's rows."""
        if not self.chunks:
            return self.decodes
        return self.decodes + [one for chunk in self.chunks for one in chunk.samples]

    def requests(self) -> list[Request]:
        """Return every request with a token in the step, once."""
        computed = self.decodes + [chunk.sequence for chunk in self.chunks]
        return list(dict.fromkeys(sequence.of for sequence in computed))
