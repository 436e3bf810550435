"""The KV cache's memory: blocks, shared prefixes, swapped-out blocks, and what fits."""
