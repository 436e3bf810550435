"""How much work a replica has and how fast it is, from what was sent and what came back."""

from collections import deque

from perfledger.instrumented_runtime.messages import StepOutput

HALF_LIFE_S = 5.0  # of what is known of the speed
PAUSE_S = 1.0  # a longer time between two steps was idleness or a stall, not speed


class Load:
    """Prompt tokens that wait at a replica, and how many tokens it computes in a second.

    The engine counts its waiting tokens at each step; what was sent after it last spoke is added.
    The speed is of prompt and sampled tokens together, measured over steps while it had work.
    """

    def __init__(self) -> None:
        self.running = 0  # requests in the batch, as last told
        self.kv_blocks_used = 0
        self._told_tokens = 0
        self._told_ns: int | None = None  # when the engine last spoke; None: it was idle since
        self._unseen: deque[tuple[int, int]] = deque()  # (sent_ns, prompt tokens)
        self._tokens, self._seconds = 0.0, 0.0  # computed and taken, older ones fading

    @property
    def queue_tokens(self) -> int:
        """Prompt tokens sent and not computed yet."""
        return self._told_tokens + sum(tokens for _, tokens in self._unseen)

    @property
    def queue_ns(self) -> int | None:
        """How long these take at the speed measured so far; None while none was."""
        if self._tokens <= 0 or self._seconds <= 0:
            return None
        return int(self.queue_tokens * self._seconds / self._tokens * 1e9)

    def sent(self, prompt_tokens: int, now_ns: int) -> None:
        """A request is sent to the replica."""
        if self._told_ns is None:
            self._told_ns = now_ns
        self._unseen.append((now_ns, prompt_tokens))

    def stepped(self, step: StepOutput, in_flight: int) -> None:
        """The replica told its load after a step; `in_flight` requests are left."""
        before = self._told_tokens
        while self._unseen and self._unseen[0][0] <= step.sent_ns:
            before += self._unseen.popleft()[1]
        self._measure(max(0, before - step.waiting_tokens) + len(step.tokens), step.sent_ns)
        self._told_tokens = step.waiting_tokens if in_flight else 0
        self._told_ns = step.sent_ns if in_flight else None
        self.running, self.kv_blocks_used = step.running, step.kv_blocks_used

    def emptied(self) -> None:
        """No request is left there, however they ended."""
        self._told_tokens, self._told_ns = 0, None
        self._unseen.clear()

    def _measure(self, tokens: int, now_ns: int) -> None:
        seconds = 0.0 if self._told_ns is None else (now_ns - self._told_ns) / 1e9
        if not 0 < seconds <= PAUSE_S:
            return
        fading = 0.5 ** (seconds / HALF_LIFE_S)
        self._tokens = self._tokens * fading + tokens
        self._seconds = self._seconds * fading + seconds
