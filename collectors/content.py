"""Which keys are content and go no further; every way in asks here before anything is kept.

The list itself is schema/attributes.py. Nothing here, nor in the rest of this package, logs a
value or a key that came from outside: what was denied is counted.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache

from perfledger.schema.attributes import (
    CONTENT_KEYS,
    HARMLESS_KEYS,
    LONGEST_CONTENT_KEY,
    is_content,
)

_LONGEST_REMEMBERED_KEY = 64
# No more of a joined name is read than could match, and what follows it.
_NAME_LENGTH = LONGEST_CONTENT_KEY + 1


def _ends_of(keys: Iterable[str]) -> frozenset[str]:
    """Return keys without none, one or more of their first parts."""
    parts = [key.split(".") for key in keys]
    return frozenset(".".join(of[start:]) for of in parts for start in range(len(of)))


_ENDS, _HARMLESS_ENDS = _ends_of(CONTENT_KEYS), _ends_of(HARMLESS_KEYS)


def is_denied(key: str) -> bool:
    """Return whether an attribute with this key is dropped."""
    return _remembered(key) if len(key) <= _LONGEST_REMEMBERED_KEY else is_content(key)


def is_denied_within(path: Sequence[str], key: str) -> bool:
    """Return whether `key`, nested in a map under the keys of `path`, is dropped.

    Dropped are a key that is content by itself and one that is so together with its parents:
    {"gen_ai": {"prompt": …}} is `gen_ai.prompt`, wherever it stands. None of the parents may be
    denied themselves. So only names that end in `key` are looked at, from it outwards, and no
    further than they could still become content: a few steps, however deep it is.
    """
    name = key[:_NAME_LENGTH]
    for parent in reversed(path):
        if is_denied(name):
            return True
        if not _begins_with_an_end(name):
            return _is_below_harmless(path)
        name = f"{parent[:_NAME_LENGTH]}.{name}"[:_NAME_LENGTH]
    return is_denied(name) or _is_below_harmless(path)


def _is_below_harmless(path: Sequence[str]) -> bool:
    """Return whether the path ends in a key that is no content, though its children are."""
    name = ""
    for parent in reversed(path):
        name = f"{parent[:_NAME_LENGTH].lower()}.{name}" if name else parent[:_NAME_LENGTH].lower()
        if name not in _HARMLESS_ENDS:
            return False
        if name in HARMLESS_KEYS:
            return True
    return False


def status_repeats_content(event_names: Iterable[str]) -> bool:
    """Return whether a span's status message must go.

    SDKs copy a recorded exception's message, which is content, into the status. Other messages
    stay, cut like any value: without one an error cannot be told from the next.
    """
    return "exception" in event_names


@lru_cache(maxsize=4096)
def _begins_with_an_end(name: str) -> bool:
    """Return whether parents could make content of a name, or of what it is a child of."""
    name = name.lower()
    end = len(name)
    while end > 0:
        if name[:end] in _ENDS:
            return True
        end = name.rfind(".", 0, end)
    return False


@lru_cache(maxsize=4096)
def _remembered(key: str) -> bool:
    return is_content(key)
