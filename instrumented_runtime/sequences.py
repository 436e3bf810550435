"""One request as the engine sees it: its tokens, its place in the KV cache and its waiting."""

from dataclasses import dataclass, field
from random import Random

from perfledger.instrumented_runtime.messages import SamplingParams, Submit


@dataclass(slots=True, eq=False)
class Sequence:
    """A request from its submission to its last token. Times are monotonic ns."""

    request: int
    tokens: list[int]  # the prompt, then what was sampled
    prompt_tokens: int
    sampling: SamplingParams
    random: Random  # its own source of uniform numbers, whatever else is in the batch
    trace_id: int = 0
    span_id: int = 0
    queue_start_ns: int = 0
    wait_reason: str = "admission"  # a records.WAIT_REASONS name
    delays_ns: dict[str, int] = field(default_factory=dict)  # planted faults, by stage
    held_until_ns: int = 0  # not admitted before (a planted delay in the queue)
    blocks: list[int] = field(default_factory=list)  # its block table
    computed: int = 0  # leading tokens whose K and V are in the cache
    recompute_below: int = 0  # tokens below it were computed before a preemption dropped them
    decoding: bool = False  # its prompt is computed: one token a step from now on
    admitted: bool = False  # was in the batch at least once

    @property
    def decoded(self) -> bool:
        """Whether a step has decoded it, and another one will."""
        return self.decoding and self.output_tokens > 1

    @property
    def output_tokens(self) -> int:
        """Tokens sampled so far."""
        return len(self.tokens) - self.prompt_tokens

    @property
    def remaining(self) -> int:
        """Tokens to compute before the next one can be sampled."""
        return len(self.tokens) - self.computed

    def finish_reason(self) -> str | None:
        """Return "stop" or "length" if the token sampled last ends the answer, else None."""
        if self.tokens[-1] in self.sampling.stop_token_ids:
            return "stop"
        return "length" if self.output_tokens >= self.sampling.max_tokens else None


def sequence_of(submit: Submit) -> Sequence:
    """Return the waiting sequence of a new request; without a seed, a random one is drawn."""
    return Sequence(
        request=submit.request,
        tokens=list(submit.prompt),
        prompt_tokens=len(submit.prompt),
        sampling=submit.sampling,
        random=Random(submit.sampling.seed),
        trace_id=submit.trace_id,
        span_id=submit.span_id,
        queue_start_ns=submit.sent_ns,
        delays_ns=dict(submit.delays_ns),
    )
