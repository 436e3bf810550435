"""What is in the KV cache between two steps, for /admin and for the router's health check."""

from perfledger.instrumented_runtime.messages import KvHolding, KvMap
from perfledger.instrumented_runtime.scheduling.scheduler import Scheduler


def kv_map(scheduler: Scheduler) -> KvMap:
    """Return the state of all blocks, and what each request in the batch holds.

    A block that several sequences share is counted once for each request that holds it, so the
    holdings may sum to more than the blocks used. `tokens` are the computed ones, of all choices.
    """
    blocks = scheduler.kv
    holdings = []
    for request in scheduler.running:
        held = {block for sequence in request.sequences for block in sequence.blocks}
        tokens = sum(sequence.computed for sequence in request.sequences)
        holdings.append(KvHolding(request.number, len(held), tokens))
    return KvMap(
        block_size=blocks.block_size,
        blocks_total=blocks.count,
        blocks_used=blocks.used,
        blocks_cached=blocks.cached,
        blocks_free=blocks.free - blocks.cached,
        requests=tuple(holdings),
    )
