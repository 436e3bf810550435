"""The sealed answer: which fault is on, known to nobody until the answers are compared.

The file is written before the fault begins. Its digest is printed, so that whoever judges later
can show that the answer was not changed, and nobody can guess it from the digest (it is salted).
"""

import hashlib
import json
import os
import secrets
from dataclasses import asdict, dataclass
from pathlib import Path

from perfledger.schema.errors import PerfledgerError, UsageError

NO_FAULT = "none"


@dataclass(frozen=True, slots=True)
class Answer:
    """What is on: a name of the catalogue (or NO_FAULT) and its strength."""

    fault: str
    amount: float
    blamed: tuple[str, ...]
    started_wall_ns: int
    salt: str

    @property
    def digest(self) -> str:
        """SHA-256 (hex) of the answer with its salt."""
        return hashlib.sha256(_canonical(self)).hexdigest()


def new_salt() -> str:
    """Return a fresh salt."""
    return secrets.token_hex(16)


def seal(answer: Answer, path: Path, store: str) -> str:
    """Write an answer that only its owner can read; return its digest.

    Raises UsageError where the file exists, cannot be written, or lies in the store (where every
    analyzer would find it).
    """
    if _is_inside(path, store):
        raise UsageError("the answer must lie outside the store", where=str(path))
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except OSError as error:
        raise _unwritable(path, error) from None
    try:
        with open(handle, "wb") as file:
            file.write(_canonical(answer))
    except OSError as error:
        path.unlink()
        raise _unwritable(path, error) from None
    return answer.digest


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot write the answer: {error.strerror}", where=str(path))


def unseal(path: Path, digest: str | None = None) -> Answer:
    """Read an answer. Raises PerfledgerError if it is none, or not the one of this digest."""
    try:
        fields = json.loads(path.read_bytes())
        answer = Answer(**{**fields, "blamed": tuple(fields["blamed"])})
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PerfledgerError(f"cannot read the answer: {error}", where=str(path)) from None
    if digest is not None and answer.digest != digest:
        raise PerfledgerError("the answer is not the one that was sealed", where=str(path))
    return answer


def _canonical(answer: Answer) -> bytes:
    return json.dumps(asdict(answer), sort_keys=True, separators=(",", ":")).encode()


def _is_inside(path: Path, store: str) -> bool:
    if "://" in store and not store.startswith("file://"):
        return False
    folder = Path(store.removeprefix("file://")).resolve()
    return path.resolve().is_relative_to(folder)
