"""The nouns of a load run: what is asked for, what each request met, and the whole result."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from perfledger.instrumented_runtime.load.workload import Arrival, Workload
from perfledger.schema.clocks import ClockAnchor
from perfledger.schema.errors import UsageError

Endpoint = Literal["chat", "completions"]
Ending = Literal["finished", "interrupted", "server_gone"]

# What a chunk held, one letter each in Sample.channels.
OUTPUT, REASONING, TOOL = "o", "r", "t"
CHANNELS = {OUTPUT: "output", REASONING: "reasoning", TOOL: "tool"}

# Ids that name ordinary tokens in every vocabulary of at least 2,000: below are bytes and special
# tokens, and special tokens that are added to a vocabulary come at its end.
TOKEN_IDS = (300, 2000)


@dataclass(frozen=True)
class LoadPlan:
    """What to send where. The workload is already scaled; all of this enters the results."""

    url: str
    workload: Workload
    endpoint: Endpoint = "completions"
    model: str = ""  # "": the first that /v1/models names
    api_key: str = field(default="", repr=False)
    run_id: str = ""
    seed: int = 0
    warm_up: int = 2  # requests sent one by one before the schedule starts
    timeout_s: float = 600.0  # of one request, from its sending
    ignore_eos: bool = True  # so that answers reach the length asked for
    temperature: float = 0.0
    n: int = 1  # answers to each prompt
    token_ids: tuple[int, int] = TOKEN_IDS  # prompts of `completions` draw from [low, high)

    def __post_init__(self) -> None:
        """Raise UsageError for a URL that is none, or values that cannot be."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(f"not a URL: {self.url!r}", fix="--url http://127.0.0.1:8000")
        if not self.workload.arrivals:
            raise UsageError("a workload without requests", where=self.workload.source)
        if self.warm_up < 0 or self.timeout_s <= 0 or self.temperature < 0:
            raise UsageError("warm-up, timeout and temperature cannot be negative")
        if self.n < 1:
            raise UsageError(f"n is {self.n}, but must be at least 1")
        low, high = self.token_ids
        if not 0 <= low < high:
            raise UsageError(f"not a range of token ids: {low}:{high}", fix="--token-ids 300:2000")

    def at(self, path: str) -> str:
        """Return the URL of an API path such as `/v1/models`; our URL may end in /v1 or not."""
        return self.url.rstrip("/").removesuffix("/v1") + path


@dataclass(frozen=True, slots=True)
class Sample:
    """One request as the client saw it; times are monotonic ns.

    A chunk counts where it holds text: role-only, empty, usage and [DONE] chunks do not. Several
    chunks read from the socket at once share their time. Token counts are the server's usage, and
    null where it sent none. `error` is "" or the kind of failure; `detail` stays off the store.
    """

    index: int  # of the arrival in the workload
    warm_up: bool
    arrival: Arrival
    trace_id: bytes
    span_id: bytes
    scheduled_ns: int
    sent_ns: int
    end_ns: int  # [DONE] or the end of the stream read, or the failure noticed
    chunk_ns: Sequence[int] = ()
    channels: str = ""  # a letter a chunk: OUTPUT, REASONING, TOOL
    choices: Sequence[int] = ()  # which of the n answers a chunk belongs to
    error: str = ""
    detail: str = ""
    http_status: int | None = None
    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None
    response_id: str = ""
    finish_reason: str = ""

    @property
    def outcome(self) -> str:
        """ok; refused (HTTP 4xx); aborted (by our own end); or error."""
        if not self.error:
            return "ok"
        if self.error == "interrupted":
            return "aborted"
        return "refused" if self.error.startswith("http_4") else "error"

    @property
    def lateness_ns(self) -> int:
        """How long after its scheduled time the client really sent it."""
        return self.sent_ns - self.scheduled_ns


@dataclass(frozen=True)
class Calibration:
    """Tokens of a synthetic chat prompt: overhead + words x tokens_per_word.

    From the usage of two probe requests; `probed` is false where the server sent no usage, and a
    word is then taken for a token.
    """

    tokens_per_word: float = 1.0
    overhead_tokens: float = 0.0
    probed: bool = False


@dataclass(frozen=True)
class LoadResult:
    """Everything one run measured: raw samples in order of schedule, warm-up ones first."""

    plan: LoadPlan
    model: str
    anchor: ClockAnchor
    started_ns: int  # monotonic: offset 0 of the schedule
    samples: tuple[Sample, ...]
    loop_lag_ns: Sequence[int]  # how late the client's event loop woke up, sampled
    ended: Ending
    unsent: int  # requests of the workload that were not sent, because the run ended before
    calibration: Calibration | None = None  # of chat prompts

    @property
    def measured(self) -> tuple[Sample, ...]:
        """The samples without the warm-up."""
        return tuple(sample for sample in self.samples if not sample.warm_up)
