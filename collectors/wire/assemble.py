"""A batch of scanned spans as one Arrow table, in the order in which it is written.

Nothing is moved twice: every column is gathered straight from what the scan noted.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from perfledger.collectors.otlp_origin import Origin
from perfledger.collectors.wire import columns as at
from perfledger.collectors.wire import gather
from perfledger.collectors.wire.columns import Shorts
from perfledger.collectors.wire.keys import PROMOTED
from perfledger.collectors.wire.protobuf import Bytes
from perfledger.collectors.wire.span_batch import SpanBatch
from perfledger.schema.tables import EVENTS, KEY_VALUE, LINKS, SPANS

# Kind 0, unspecified, is read as internal (OTLP, SpanKind).
_KINDS = ("internal", "server", "client", "producer", "consumer")
_STATUSES = ("unset", "ok", "error")
_OF_ORIGIN = (
    *("run_id", "service_name", "service_instance_id", "boot_id", "resource_attributes"),
    *("scope_name", "scope_version"),
)
_TYPES = {column.name: column.type for column in SPANS.columns}

Mask = NDArray[np.bool_]


def in_order(batch: SpanBatch) -> Shorts:
    """Return the spans of a batch by trace id, then start: the order of SPANS."""
    columns, rows = batch.columns, batch.rows
    traces = columns.spans[at.TRACE, :rows]
    high = gather.words(columns.data, traces)
    low = gather.words(columns.data, traces + 8)
    order = np.lexsort((columns.times[at.START_NS, :rows], low, high))
    return order.astype(np.int32)


def spans_table(batch: SpanBatch, order: Shorts) -> pa.Table:
    """Return the rows of SPANS of some spans of a batch, in this order.

    Texts of low cardinality are dictionaries; `Store.write` takes them so.
    """
    made = _own_columns(batch, order)
    made |= _columns_of_origin(batch, order)
    made |= _promoted_columns(batch, order)
    made |= _nested_columns(batch, order)
    made["kept_share"] = pa.nulls(order.size, pa.float64())
    fields = [field.with_type(made[field.name].type) for field in SPANS.arrow()]
    schema = pa.schema(fields, metadata=SPANS.arrow().metadata)
    return pa.Table.from_arrays([made[name] for name in SPANS.names()], schema=schema)


def _own_columns(batch: SpanBatch, order: Shorts) -> dict[str, pa.Array]:
    columns = batch.columns
    spans = np.ascontiguousarray(columns.spans.T[order].T)
    times = np.ascontiguousarray(columns.times.T[order].T)
    group = spans[at.GROUP]
    cut = spans[at.CUT] + np.array([origin.cut for origin in batch.origins], np.int32)[group]
    return {
        "trace_id": _ids(batch, spans[at.TRACE], 16),
        "span_id": _ids(batch, spans[at.SPAN], 8),
        "parent_span_id": _ids(batch, spans[at.PARENT], 8),
        "name": _texts(batch, spans[at.NAME], spans[at.NAME_LENGTH]),
        "kind": _coded(np.maximum(spans[at.KIND] - 1, 0), _KINDS),
        "start_ns": pa.array(times[at.START_NS]),
        "end_ns": pa.array(times[at.END_NS]),
        "time_repaired": pa.array(spans[at.REPAIRED_TIME].astype(bool)),
        "status": _coded(spans[at.STATUS], _STATUSES),
        "status_message": _texts_or_null(batch, spans[at.MESSAGE], spans[at.MESSAGE_LENGTH]),
        "trace_state": _texts_or_null(batch, spans[at.STATE], spans[at.STATE_LENGTH]),
        "flags": pa.array(spans[at.FLAGS].astype(np.uint32).astype(np.int64)),
        "values_cut": pa.array(cut.astype(np.int32)),
        "received_ns": pa.array(np.array(batch.received_ns, np.int64)[group]),
    }


def _columns_of_origin(batch: SpanBatch, order: Shorts) -> dict[str, pa.Array]:
    """Return what all spans of a group share, from a dictionary of the distinct ones."""
    group = batch.columns.spans[at.GROUP][order]
    distinct = {id(origin): origin for origin in batch.origins}
    number = {key: index for index, key in enumerate(distinct)}
    of_group = np.array([number[id(origin)] for origin in batch.origins], np.int32)
    rows = pa.array(of_group[group])
    return {
        name: _dictionary(rows, [_shared(origin, name) for origin in distinct.values()])
        for name in _OF_ORIGIN
    }


def _dictionary(rows: pa.Array, values: Sequence[object]) -> pa.Array:
    """Return texts as a dictionary of distinct ones: Parquet need not look at each row again."""
    found = pa.DictionaryArray.from_arrays(rows, pa.array(values, pa.string()))
    if len(set(values)) == len(values) and None not in values:
        return found
    return found.dictionary_decode().dictionary_encode()


def _shared(origin: Origin, name: str) -> object:
    if name == "scope_name":
        return origin.scope_name
    return origin.scope_version if name == "scope_version" else origin.columns.get(name)


def _promoted_columns(batch: SpanBatch, order: Shorts) -> dict[str, pa.Array]:
    found = gather.promoted(batch.columns.attributes, batch.columns.spans, order, len(PROMOTED))
    return {
        name: _promoted_column(batch, _TYPES[name], found[number])
        for number, name in enumerate(PROMOTED)
    }


def _promoted_column(batch: SpanBatch, kind: pa.DataType, rows: Shorts) -> pa.Array:
    is_there = rows >= 0
    if not is_there.any():
        return pa.nulls(rows.size, kind)
    if kind == pa.string():
        return _attribute_texts(batch, rows, is_there)
    values = gather.numbers(batch.columns.numbers, rows)
    return _with_nulls(values.astype(kind.to_pandas_dtype()), is_there, kind)


def _nested_columns(batch: SpanBatch, order: Shorts) -> dict[str, pa.Array]:
    spans = batch.columns.spans
    first, last = spans[at.FIRST_ATTRIBUTE], spans[at.LAST_ATTRIBUTE]
    return {
        "attributes": _pairs(batch, first, last, at.OF_SPAN, order),
        "events": _events(batch, order),
        "links": _links(batch, order),
    }


def _events(batch: SpanBatch, order: Shorts) -> pa.Array:
    spans, events = batch.columns.spans, batch.columns.events
    offsets, rows = gather.children(spans[at.FIRST_EVENT], spans[at.LAST_EVENT], order)
    times = batch.columns.event_times[rows]
    values = [
        # Unsigned on the wire: what is negative here is after the year 2262.
        _with_nulls(times, times > 0, pa.int64()),
        _texts(batch, events[at.EVENT_NAME][rows], events[at.EVENT_NAME_LENGTH][rows]),
        _pairs(batch, events[at.EVENT_FIRST], events[at.EVENT_LAST], at.OF_EVENT, rows),
    ]
    return _lists(offsets, _structs(values, EVENTS.value_type))


def _links(batch: SpanBatch, order: Shorts) -> pa.Array:
    spans, links = batch.columns.spans, batch.columns.links
    offsets, rows = gather.children(spans[at.FIRST_LINK], spans[at.LAST_LINK], order)
    phase, tokens = links[at.LINK_PHASE][rows], links[at.LINK_TOKENS][rows]
    values = [
        _ids(batch, links[at.LINK_TRACE][rows], 16).cast(pa.binary()),
        _ids(batch, links[at.LINK_SPAN][rows], 8).cast(pa.binary()),
        _attribute_texts(batch, phase, phase >= 0),
        _with_nulls(gather.numbers(batch.columns.numbers, tokens), tokens >= 0, pa.int64()),
        _pairs(batch, links[at.LINK_FIRST], links[at.LINK_LAST], at.OF_LINK, rows),
    ]
    return _lists(offsets, _structs(values, LINKS.value_type))


def _pairs(
    batch: SpanBatch, first: Shorts, last: Shorts, owner: int, parents: Shorts
) -> pa.ListArray:
    """Return the attributes of some spans, events or links as a KEY_VALUES column."""
    columns = batch.columns
    offsets, rows = gather.pairs(columns.attributes, first, last, owner, parents)
    places, keys, text, octets, nested, values, bits = gather.pair_values(
        columns.data, columns.attributes, columns.numbers, rows
    )
    size = rows.size
    leaves = [
        pa.Array.from_buffers(pa.string(), size, _text_buffers(None, places[0], keys)),
        _leaf(pa.string(), size, *_text_buffers(bits[at.TEXT], places[1], text)),
        _leaf(pa.int64(), size, pa.py_buffer(bits[at.INT]), pa.py_buffer(values)),
        _leaf(pa.float64(), size, pa.py_buffer(bits[at.DOUBLE]), pa.py_buffer(values)),
        _leaf(pa.bool_(), size, pa.py_buffer(bits[at.BOOL]), _bits(values != 0)),
        _leaf(pa.binary(), size, *_text_buffers(bits[at.BYTES], places[2], octets)),
        _leaf(pa.string(), size, *_text_buffers(bits[at.NESTED], places[3], nested)),
    ]
    return _lists(offsets, _structs(leaves, KEY_VALUE))


def _leaf(kind: pa.DataType, size: int, *buffers: pa.Buffer) -> pa.Array:
    found = pa.Array.from_buffers(kind, size, list(buffers))
    return pa.nulls(size, kind) if found.null_count == size else found


def _text_buffers(bits: Bytes | None, offsets: Shorts, data: Bytes) -> list[pa.Buffer | None]:
    return [None if bits is None else pa.py_buffer(bits), pa.py_buffer(offsets), pa.py_buffer(data)]


def _attribute_texts(batch: SpanBatch, rows: Shorts, is_there: Mask) -> pa.Array:
    """Return the values of attributes as text; null where `is_there` is not."""
    attributes = batch.columns.attributes
    offsets, data = gather.texts(
        batch.columns.data, attributes[at.VALUE], attributes[at.VALUE_LENGTH], rows
    )
    buffers = [_bitmap(is_there), pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.string(), rows.size, buffers)


def _texts(batch: SpanBatch, starts: Shorts, lengths: Shorts) -> pa.Array:
    rows = np.arange(starts.size, dtype=np.int32)
    offsets, data = gather.texts(
        batch.columns.data, np.ascontiguousarray(starts), np.ascontiguousarray(lengths), rows
    )
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.string(), starts.size, buffers)


def _texts_or_null(batch: SpanBatch, starts: Shorts, lengths: Shorts) -> pa.Array:
    """Return texts, null where one is empty: protobuf's way to say absent."""
    if not lengths.any():
        return pa.nulls(starts.size, pa.string())
    texts = _texts(batch, starts, lengths)
    buffers = [_bitmap(lengths > 0), *texts.buffers()[1:]]
    return pa.Array.from_buffers(pa.string(), len(texts), buffers)


def _ids(batch: SpanBatch, starts: Shorts, size: int) -> pa.Array:
    data = gather.fixed(batch.columns.data, np.ascontiguousarray(starts), size)
    buffers = [_bitmap(starts >= 0), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(size), starts.size, buffers)


def _coded(codes: Shorts, names: Sequence[str]) -> pa.Array:
    return _dictionary(pa.array(codes), names)


def _with_nulls(values: NDArray[np.generic], is_there: Mask, kind: pa.DataType) -> pa.Array:
    buffers = [_bitmap(is_there), pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(kind, values.size, buffers)


def _bitmap(is_there: Mask) -> pa.Buffer | None:
    return None if is_there.all() else _bits(is_there)


def _bits(mask: Mask) -> pa.Buffer:
    return pa.py_buffer(np.packbits(mask, bitorder="little"))


def _structs(values: list[pa.Array], kind: pa.StructType) -> pa.Array:
    return pa.StructArray.from_arrays(values, fields=list(kind))


def _lists(offsets: Shorts, values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(offsets), values)
