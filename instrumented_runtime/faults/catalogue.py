"""Every fault that we can bring about, declared once: what it is, by which means, who is to blame.

A fault makes a stage slow the way it becomes slow in production: other work takes the core, the
memory is short, the link is thin. Nothing sleeps inside the stage that will be blamed. All are off
unless `perfledger fault run` brings one about, and what is on is written to its answer file only.
"""

import math
from dataclasses import dataclass, field

from perfledger.schema.errors import UsageError

# Who brings it about.
FLAGS, CHECKPOINT, NEIGHBOUR, PLACEMENT, PROCESS, NETWORK, CLIENT = (
    "flags",  # the command gets other flags
    "checkpoint",  # the model folder is replaced by a variant of it
    "neighbour",  # other processes work on the same cores
    "placement",  # the command may use less of the machine
    "process",  # other work runs inside the serving process
    "network",  # the ranks stand in a network namespace with a thin link
    "client",  # a proxy stands between client and server
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `blamed` are the stages (schema/stages.py) or causes in which it must show."""

    name: str
    means: str
    blamed: tuple[str, ...]
    meaning: str
    amount: float = 0.0  # its strength where the caller gives none
    unit: str = ""
    flags: tuple[str, ...] = field(default=())  # what FLAGS adds to the command
    needs: str = ""  # what must be there, for people


FAULTS: tuple[Fault, ...] = (
    Fault(
        "slow_tokenizer",
        CHECKPOINT,
        ("tokenize",),
        "the tokenizer searches every prompt for patterns that never match",
        400,
        "patterns",
    ),
    Fault(
        "volatile_template",
        CHECKPOINT,
        ("prefill",),
        "the chat template begins with a number drawn anew, so no prefix is ever found again",
    ),
    Fault(
        "skewed_experts",
        CHECKPOINT,
        ("prefill", "decode"),
        "the router of every layer prefers the first experts, so one rank computes for all",
        32,
        "times the router's rows",
        needs="a mixture-of-experts model, like --model reference-moe",
    ),
    Fault(
        "busy_neighbour",
        NEIGHBOUR,
        ("prefill", "decode"),
        "processes that compute without end share the cores",
        2,
        "processes",
    ),
    Fault(
        "one_core",
        PLACEMENT,
        ("prefill", "decode"),
        "engine, API and exporter may use one core together",
        1,
        "cores",
        needs="Linux",
    ),
    Fault(
        "cpu_quota",
        PLACEMENT,
        ("prefill", "decode"),
        "the kernel stops all processes for the rest of each 100 ms once they used their share",
        0.5,
        "cores",
        needs="root, and the cgroup controller cpu",
    ),
    Fault(
        "few_kv_blocks",
        FLAGS,
        ("queue",),
        "the KV cache holds little more than one long request",
        flags=("--kv-memory", "{amount:.0f}MiB"),
        amount=8,
        unit="MiB",
    ),
    Fault(
        "narrow_batch",
        FLAGS,
        ("queue",),
        "few requests are computed together, the others wait",
        1,
        "requests",
        flags=("--max-num-seqs", "{amount:.0f}"),
    ),
    Fault(
        "small_chunks",
        FLAGS,
        ("prefill",),
        "prompts are computed in small pieces, each reading all weights again",
        16,
        "tokens",
        flags=("--max-num-batched-tokens", "{amount:.0f}", "--max-num-seqs", "8"),
    ),
    Fault(
        "gil_contention",
        PROCESS,
        ("tokenize", "detokenize", "stream"),
        "threads of the API process run Python code without end",
        2,
        "threads",
    ),
    Fault(
        "gc_pressure",
        PROCESS,
        ("tokenize", "detokenize", "stream"),
        "the API process holds many small objects and makes garbage, so collections are long",
        1_500_000,
        "objects",
    ),
    Fault(
        "log_flood",
        PROCESS,
        ("tokenize", "detokenize", "stream"),
        "the API process logs at DEBUG, and every line is synced to the disk",
        500,
        "lines a second",
    ),
    Fault(
        "slow_reader",
        CLIENT,
        ("stream",),
        "the client takes its answers slowly",
        2_000,
        "bytes a second",
    ),
    Fault(
        "far_client",
        CLIENT,
        ("network",),
        "client and server are far apart: both ways take time, the server's spans do not",
        40,
        "ms each way",
    ),
    Fault(
        "thin_link",
        NETWORK,
        ("collective transfer",),
        "all ranks talk through a link of small bandwidth",
        20,
        "Mbit/s",
        needs="root, and the programs ip and tc",
    ),
)

BY_NAME = {fault.name: fault for fault in FAULTS}


def strength(fault: Fault, asked: float | None) -> float:
    """Return the amount to bring a fault about with: the one asked for, else its own.

    Raises UsageError for one with which it would not be there or cannot be: what its answer names
    is on.
    """
    if asked is None:
        return fault.amount
    if not fault.unit:
        raise UsageError(f"{fault.name} has no strength", fix="leave out --amount")
    whole = fault.amount == int(fault.amount)
    if not (math.isfinite(asked) and asked > 0) or (whole and asked != int(asked)):
        wanted = "a whole number above 0" if whole else "above 0"
        raise UsageError(f"the strength {asked:g} is not {wanted} ({fault.unit})")
    return asked
