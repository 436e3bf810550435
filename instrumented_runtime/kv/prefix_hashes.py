"""Names of KV blocks by content: a hash of every token up to the block's end, chained.

Two blocks have the same name only if they hold the same tokens after the same tokens, for the
same tenant and the same model: so a block found by its name can be used in place of computing it.
The chain is the one of vLLM's prefix caching; the salt keeps tenants apart, whose timing would
otherwise tell one what another has asked.
"""

import hashlib
from array import array
from collections.abc import Sequence

DIGEST_BYTES = 16


def prefix_salt(tenant: str, *identity: str) -> bytes:
    """Return the salt of a tenant under one model: hashes of weights, tokenizer and template."""
    digest = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for part in (tenant, *identity):
        encoded = part.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)
    return digest.digest()


def block_hashes(tokens: Sequence[int], block_size: int, salt: bytes) -> list[bytes]:
    """Return the names of the full blocks of `tokens`, in their order; salt as `prefix_salt`."""
    hashes: list[bytes] = []
    extend_hashes(hashes, tokens, block_size, salt)
    return hashes


def extend_hashes(hashes: list[bytes], tokens: Sequence[int], block_size: int, salt: bytes) -> None:
    """Append the names of the full blocks of `tokens` behind the `len(hashes)` first ones."""
    previous = hashes[-1] if hashes else salt
    for start in range(len(hashes) * block_size, len(tokens) - block_size + 1, block_size):
        content = array("q", tokens[start : start + block_size]).tobytes()
        previous = hashlib.blake2b(previous + content, digest_size=DIGEST_BYTES).digest()
        hashes.append(previous)
