"""One file of the store: how rows become Parquet, and how the rows of older files are read.

Measured on the reference payload: zstd at level 1, dictionaries where values repeat, delta packing
on times; statistics only on what is searched for. Row groups are small because a trace is found by
decoding one of them. The footer carries a checksum of the whole file, its own place taken as zeros.
"""

import json
import zlib
from collections.abc import Iterable, Iterator

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from perfledger.schema.columns import Table
from perfledger.schema.errors import PartialInputError
from perfledger.schema.store_pruning import with_empty
from perfledger.schema.tables import KEY_VALUES

ROW_GROUP_ROWS = 16_384
# Delta packing beats dictionaries on these; the others compress best with one (measured).
_DELTA_COLUMNS = frozenset(
    {"start_ns", "end_ns", "time_ns", "received_ns", "step_seq", "token_times_ns"}
)
_CHECKSUM = b"perfledger.crc32"
_NO_CHECKSUM = b"0" * 8
_FOOTER_END_BYTES = 65_536  # what follows the checksum in a footer is far shorter
# Never the same twice, or nearly so: a dictionary would only be tried and given up.
_PLAIN_COLUMNS = frozenset({"span_id", "parent_span_id"})
# The numbers of key/values: their bytes one by one compress best, and cost no hashing (measured:
# 7 bytes less a span than dictionaries on the reference payload).
_SPLIT_LEAVES = (".element.int", ".element.double")
_SEARCHED = frozenset({"trace_id", "start_ns", "end_ns", "time_ns", "arrival_ns", "received_ns"})


def encode(batches: Iterable[pa.Table], table: Table) -> pa.Buffer:
    """Return a Parquet file of rows; `batches` is not held in memory. Columns may be missing.

    Texts may be dictionary-encoded in every batch, within lists too: they are not hashed again.
    """
    sink = pa.BufferOutputStream()
    writer: pq.ParquetWriter | None = None
    for batch in batches:
        if writer is None:
            writer = pq.ParquetWriter(sink, batch.schema, **_settings(batch.schema))
        writer.write_table(batch, row_group_size=ROW_GROUP_ROWS)
    if writer is None:
        writer = pq.ParquetWriter(sink, table.arrow(), **_settings(table.arrow()))
    writer.add_key_value_metadata({_CHECKSUM.decode(): _NO_CHECKSUM.decode()})
    writer.close()
    return _seal(sink.getvalue())


def has_checksum(content: pa.Buffer) -> bool:
    """Return whether a file has a checksum: all that this version writes have one."""
    return _checksum_at(content) is not None


def is_whole(content: pa.Buffer) -> bool:
    """Return whether a file is as it was written, to the bit; True for one without a checksum."""
    at = _checksum_at(content)
    if at is None:
        return True
    return bytes(memoryview(content)[at : at + 8]) == _checksum(content, at)


def as_declared(rows: pa.Table, table: Table) -> pa.Table:
    """Return rows with the columns of a table in their order and types.

    What is missing, because it is empty or the file is older, is null; key/values that are text by
    now become a JSON object; dictionaries of the declared type stay. Raises PartialInputError for
    any other difference.
    """
    arrays = []
    for field in table.arrow():
        if field.name not in rows.column_names:
            arrays.append(pa.nulls(rows.num_rows, field.type))
        else:
            arrays.append(_as_type(rows[field.name], field))
    fields = [
        field.with_type(array.type) for field, array in zip(table.arrow(), arrays, strict=True)
    ]
    return pa.table(arrays, schema=pa.schema(fields, metadata=table.arrow().metadata))


def is_outdated(schema: pa.Schema, table: Table) -> bool:
    """Return whether a file has a column of another type than is declared now."""
    for field in table.arrow():
        kind = schema.field(field.name).type if field.name in schema.names else field.type
        nested = pa.types.is_nested(kind) and kind.id == field.type.id  # fields may be missing
        if kind != field.type and not nested:
            return True
    return False


def sort_order(rows: pa.Table, table: Table) -> pa.Array:
    """Return the row numbers in the order that files of this table have."""
    return pc.sort_indices(rows, sort_keys=[(name, "ascending") for name in table.sort])


def high_words(trace_ids: pa.ChunkedArray) -> np.ndarray[tuple[int], np.dtype[np.uint64]]:
    """Return the first 8 bytes of each 16-byte id as a number, in the order of the ids."""
    parts = [
        np.frombuffer(chunk.buffers()[1], dtype=">u8")[2 * chunk.offset :][: 2 * len(chunk) : 2]
        for chunk in trace_ids.chunks
        if len(chunk)
    ]
    return np.concatenate([np.empty(0, ">u8"), *parts]).astype(np.uint64)


def _seal(content: pa.Buffer) -> pa.Buffer:
    at = _checksum_at(content)
    assert at is not None
    sealed = bytearray(content)
    sealed[at : at + 8] = _checksum(content, at)
    return pa.py_buffer(sealed)


def _checksum_at(content: pa.Buffer) -> int | None:
    """Return where in a file its checksum is: in Thrift a value follows type and length."""
    begin = max(0, content.size - _FOOTER_END_BYTES)
    found = bytes(memoryview(content)[begin:]).rfind(_CHECKSUM + b"\x18\x08")
    return None if found < 0 else begin + found + len(_CHECKSUM) + 2


def _checksum(content: pa.Buffer, at: int) -> bytes:
    view = memoryview(content)
    before = zlib.crc32(_NO_CHECKSUM, zlib.crc32(view[:at]))
    return f"{zlib.crc32(view[at + 8 :], before):08x}".encode()


def _as_type(column: pa.ChunkedArray, field: pa.Field) -> pa.ChunkedArray:
    kind = column.type
    if _is_declared(kind, field.type):
        return column
    try:
        if field.type == pa.string() and pa.types.is_list(kind):
            pairs = with_empty(column, KEY_VALUES).to_pylist()
            return pa.chunked_array([[_as_json(one) for one in pairs]], field.type)
        return with_empty(column, field.type)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise PartialInputError(
            f"column {field.name} is {kind}, not {field.type}",
            fix="this file was written by another version of perfledger",
        ) from error


def _is_declared(kind: pa.DataType, declared: pa.DataType) -> bool:
    """Return whether a type is the declared one, but for dictionaries of texts at any level."""
    if pa.types.is_dictionary(kind):
        return bool(kind.value_type == declared)
    if pa.types.is_list(kind) and pa.types.is_list(declared):
        return _is_declared(kind.value_type, declared.value_type)
    if pa.types.is_struct(kind) and pa.types.is_struct(declared):
        return [field.name for field in kind] == [field.name for field in declared] and all(
            _is_declared(one.type, other.type) for one, other in zip(kind, declared, strict=True)
        )
    return bool(kind == declared)


def _as_json(pairs: list[dict[str, object]] | None) -> str | None:
    """Return typed key/values as a JSON object; bytes are told as hex."""
    if pairs is None:
        return None
    told: dict[str, object] = {}
    for pair in pairs:
        values = [value for name, value in pair.items() if name != "key" and value is not None]
        value = values[0] if values else None
        if pair.get("json") is not None:
            value = json.loads(str(value))
        told[str(pair["key"])] = value.hex() if isinstance(value, bytes) else value
    return json.dumps(told, separators=(",", ":"), ensure_ascii=False)


def _settings(schema: pa.Schema) -> dict[str, object]:
    """Return how columns are written."""
    leaves = [leaf for field in schema for leaf in leaf_names(field)]
    packed = [leaf for leaf in leaves if not _DELTA_COLUMNS.isdisjoint(leaf.split("."))]
    split = [leaf for leaf in leaves if leaf.endswith(_SPLIT_LEAVES)]
    encodings = dict.fromkeys(packed, "DELTA_BINARY_PACKED")
    encodings |= dict.fromkeys(split, "BYTE_STREAM_SPLIT")
    return {
        "compression": "zstd",
        "compression_level": 1,
        "use_dictionary": [leaf for leaf in leaves if leaf not in {*encodings, *_PLAIN_COLUMNS}],
        "column_encoding": encodings,
        "write_statistics": [leaf for leaf in leaves if leaf in _SEARCHED],
        "write_batch_size": 8192,
        "store_schema": False,  # a dictionary in memory would else come back as one
    }


def leaf_names(field: pa.Field) -> Iterator[str]:
    """Yield Parquet's paths of the values in a column; a nested one has several."""
    kind = field.type
    if pa.types.is_list(kind):
        element = kind.value_field.with_name("element")
        yield from (f"{field.name}.list.{leaf}" for leaf in leaf_names(element))
    elif pa.types.is_struct(kind):
        yield from (f"{field.name}.{leaf}" for child in kind for leaf in leaf_names(child))
    else:
        yield field.name
