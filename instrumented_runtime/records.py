"""The fixed-width records that the engine writes into the ring, and nothing else does.

A record is 16 signed 64-bit words, the first its kind. Times are monotonic ns. Order in the ring:
ADMIT, CHUNK and PREEMPT while step `seq` is scheduled, KV and STEP when it ended, then CHOICE_END
for each answer and LEAVE for each request that its tokens finished. So batch membership and token
times follow from few records: a request is in step `seq` if a CHUNK names it there, or if its last
CHUNK is behind it and it has not left. It has as many sequences as its last CHUNK or ADMIT said,
less one a CHOICE_END, and gets a token for each at the end of the sampling of every such step; of
the step of its last CHUNK, as many as that says.
"""

from typing import NamedTuple

WORDS = 16

STEP, ADMIT, CHUNK, PREEMPT, LEAVE = range(1, 6)
COLLECTIVE, COPY = range(6, 8)
CHOICE_END, KV, DEGRADE, NO_MEMORY = range(16, 20)
ROUTED = 24
TRAIN_PART, TRAIN_STEP = range(32, 34)  # of a training run: parts, then the step they are of
SHARD_IO = 34  # of a training run, between steps

# Codes of the reason words. Overtaken by others: of a better priority, of a tenant that had less,
# with an earlier deadline.
WAIT_REASONS = ("admission", "kv_full", "preempted", "priority", "fairness", "deadline")
TRAIN_PARTS = ("forward", "backward", "optimizer")
LEAVE_REASONS = (
    "stop",
    "length",
    "client_disconnect",
    "stop_string",
    "error",
    "out_of_memory",
    "shutdown",
    "deadline",  # refused before a token: it cannot be met
    "shed",  # refused by a step of degrading
    "degraded",
)


# Codes of the words of COLLECTIVE and COPY; the last of each stands for any other.
COLLECTIVE_OPS = (
    *("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"),
    *("gather", "scatter", "send", "recv", "barrier", "other"),
)
DTYPES = (
    *("", "float32", "bfloat16", "float16", "float64", "int64", "int32", "int16", "int8", "uint8"),
    *("bool", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "other"),
)
# What a copy crosses: between device and host, dtypes, pipeline stages, or memory and its offload.
BOUNDARIES = ("host_to_device", "device_to_host", "dtype", "stage", "offload_out", "offload_in")


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
    decodes: int = NOT_READ  # tokens and KV blocks that they read, see work_records.pack_decodes


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
    sequences: int  # that decode from this step on: swapped in; 0 where CHUNKs follow
    swapped_blocks: int  # moved in for it


class Chunk(NamedTuple):
    """A piece of a prompt (or of tokens computed again) that step `seq` computes.

    One of each sequence, where several of a request are computed again. A rank that schedules
    nothing tells of each piece without its request.
    """

    request: int  # NOT_READ from a rank that schedules nothing
    seq: int
    tokens: int
    recompute: int  # tokens among them that were computed before a preemption
    last: int  # 1: all its sequences decode from the next step on
    sequences: int  # how many those are
    samples: int  # tokens that the step samples for it
    pieces: int = NOT_READ  # from here on as in schema.step_work.BatchShape
    continued: int = 0
    key_tokens: int = 0
    pairs: int = 0
    continued_pairs: int = 0
    gathered_blocks: int = 0


class Preempt(NamedTuple):
    """A request loses its blocks and goes back to the queue."""

    request: int
    seq: int
    at_ns: int
    swapped_blocks: int  # moved to the host; 0: what they held is computed again


class ChoiceEnd(NamedTuple):
    """One answer of several ends after step `seq` (or between steps); its request goes on."""

    request: int
    seq: int
    at_ns: int
    sequences: int  # that are left
    decoding: int  # 1: they decode in the next step


class Leave(NamedTuple):
    """A request leaves the batch after step `seq` (or between steps when aborted)."""

    request: int
    seq: int
    at_ns: int
    reason: int
    output_tokens: int
    computed_tokens: int  # for the first time
    recomputed_tokens: int
    peak_blocks: int
    evicted_blocks: int
    copied_blocks: int
    swapped_blocks: int
    degraded: int  # a bit for each of degrading.STEPS that changed it


class Kv(NamedTuple):
    """Blocks that changed in step `seq`; only of steps where some did."""

    seq: int
    stored: int
    evicted: int
    copied: int
    swapped_out: int
    swapped_in: int


class Routed(NamedTuple):
    """Where the rows of step `seq` went in the layers of experts; written before its STEP.

    An assignment is a row computed by one expert of one layer. Of the ranks that route together
    (ep), each tells of the rows of all.
    """

    seq: int
    layers: int
    assignments: int
    busiest_assignments: int  # of each layer's busiest expert, summed
    touched_experts: int  # with at least one row, summed over layers
    first: int  # number of the first of these experts
    tokens_0: int  # assignments of each, over all layers; NOT_READ: there is no such expert
    tokens_1: int
    tokens_2: int
    tokens_3: int
    tokens_4: int
    tokens_5: int
    tokens_6: int
    tokens_7: int


class Degrade(NamedTuple):
    """A step of degrading goes on or off between two engine steps."""

    at_ns: int
    step: int  # index in degrading.STEPS
    on: int
    pressure: int  # thousandths


class NoMemory(NamedTuple):
    """A step found no memory, and this request ends for it. What was held then, in bytes."""

    request: int
    seq: int
    at_ns: int
    process_bytes: int  # resident memory of the engine process; NOT_READ where nobody tells
    device_bytes: int  # allocated on the device; NOT_READ without one
    kv_blocks_used: int
    kv_blocks_total: int
    request_blocks: int  # KV blocks that the request held


class TrainPart(NamedTuple):
    """One part of training step `seq`, or of one microbatch of it in a pipeline."""

    seq: int
    part: int  # index in TRAIN_PARTS
    microbatch: int  # NOT_READ: the whole batch
    start_ns: int
    end_ns: int


class TrainStep(NamedTuple):
    """One training step of one rank has ended. Bytes are those held at its end."""

    seq: int
    start_ns: int
    end_ns: int
    loss_millionths: int  # of a nat, mean over the rank's tokens; NOT_READ: another stage has it
    tokens: int
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int
    full_peak_bytes: int  # full copies of sharded parameters, the most at one time
    full_left_bytes: int  # and those not freed
    memory_bytes: int  # of the device (CUDA: its peak in the step), else of the process
    observed: int  # 1: its collectives were observed


class ShardMoved(NamedTuple):
    """A training rank saved its shard of a checkpoint, or loaded it; checksum and sync included."""

    step: int  # steps that the checkpoint has behind it
    loaded: int  # 0: saved
    rank: int
    ranks: int
    bytes: int
    start_ns: int
    end_ns: int


class Collective(NamedTuple):
    """One collective or point-to-point call of this rank (see collectives/observed.py)."""

    step_seq: int  # NOT_READ outside a step
    op: int  # index in COLLECTIVE_OPS
    group: int  # name, see pack_name
    dimension: int  # name
    ranks: int  # see collectives.recording.pack_ranks
    peer: int  # global rank; NOT_READ where there is none
    dtype: int  # index in DTYPES
    bytes: int
    wire_bytes: int  # NOT_READ where unknown
    sequence: int
    enqueue_ns: int
    start_ns: int  # NOT_READ where not observable
    end_ns: int  # NOT_READ where nobody waited


class Copy(NamedTuple):
    """Bytes that crossed a boundary in this rank."""

    step_seq: int  # NOT_READ outside a step
    boundary: int  # index in BOUNDARIES
    source: int  # name of a device
    target: int  # name of a device
    dtype: int  # index in DTYPES
    bytes: int
    start_ns: int
    end_ns: int


Record = (
    Step
    | Admit
    | Chunk
    | Preempt
    | Leave
    | ChoiceEnd
    | Kv
    | Routed
    | Degrade
    | NoMemory
    | TrainPart
    | TrainStep
    | ShardMoved
    | Collective
    | Copy
)
KINDS: dict[int, type[Record]] = {
    STEP: Step,
    ADMIT: Admit,
    CHUNK: Chunk,
    PREEMPT: Preempt,
    LEAVE: Leave,
    CHOICE_END: ChoiceEnd,
    KV: Kv,
    ROUTED: Routed,
    DEGRADE: Degrade,
    NO_MEMORY: NoMemory,
    COLLECTIVE: Collective,
    COPY: Copy,
    TRAIN_PART: TrainPart,
    TRAIN_STEP: TrainStep,
    SHARD_IO: ShardMoved,
}
