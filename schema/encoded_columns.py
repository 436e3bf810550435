"""Columns as Parquet stores them: a dictionary of values, and a code for each row.

Where values repeat, work is done once for each value, not once for each row.
"""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from perfledger.schema.intervals import Ints
from perfledger.schema.partition_input import Small


def encoded(values: pa.Array) -> pa.DictionaryArray:
    """Return a column with its dictionary, which is made where it has none."""
    return values if pa.types.is_dictionary(values.type) else values.dictionary_encode()


def codes(column: pa.DictionaryArray, *, null: int) -> Ints:
    """Return the codes of the rows, `null` for null."""
    found = column.indices.to_numpy(zero_copy_only=False)
    found = np.nan_to_num(found, nan=null) if column.null_count else found
    whole: Ints = found.astype(np.int64)
    return whole


def numbered(values: pa.Array, numbers: Mapping[str, int], *, other: int, null: int) -> Small:
    """Return the number of each row's text, `other` for unknown texts, `null` for null."""
    column = encoded(values)
    known = [numbers.get(text, other) for text in column.dictionary.to_pylist()]
    return np.array([*known, null], np.int8)[codes(column, null=len(known))]
