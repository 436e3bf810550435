"""Who is let in, and who is turned away: what never fits, deadlines, degrading.

Each refusal is a Failed message with the numbers it was decided by.
"""

from perfledger.instrumented_runtime.messages import Failed, Submit
from perfledger.instrumented_runtime.scheduling.admission import Ahead, Rates, why_too_late
from perfledger.instrumented_runtime.scheduling.degrading import (
    CAPPED_TOKENS,
    Change,
    Degrading,
    bit,
)
from perfledger.instrumented_runtime.scheduling.limits import never_fits
from perfledger.instrumented_runtime.scheduling.plan import StepPlan
from perfledger.instrumented_runtime.scheduling.scheduler import Scheduler
from perfledger.instrumented_runtime.scheduling.sequences import Request, request_of

NS_PER_S = 1_000_000_000
# Said to those who are shed: the policy looks at the load of now, and cannot know.
RETRY_AFTER_S = 1


class Gate:
    """The way into one scheduler's queue; it knows how fast the engine has been."""

    def __init__(self, scheduler: Scheduler, vocab_size: int) -> None:
        self.degrading = Degrading(scheduler.limits.degrade)
        self.rates = Rates()
        self._scheduler, self._vocab_size = scheduler, vocab_size

    def judge(self, submit: Submit, now_ns: int) -> Request | Failed:
        """Return the request to queue, or why it is refused."""
        sampling, limits = submit.sampling, self._scheduler.limits
        why = never_fits(len(submit.prompt), sampling.max_tokens, limits, sampling.n)
        if why is None and not 0 <= min(submit.prompt) <= max(submit.prompt) < self._vocab_size:
            why = f"the prompt holds a token outside the vocabulary of {self._vocab_size}"
        if why is not None:
            return Failed(submit.request, "error", why)
        request = request_of(submit, self._scheduler.tenants.named(submit.tenant))
        return self._degraded(request) or self._late(request, now_ns) or request

    def turn_away(self, now_ns: int) -> list[Failed]:
        """Take the waiting requests out of the queue whose deadline came, or that are shed."""
        failed = []
        for request in self._scheduler.expired(now_ns):
            waited_ms = (now_ns - request.queue_start_ns) // 1_000_000
            why = f"the deadline came after {waited_ms} ms in the queue ({request.wait_reason})"
            failed.append(Failed(request.number, "deadline", why))
        if "shed-low-priority" in self.degrading.on:
            for request in list(self._scheduler.waiting):
                if request.priority > 0 and not request.admitted:
                    self._scheduler.remove(request)
                    failed.append(self._shed(request))
        return failed

    def degrade(self) -> list[Change]:
        """Look at the load of now; return what went on or off."""
        if not self._scheduler.limits.degrade:
            return []
        return self.degrading.update(self._scheduler.pressure())

    def observe(self, plan: StepPlan, step_ns: int, ended: int, waiting: int) -> None:
        """Count a step that was computed, after which `ended` seats became free."""
        tokens = sum([chunk.tokens for chunk in plan.chunks])
        self.rates.observe(step_ns, tokens, ended, waiting > 0)

    def mark_shrunk(self, plan: StepPlan) -> None:
        """Note on the requests that smaller chunks were planned for them."""
        if "shrink-chunk" in self.degrading.on:
            for chunk in plan.chunks:
                if not chunk.last:
                    chunk.sequence.of.degraded |= bit("shrink-chunk")

    def degraded_text(self, request: Request) -> str:
        """Return what degrading changed in a request's answer, "" for nothing."""
        if request.degraded & bit("cap-max-tokens"):
            return f"cap_max_tokens={request.max_tokens}"
        return ""

    def _degraded(self, request: Request) -> Failed | None:
        """Refuse or change a new request by the steps that are on."""
        if not self.degrading.on:
            return None
        if "shed-low-priority" in self.degrading.on and request.priority > 0:
            return self._shed(request)
        if "refuse-n" in self.degrading.on and request.sampling.n > 1:
            why = f"n is {request.sampling.n}: under load only one answer is given (refuse-n)"
            return Failed(request.number, "degraded", why, RETRY_AFTER_S)
        if "cap-max-tokens" in self.degrading.on and request.max_tokens > CAPPED_TOKENS:
            request.max_tokens = CAPPED_TOKENS
            request.degraded |= bit("cap-max-tokens")
        return None

    def _shed(self, request: Request) -> Failed:
        pressure = self._scheduler.pressure()
        why = (
            f"priority {request.priority} is shed under load (shed-low-priority): seats or KV"
            f" blocks wanted are {pressure / 1000:.2f} times those there are"
        )
        return Failed(request.number, "shed", why, RETRY_AFTER_S)

    def _late(self, request: Request, now_ns: int) -> Failed | None:
        if request.deadline_ns is None:
            return None
        scheduler = self._scheduler
        tokens, seats = scheduler.waiting.ahead_of(request)
        begun = scheduler.tokens_to_prefill() - scheduler.waiting.tokens
        free = scheduler.limits.max_num_seqs - scheduler.seats
        ahead = Ahead(tokens + begun, max(0, seats + request.seats - free))
        own = request.prompt_tokens - scheduler.tables.cached_tokens(request.sequences[0])
        late = why_too_late(request.deadline_ns, now_ns, ahead, own, self.rates)
        if late is None:
            return None
        why, late_ns = late
        after_s = -(-late_ns // NS_PER_S) if late_ns else None
        return Failed(request.number, "deadline", why, after_s)
