"""One request as the engine sees it, and its answers: tokens, places in the KV cache, waiting.

A request of n choices is one request with one sequence until its prompt is computed; from then on
it has n, which share the prompt's blocks. It is admitted, preempted and resumed as a whole.
"""

from dataclasses import dataclass, field
from random import Random

from perfledger.instrumented_runtime.messages import SamplingParams, Submit
from perfledger.instrumented_runtime.scheduling.fairness import Tenant


@dataclass(slots=True)
class KvAccount:
    """What a request cost the KV cache so far, in blocks and in tokens (of all its sequences)."""

    cached_tokens: int = 0  # of the prompt, found in the prefix cache at the first admission
    computed_tokens: int = 0  # for the first time; less those that gave a token (see Request)
    recomputed_tokens: int = 0  # again, after a preemption dropped them
    peak_blocks: int = 0  # held at their most, a shared one counted once
    evicted_blocks: int = 0  # cached prefixes that made room for it
    copied_blocks: int = 0  # on its first write to a shared block
    swapped_blocks: int = 0  # out and in
    swapped_in_last: int = 0  # at the last admission
    preemptions: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """A request from its submission to its last token. Times are monotonic ns."""

    number: int
    prompt_tokens: int
    sampling: SamplingParams
    max_tokens: int  # of each answer; sampling.max_tokens unless the engine had to cap it
    tenant: Tenant
    trace_id: int = 0
    span_id: int = 0
    priority: int = 0  # lower goes first
    deadline_ns: int | None = None
    arrival: int = 0  # counted up by the queue
    queue_start_ns: int = 0
    wait_reason: str = "admission"  # a records.WAIT_REASONS name
    delays_ns: dict[str, int] = field(default_factory=dict)  # planted faults, by stage
    held_until_ns: int = 0  # not admitted before (a planted delay in the queue)
    sequences: list["Sequence"] = field(default_factory=list)  # those that have not ended
    forked: bool = False  # its choices have begun
    decoding: bool = False  # all is computed: one token a sequence and step from now on
    admitted: bool = False  # was in the batch at least once
    tail_shared: bool = False  # its sequences share a block that the next step writes to
    host_tables: list[list[int]] = field(default_factory=list)  # while swapped out
    output_tokens: int = 0  # sampled so far, of all sequences
    degraded: int = 0  # a bit for each of degrading.STEPS that changed it
    account: KvAccount = field(default_factory=KvAccount)

    @property
    def decoded(self) -> bool:
        """Whether a step has decoded it, and another one will."""
        return self.decoding and self.sequences[0].output_tokens > 1

    @property
    def seats(self) -> int:
        """Places in the batch that it takes: one for each answer that has not ended."""
        return len(self.sequences) if self.forked else self.sampling.n

    @property
    def computed_tokens(self) -> int:
        """Tokens computed for the first time: each token sampled is from one, and others."""
        return self.account.computed_tokens + self.output_tokens

    @property
    def remaining(self) -> int:
        """Tokens to compute before all its sequences can decode."""
        return sum(sequence.remaining for sequence in self.sequences)


@dataclass(slots=True, eq=False)
class Sequence:
    """One answer of a request."""

    of: Request
    choice: int
    tokens: list[int]  # the prompt, then what was sampled
    random: Random  # its own source of uniform numbers, whatever else is in the batch
    blocks: list[int] = field(default_factory=list)  # its block table
    hashes: list[bytes] = field(default_factory=list)  # of its leading full blocks, as far as known
    stored: int = 0  # leading full blocks that the prefix cache was told of
    computed: int = 0  # leading tokens whose K and V are in the cache
    recompute_below: int = 0  # tokens below it were computed before a preemption dropped them

    @property
    def sampling(self) -> SamplingParams:
        """How its tokens are chosen."""
        return self.of.sampling

    @property
    def output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.of.prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens to compute before it can go on; several resumed together sample together."""
        return len(self.tokens) - self.computed - (1 if len(self.of.sequences) > 1 else 0)

    def finish_reason(self) -> str | None:
        """Return "stop" or "length" if the token sampled last ends the answer, else None."""
        request = self.of
        if self.tokens[-1] in request.sampling.stop_token_ids:
            return "stop"
        return "length" if len(self.tokens) - request.prompt_tokens >= request.max_tokens else None


def request_of(submit: Submit, tenant: Tenant | None = None) -> Request:
    """Return the waiting request of a message, with its first sequence."""
    sampling = submit.sampling
    request = Request(
        number=submit.request,
        prompt_tokens=len(submit.prompt),
        sampling=sampling,
        max_tokens=sampling.max_tokens,
        tenant=tenant or Tenant(submit.tenant),
        trace_id=submit.trace_id,
        span_id=submit.span_id,
        priority=submit.priority,
        deadline_ns=submit.deadline_ns,
        queue_start_ns=submit.sent_ns,
        delays_ns=dict(submit.delays_ns),
    )
    request.sequences.append(Sequence(request, 0, list(submit.prompt), _random(sampling, 0)))
    return request


def fork(request: Request) -> list[Sequence]:
    """Give a request its other choices, which have computed what the first has; return them.

    Their block tables are still empty.
    """
    first = request.sequences[0]
    for choice in range(1, request.sampling.n):
        request.sequences.append(
            Sequence(
                request,
                choice,
                list(first.tokens),
                _random(request.sampling, choice),
                hashes=list(first.hashes),
            )
        )
    request.forked = True
    return request.sequences[1:]


def _random(sampling: SamplingParams, choice: int) -> Random:
    """Return the source of a choice: seed + choice, or a random one without a seed."""
    if sampling.seed is None:
        return Random()
    return Random((sampling.seed + choice) % 2**64)  # Random(-1) would be Random(1)
