"""What bounds a request and a step, and which requests could never be served within it."""

from dataclasses import dataclass

from perfledger.instrumented_runtime.kv.blocks import blocks_for
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.scheduling.degrading import check_order
from perfledger.schema.errors import UsageError

PREEMPTIONS = ("recompute", "swap")


@dataclass(frozen=True, slots=True)
class Limits:
    """What bounds a request and a step, and the policies. Lengths and sizes are tokens."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    block_size: int
    kv_blocks: int
    swap_blocks: int = 0  # on the host; 0: preempted requests are computed again
    watermark_blocks: int = 0  # kept free at an admission
    prefix_cache: bool = False
    degrade: tuple[str, ...] = ()


def check_options(options: RuntimeOptions) -> None:
    """Raise UsageError for options with which no step could ever be planned."""
    for name in ("max_num_seqs", "block_size"):
        if getattr(options, name) < 1:
            raise UsageError(f"{name} is {getattr(options, name)}, but must be at least 1")
    if options.max_num_batched_tokens < options.max_num_seqs:
        raise UsageError(
            f"max_num_batched_tokens is {options.max_num_batched_tokens}, but each of"
            f" {options.max_num_seqs} sequences may need a token in a step",
            fix="raise max_num_batched_tokens or lower max_num_seqs",
        )
    if options.preemption not in PREEMPTIONS:
        raise UsageError(
            f"preemption is {options.preemption!r}", fix="one of " + ", ".join(PREEMPTIONS)
        )
    if not 0 <= options.watermark < 1:
        raise UsageError(f"watermark is {options.watermark}, but must be a share from 0 to below 1")
    check_order(options.degrade)


def limits_of(
    options: RuntimeOptions, *, max_model_len: int, kv_blocks: int, swap_blocks: int = 0
) -> Limits:
    """Return the limits of a runtime, from its options and two facts of its Ready message.

    `swap_blocks` is what the engine's host pool holds; nobody else needs to know.
    Raises UsageError where they could never run a step.
    """
    check_options(options)
    if kv_blocks < 1:
        raise UsageError("the KV memory holds no block", fix="raise --kv-memory")
    return Limits(
        options.max_num_seqs,
        options.max_num_batched_tokens,
        max_model_len,
        options.block_size,
        kv_blocks,
        swap_blocks,
        int(options.watermark * kv_blocks),
        options.prefix_cache,
        options.degrade,
    )


def most_output_tokens(prompt_tokens: int, limits: Limits, n: int = 1) -> int:
    """Return how many tokens can follow such a prompt at most, in each of n answers.

    0 or less if it cannot fit. The last token is sampled and never computed, so it needs no place
    in the KV cache; n answers share the full blocks of their prompt.
    """
    shared = prompt_tokens // limits.block_size
    blocks = shared + (limits.kv_blocks - shared) // n
    return min(limits.max_model_len, blocks * limits.block_size + 1) - prompt_tokens


def never_fits(prompt_tokens: int, max_tokens: int, limits: Limits, n: int = 1) -> str | None:
    """Return why a request could never be served, even alone, or None if it can."""
    if prompt_tokens < 1:
        return "the prompt has no tokens"
    if max_tokens < 1:
        return f"max_tokens is {max_tokens}, but must be at least 1"
    if not 1 <= n <= limits.max_num_seqs:
        return f"n is {n}, but a batch holds 1 to {limits.max_num_seqs} sequences"
    total, size = prompt_tokens + max_tokens, limits.block_size
    asked = f"{prompt_tokens} prompt tokens and max_tokens {max_tokens} make {total}"
    if total > limits.max_model_len:
        return f"{asked}, but the model takes {limits.max_model_len} tokens"
    shared = prompt_tokens // size
    if shared + n * (blocks_for(total - 1, size) - shared) > limits.kv_blocks:
        answers = "" if n == 1 else f" in each of {n} answers"
        return f"{asked}{answers}, but the KV cache holds {limits.kv_blocks * size} tokens"
    return None
