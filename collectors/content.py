"""Which keys are content and go no further; every way in asks here before anything is kept.

The list itself is schema/attributes.py. Nothing here, nor in the rest of this package, logs a
value or a key that came from outside: what was denied is counted.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from perfledger.schema.attributes import is_content

_LONGEST_REMEMBERED_KEY = 64


def is_denied(key: str) -> bool:
    """Return whether an attribute with this key is dropped."""
    return _remembered(key) if len(key) <= _LONGEST_REMEMBERED_KEY else is_content(key)


def is_denied_within(path: Sequence[str], key: str) -> bool:
    """Return whether `key`, nested in a map under the keys of `path`, is dropped.

    Dropped are a key that is content by itself and one that is so together with its parents:
    {"gen_ai": {"prompt": …}} is `gen_ai.prompt`, wherever it stands.
    """
    whole = [*path, key]
    return any(is_denied(".".join(whole[start:])) for start in range(len(whole)))


def status_repeats_content(event_names: Iterable[str]) -> bool:
    """Return whether a span's status message must go.

    SDKs copy a recorded exception's message, which is content, into the status. Other messages
    stay, cut like any value: without one an error cannot be told from the next.
    """
    return "exception" in event_names


@lru_cache(maxsize=4096)
def _remembered(key: str) -> bool:
    return is_content(key)
