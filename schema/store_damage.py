"""What is wrong with a file, told by its name: polars says what, but not where."""

from collections.abc import Iterable, Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from perfledger.schema.columns import Table
from perfledger.schema.errors import PartialInputError
from perfledger.schema.store_files import is_outdated, is_whole
from perfledger.schema.store_places import LocalPlace, Place
from perfledger.schema.store_snapshot import StoredFile

_MAGIC = b"PAR1"
_SMALLEST_BYTES = 12
_FIX = "`perfledger store verify` lists every damaged file"


def require_whole(place: Place, files: Iterable[StoredFile]) -> None:
    """Raise PartialInputError where a file was cut off: its end is looked at, no more.

    Of objects in a bucket only the size is, which costs nothing. A file that has gone meanwhile
    is left to the reader.
    """
    for file in files:
        cut = file.bytes < _SMALLEST_BYTES
        if not cut and isinstance(place, LocalPlace):
            try:
                with open(place.root / file.key, "rb", buffering=0) as source:
                    source.seek(-len(_MAGIC), 2)
                    cut = source.read(len(_MAGIC)) != _MAGIC
            except FileNotFoundError:
                continue
        if cut:
            raise _damage(place, file, "it is cut off")


def explain(place: Place, files: Sequence[StoredFile], table: Table) -> PartialInputError | None:
    """Return what is wrong with the first file that cannot be read, for an error's sake.

    Reads the files whole until one is found; None where all are fine.
    """
    for file in files:
        try:
            content = place.read(file.key)
            if not is_whole(content):
                return _damage(place, file, "its checksum differs")
            with pq.ParquetFile(pa.BufferReader(content)) as parquet:
                if is_outdated(parquet.schema_arrow, table):
                    return PartialInputError(
                        "a file of an older version of perfledger",
                        where=place.address(file.key),
                        fix="`perfledger store compact --min-age 0` writes it anew",
                    )
                for _ in parquet.iter_batches(use_threads=False):
                    pass
        except FileNotFoundError:
            continue
        except (pa.ArrowException, OSError, ValueError) as error:
            return _damage(place, file, (str(error).splitlines() or [type(error).__name__])[0])
    return None


def missing_file(place: Place, file: StoredFile) -> PartialInputError:
    """Return the error for a merged file that a marker names and that is not there."""
    return PartialInputError(
        "missing file: it is not there, but its marker is",
        where=place.address(file.key),
        fix="put it back from a copy; `perfledger store verify` lists every one",
    )


def _damage(place: Place, file: StoredFile, problem: str) -> PartialInputError:
    return PartialInputError(f"damaged file: {problem}", where=place.address(file.key), fix=_FIX)
