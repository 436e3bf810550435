"""What the API process and the engine process say to each other: one dataclass per message.

They travel pickled over one private pipe. Times are monotonic ns, shared by all processes of a
host. A request is known by a small integer that the API process counts up.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# Failed.request of a failure that is the engine's, not one request's.
WHOLE_ENGINE = -1
# Failed.reason of an engine that could never start as asked.
USAGE = "usage"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How to choose tokens. temperature 0 is greedy; max_tokens counts sampled tokens."""

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    stop_token_ids: tuple[int, ...] = ()
    n: int = 1  # answers to the same prompt, each sampled on its own


@dataclass(frozen=True, slots=True)
class Submit:
    """API to engine: a new request, with the ids of its root span (for the engine's records)."""

    request: int
    prompt: list[int]
    sampling: SamplingParams
    trace_id: int  # 128 bits
    span_id: int  # 64 bits
    sent_ns: int  # start of its wait in the queue
    delays_ns: dict[str, int] = field(default_factory=dict)  # planted faults, by stage
    tenant: str = ""  # whose it is: prefixes are shared, and turns taken, within a tenant
    priority: int = 0  # lower goes first, as in vLLM
    deadline_ns: int | None = None  # monotonic: when the caller stops waiting


@dataclass(frozen=True, slots=True)
class Abort:
    """API to engine: stop this request and free its blocks. The reason is a LEAVE_REASONS name.

    With a `choice` only that answer ends (a stop string was found), as if its last token had come.
    """

    request: int
    reason: str
    choice: int | None = None


@dataclass(frozen=True, slots=True)
class Shutdown:
    """To the engine: finish the current step and end. The end of the pipe says the same."""


@dataclass(frozen=True, slots=True)
class Arrived:
    """Rank to API, once, where it has peers: it is about to meet them. One that does not say so
    within a minute is named as the one that never joined."""


@dataclass(frozen=True, slots=True)
class Ready:
    """Engine to API, once: the model is loaded. Facts about what really runs."""

    device: str
    dtype: str
    kernel_path: str
    threads: int
    kv_blocks: int
    max_model_len: int
    parameters: int
    weights_hash: str
    runtime_version: str = ""  # of the engine's code; the router refuses another one than its own
    layout: str = ""  # the ranks of this replica, like "tp=2"
    capacity: dict[str, int] = field(default_factory=dict)  # the capacity ledger, bytes and tokens
    shapes: tuple[str, ...] = ()  # of each rank, see work_shape.py


class Token(NamedTuple):
    """One sampled token; `finish` is None, or stop or length with the last one.

    A tuple: pickled twice as fast as a dataclass, and there is one a sequence and step.
    """

    request: int
    token: int
    finish: str | None
    choice: int = 0  # which of the n answers


class Admitted(NamedTuple):
    """What became of a request at its admission; comes once, at the latest with its first token."""

    request: int
    cached_tokens: int  # prompt tokens found in the prefix cache
    degraded: str = ""  # what the degrading policy changed, like "cap_max_tokens=64"


@dataclass(frozen=True, slots=True)
class StepOutput:
    """Engine to API: all tokens of one step, in one message."""

    seq: int
    sent_ns: int  # when the engine sent it: start of `detokenize`
    tokens: list[Token]
    admitted: Sequence[Admitted] = ()
    waiting: int = 0  # load of the engine after the step, for the router
    running: int = 0
    kv_blocks_used: int = 0
    waiting_tokens: int = 0  # prompt tokens not yet computed, of those that wait or run


@dataclass(frozen=True, slots=True)
class Failed:
    """Engine to API: this request ended without a token (reason: a LEAVE_REASONS name)."""

    request: int
    reason: str
    detail: str
    retry_after_s: int | None = None  # of a refusal: when it may be worth coming back


@dataclass(frozen=True, slots=True)
class Inspect:
    """API to engine: say what is in the KV cache."""


class KvHolding(NamedTuple):
    """What one request holds of the KV cache: blocks, some perhaps shared, and tokens in them."""

    request: int
    blocks: int
    tokens: int


@dataclass(frozen=True, slots=True)
class KvMap:
    """Engine to API: the KV cache between two steps. Blocks are free, held by requests (used), or
    kept for their prefix by nobody (cached), and these three are all of them."""

    block_size: int
    blocks_total: int
    blocks_used: int
    blocks_cached: int
    blocks_free: int
    requests: tuple[KvHolding, ...] = ()


ToEngine = Submit | Abort | Inspect | Shutdown
FromEngine = Arrived | Ready | StepOutput | Failed | KvMap
