"""The fixed-width records that the engine writes into the ring, and nothing else does.

A record is 16 signed 64-bit words, the first its kind. Times are monotonic ns. Order in the ring:
ADMIT, CHUNK and PREEMPT while step `seq` is scheduled, STEP when it ended, then LEAVE for each
request that its tokens finished. So batch membership and token times follow from few records:
a request is in step `seq` if a CHUNK names it there, or if its last CHUNK is behind it and it has
not left; it gets one token at the end of the sampling of every such step from its last CHUNK on.
"""

from typing import NamedTuple

WORDS = 16

STEP, ADMIT, CHUNK, PREEMPT, LEAVE = range(1, 6)

# Codes of the reason words.
WAIT_REASONS = ("admission", "kv_full", "preempted")
LEAVE_REASONS = (
    "stop",
    "length",
    "client_disconnect",
    "stop_string",
    "error",
    "out_of_memory",
    "shutdown",
)


# The CPU clock costs a system call, as much as the rest of a record: it is read every few steps
# and when the batch runs empty, so that sums over a busy period are whole.
NOT_READ = -1
CPU_EVERY_STEPS = 8


class Step(NamedTuple):
    """One engine step. `[start, schedule_end)` schedules, `[sample_start, sample_end)` samples."""

    seq: int
    start_ns: int
    schedule_end_ns: int
    sample_start_ns: int
    sample_end_ns: int
    end_ns: int
    width: int
    prefill_tokens: int
    decode_tokens: int
    waiting: int
    kv_blocks_used: int
    kv_blocks_total: int
    cpu_ns: int  # CPU time of the engine process since the last reading; NOT_READ in between


class Admit(NamedTuple):
    """A request enters the batch (again after a preemption). Ids are unsigned bits as signed."""

    request: int
    seq: int
    trace_high: int
    trace_low: int
    span: int
    queue_start_ns: int
    queue_end_ns: int  # start of `context`
    context_end_ns: int
    prompt_tokens: int
    cached_tokens: int
    wait_reason: int


class Chunk(NamedTuple):
    """A piece of a prompt (or of tokens computed again) that step `seq` computes."""

    request: int
    seq: int
    tokens: int
    recompute: int  # 1: after a preemption
    last: int  # 1: the step samples the next token of the request


class Preempt(NamedTuple):
    """A request loses its blocks and goes back to the queue."""

    request: int
    seq: int
    at_ns: int


class Leave(NamedTuple):
    """A request leaves the batch after step `seq` (or between steps when aborted)."""

    request: int
    seq: int
    at_ns: int
    reason: int
    output_tokens: int


Record = Step | Admit | Chunk | Preempt | Leave
KINDS: dict[int, type[Step] | type[Admit] | type[Chunk] | type[Preempt] | type[Leave]] = {
    STEP: Step,
    ADMIT: Admit,
    CHUNK: Chunk,
    PREEMPT: Preempt,
    LEAVE: Leave,
}
