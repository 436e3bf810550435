"""The stages of a request: they partition the time from arrival to end, exactly.

The order is the order of precedence: at each instant the first stage that holds wins, and a tie
for the longest stage goes to the earlier one. `partition.py` is the pure function.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Stage:
    """One stage. `sub_stages` are shares of the stage and never count twice."""

    name: str
    meaning: str
    sub_stages: tuple[str, ...] = ()


STAGES: tuple[Stage, ...] = (
    Stage("sample", "in a step of this request, while its sample child runs"),
    Stage(
        "prefill",
        "in a step of this request that computes prompt or recomputed tokens of it",
        ("recompute",),
    ),
    Stage("decode", "in a step of this request that computes only new tokens of it"),
    Stage("encode", "multimodal encoding"),
    Stage("adapter_load", "loading an adapter (LoRA)"),
    Stage("kv_transfer", "KV cache moved from a prefill to a decode instance"),
    Stage("context", "prefix look-up, block allocation, batch preparation"),
    Stage("queue", "sent to the engine, or preempted, and waiting for admission"),
    Stage("route", "choosing a replica"),
    Stage("template", "rendering the chat template"),
    Stage("tokenize", "text to token ids"),
    Stage(
        "stream",
        "writing to the socket after the last sample, or held back for an unread client",
    ),
    Stage(
        "host_gap",
        "between first admission and last sample, but in no step of this request",
        ("schedule", "other_step", "rest"),
    ),
    Stage("detokenize", "token ids to text, after the last sample"),
    Stage("unattributed", "none of the above"),
)

STAGE_NAMES: tuple[str, ...] = tuple(stage.name for stage in STAGES)
STAGE_COLUMNS: tuple[str, ...] = tuple(f"{name}_ns" for name in STAGE_NAMES)
SUB_STAGE_COLUMNS: tuple[str, ...] = tuple(
    f"{stage.name}_{sub}_ns" for stage in STAGES for sub in stage.sub_stages
)

# What a request computes in one step, carried by the step's link to it.
PHASES: tuple[str, ...] = ("prefill", "recompute", "decode", "draft", "verify")
PROMPT_PHASES = frozenset({"prefill", "recompute"})

# Kinds of tokens, of which our runtime produces the first three.
TOKEN_KINDS: tuple[str, ...] = ("input", "cached", "output", "reasoning")
