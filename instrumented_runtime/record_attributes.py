"""What a record of the engine says, as attributes of a span. Pure functions over one record."""

from perfledger.instrumented_runtime.finished_spans import Attributes
from perfledger.instrumented_runtime.records import NOT_READ, Degrade, Leave, NoMemory, Step
from perfledger.instrumented_runtime.scheduling.degrading import STEPS, step_names


def account_attributes(leave: Leave) -> Attributes:
    """Return what a request cost the KV cache, as its root tells it; zeros are left out."""
    attributes: Attributes = {
        "perfledger.kv_blocks_held": leave.peak_blocks,
        "perfledger.computed_tokens": leave.computed_tokens,
    }
    told = {
        "perfledger.recomputed_tokens": leave.recomputed_tokens,
        "perfledger.kv_blocks_evicted": leave.evicted_blocks,
        "perfledger.kv_blocks_copied": leave.copied_blocks,
        "perfledger.kv_blocks_swapped": leave.swapped_blocks,
    }
    attributes |= {name: count for name, count in told.items() if count}
    if leave.degraded:
        attributes["perfledger.degraded"] = ",".join(step_names(leave.degraded))
    return attributes


def step_name(step: Step) -> str:
    """Return what a step is called, by what it computes."""
    if step.prefill_tokens and step.decode_tokens:
        return "mixed_step"
    return "prefill_step" if step.prefill_tokens else "decode_step"


def step_attributes(step: Step) -> Attributes:
    """Return what a step's span tells beside its times."""
    known = {  # of a rank that schedules nothing, rank 0 alone knows all but the first
        "perfledger.step.cpu_ns": step.cpu_ns,
        "perfledger.step.waiting": step.waiting,
        "perfledger.step.kv_blocks_used": step.kv_blocks_used,
        "perfledger.step.kv_blocks_total": step.kv_blocks_total,
    }
    return {
        **{name: value for name, value in known.items() if value != NOT_READ},
        "perfledger.step.seq": step.seq,
        "perfledger.step.width": step.width,
        "perfledger.step.prefill_tokens": step.prefill_tokens,
        "perfledger.step.decode_tokens": step.decode_tokens,
    }


def forward_end_ns(step: Step) -> int:
    """Return the end of the model's work: where sampling starts, or the step's end without any."""
    if step.schedule_end_ns <= step.sample_start_ns <= step.end_ns:
        return step.sample_start_ns
    return step.end_ns


def degrade_attributes(degrade: Degrade) -> Attributes:
    """Return which step of degrading went on or off, and at what pressure."""
    return {
        "perfledger.degrade.step": STEPS[degrade.step].name,
        "perfledger.degrade.on": bool(degrade.on),
        "perfledger.degrade.pressure": degrade.pressure / 1000,
    }


def no_memory_attributes(one: NoMemory) -> Attributes:
    """Return what was held when memory ran out; what is not known is left out."""
    told = {
        "perfledger.step.seq": one.seq,
        "perfledger.memory.process_bytes": one.process_bytes,
        "perfledger.memory.device_bytes": one.device_bytes,
        "perfledger.step.kv_blocks_used": one.kv_blocks_used,
        "perfledger.step.kv_blocks_total": one.kv_blocks_total,
        "perfledger.kv_blocks_held": one.request_blocks,
    }
    return {name: value for name, value in told.items() if value != NOT_READ}
