"""How many bytes communication moves: per collective, and per parallel dimension and step.

Pure formulas. Bytes are of one rank and sent to other ranks, unless said. Sources are named at
each function; those of collectives were also compared with what the kernel counts on the sockets
of 2, 3 and 4 gloo ranks (TCP_INFO), which adds a transport overhead of about 100 bytes a message.
"""

# One step of nccl-tests' table: bus bandwidth = bytes / time x factor.
_ONE_WAY = frozenset({"all_gather", "reduce_scatter", "all_to_all", "gather", "scatter"})
_WHOLE = frozenset({"broadcast", "reduce", "send", "recv"})


def bus_factor(op: str, ranks: int) -> float:
    """Return bus bandwidth over algorithm bandwidth of a collective (nccl-tests PERFORMANCE.md).

    It makes collectives comparable to the speed of a link, whatever the number of ranks; it
    assumes that each rank moves an equal share, as a ring does. Raises KeyError for another op.
    """
    if op == "all_reduce":
        return 2 * (ranks - 1) / ranks
    if op in _ONE_WAY:
        return (ranks - 1) / ranks
    if op in _WHOLE:
        return 1.0
    raise KeyError(op)


def wire_bytes(op: str, size: int, ranks: int, backend: str, hops: int = 0) -> int | None:
    """Return the bytes that one rank sends for a collective of `size` bytes, or None if unknown.

    `size` is nccl-tests' S: the whole output of an all_gather or gather, the whole input of a
    reduce_scatter, all_to_all or scatter, else the tensor; of equal shares. `hops` is the rank's
    distance from the root, as (rank - root) mod ranks, where there is one.

    gloo: ring all-reduce and all-gather, binomial-tree broadcast, reduce by a ring reduce-scatter
    whose shares go to the root; torch's reduce_scatter on gloo is an all-reduce of the whole input
    inside. NCCL: the ring's volume, as nccl-tests assumes; a tree or NVLS moves other amounts.
    """
    if ranks < 2 or op in ("recv", "barrier"):
        return 0
    if op == "send":
        return size
    share = size // ranks
    if op == "all_reduce" or (op == "reduce_scatter" and backend == "gloo"):
        return 2 * (ranks - 1) * size // ranks
    if op in ("all_gather", "reduce_scatter", "all_to_all"):
        return (ranks - 1) * size // ranks
    if op == "scatter":
        return 0 if hops else (ranks - 1) * share
    if op == "gather":
        return share if hops else 0
    if op == "reduce" and backend == "gloo":
        return (ranks - 1) * size // ranks + (share if hops else 0)
    if op == "broadcast" and backend == "gloo":
        return tree_children(hops, ranks) * size
    if op in ("broadcast", "reduce") and backend == "nccl":
        last = ranks - 1 if op == "broadcast" else 0
        return 0 if hops == last else size
    return None


def tree_children(hops: int, ranks: int) -> int:
    """Return to how many ranks one sends in a binomial tree, at a distance from its root."""
    return sum(hops < 1 << bit and hops + (1 << bit) < ranks for bit in range(ranks.bit_length()))


def data_parallel_bytes(parameter_bytes: int, ranks: int) -> float:
    """Return one step's all-reduce of gradients (ZeRO, arXiv 1910.02054, section 7.1)."""
    return 2 * (ranks - 1) / ranks * parameter_bytes


def fsdp_bytes(parameter_bytes: int, ranks: int, *, reshard_after_forward: bool = True) -> float:
    """Return one step's all-gathers and reduce-scatter of ZeRO-3 / FSDP (arXiv 1910.02054, 7.2).

    `parameter_bytes` is of the whole model. Without resharding after the forward pass the second
    all-gather falls away. One of several microbatches moves the same, unless weights are kept.
    """
    passes = 3 if reshard_after_forward else 2
    return passes * (ranks - 1) / ranks * parameter_bytes


def tensor_parallel_bytes(
    tokens: int, hidden: int, element_bytes: int, layers: int, ranks: int, *, training: bool = False
) -> float:
    """Return the ring volume of Megatron's all-reduces: 2 a layer forward, 2 more backward.

    (arXiv 1909.08053, section 3; with sequence parallelism each becomes an all-gather and a
    reduce-scatter of the same volume, arXiv 2205.05198.)
    """
    reduces = (4 if training else 2) * layers
    return reduces * 2 * (ranks - 1) / ranks * tokens * hidden * element_bytes


def pipeline_bytes(tokens: int, hidden: int, element_bytes: int, *, training: bool = False) -> int:
    """Return what one stage boundary carries: activations forward, gradients back when training.

    Of all tokens of all microbatches (arXiv 2104.04473, section 3.2).
    """
    return (2 if training else 1) * tokens * hidden * element_bytes


def ring_attention_bytes(
    rank_tokens: int, kv_heads: int, head_size: int, element_bytes: int, layers: int, ranks: int
) -> int:
    """Return what a rank passes on when keys and values go round a ring, forward.

    `rank_tokens` are of one rank's shard; each shard visits all other ranks. Over the sequence
    s = rank_tokens x ranks it is (ranks-1)/ranks x 2.s.kv_heads.head_size (Megatron's context
    parallelism; ring attention, arXiv 2310.01889).
    """
    shard_bytes = 2 * rank_tokens * kv_heads * head_size * element_bytes
    return (ranks - 1) * shard_bytes * layers


def expert_parallel_bytes(
    remote_assignments: int, hidden: int, element_bytes: int, *, training: bool = False
) -> int:
    """Return the rows that a rank sends to experts elsewhere and gets back combined.

    `remote_assignments` counts pairs of token and chosen expert whose expert is on another rank,
    over all layers; the way back is equal in total over the ranks, and assumed equal here (DeepEP
    README; backward does both again).
    """
    return (4 if training else 2) * remote_assignments * hidden * element_bytes


def even_remote_assignments(tokens: int, top_k: int, layers: int, ranks: int) -> float:
    """Return the remote assignments of a rank's tokens when every expert is chosen as often."""
    return tokens * top_k * layers * (ranks - 1) / ranks
