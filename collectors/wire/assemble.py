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
from perfledger.collectors.wire.columns import Ints, Shorts
from perfledger.collectors.wire.keys import PROMOTED
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
    traces, starts_ns = columns.spans[at.TRACE, :rows], columns.times[at.START_NS, :rows]
    high = gather.words(columns.data, traces)
    low = gather.words(columns.data, traces + 8)
    order = np.argsort(high).astype(np.int32)
    if not gather.sort_runs(order, high, low, starts_ns):
        order = np.lexsort((starts_ns, low, high)).astype(np.int32)
    return order


def spans_table(batch: SpanBatch, order: Shorts) -> pa.Table:
    """Return the rows of SPANS of some spans of a batch, in this order.

    Texts of low cardinality are dictionaries; `Store.write` takes them so.
    """
    spans = gather.in_order(batch.columns.spans, order)
    made = _own_columns(batch, spans, order)
    made |= _columns_of_origin(batch, spans[at.GROUP])
    made |= _columns_of_attributes(batch, spans)
    made |= {"events": _events(batch, spans), "links": _links(batch, spans)}
    made["kept_share"] = pa.nulls(order.size, pa.float64())
    fields = [field.with_type(made[field.name].type) for field in SPANS.arrow()]
    schema = pa.schema(fields, metadata=SPANS.arrow().metadata)
    return pa.Table.from_arrays([made[name] for name in SPANS.names()], schema=schema)


def _own_columns(batch: SpanBatch, spans: Shorts, order: Shorts) -> dict[str, pa.Array]:
    times = np.ascontiguousarray(batch.columns.times.T[order].T)
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


def _columns_of_origin(batch: SpanBatch, group: Shorts) -> dict[str, pa.Array]:
    """Return what all spans of a group share, from a dictionary of the distinct ones."""
    distinct = {id(origin): origin for origin in batch.origins}
    number = {key: index for index, key in enumerate(distinct)}
    of_group = np.array([number[id(origin)] for origin in batch.origins], np.int32)
    rows = of_group[group]
    return {
        name: _dictionary(rows, [_shared(origin, name) for origin in distinct.values()])
        for name in _OF_ORIGIN
    }


def _dictionary(rows: Shorts, values: Sequence[object]) -> pa.Array:
    """Return texts as a dictionary of distinct ones: Parquet need not look at each row again."""
    distinct = [value for value in dict.fromkeys(values) if value is not None]
    if len(distinct) != len(values):
        codes = {None: -1} | {value: code for code, value in enumerate(distinct)}
        rows = np.array([codes[value] for value in values], np.int32)[rows]
    is_null = rows < 0
    indices = pa.array(rows, mask=is_null) if is_null.any() else pa.array(rows)
    return pa.DictionaryArray.from_arrays(indices, pa.array(distinct, pa.string()))


def _shared(origin: Origin, name: str) -> object:
    if name == "scope_name":
        return origin.scope_name
    return origin.scope_version if name == "scope_version" else origin.columns.get(name)


def _columns_of_attributes(batch: SpanBatch, spans: Shorts) -> dict[str, pa.Array]:
    first, last = spans[at.FIRST_ATTRIBUTE], spans[at.LAST_ATTRIBUTE]
    pairs, promoted = _attributes(batch, at.OF_SPAN, first, last, len(PROMOTED))
    made = {
        name: _promoted_column(batch, _TYPES[name], *(of[number] for of in promoted))
        for number, name in enumerate(PROMOTED)
    }
    return made | {"attributes": pairs}


def _promoted_column(
    batch: SpanBatch, kind: pa.DataType, starts: Shorts, lengths: Shorts, values: Ints
) -> pa.Array:
    is_there = starts >= 0
    if not is_there.any():
        return pa.nulls(starts.size, kind)
    if kind == pa.string():
        return _texts(batch, starts, lengths, is_there)
    return _with_nulls(values.astype(kind.to_pandas_dtype()), is_there, kind)


def _events(batch: SpanBatch, spans: Shorts) -> pa.Array:
    offsets, rows = gather.children(spans[at.FIRST_EVENT], spans[at.LAST_EVENT])
    events = gather.in_order(batch.columns.events, rows)
    times = batch.columns.event_times[rows]
    first, last = events[at.EVENT_FIRST], events[at.EVENT_LAST]
    values = [
        # Unsigned on the wire: what is negative here is after the year 2262.
        _with_nulls(times, times > 0, pa.int64()),
        _texts(batch, events[at.EVENT_NAME], events[at.EVENT_NAME_LENGTH]),
        _attributes(batch, at.OF_EVENT, first, last)[0],
    ]
    return _lists(offsets, _structs(values, EVENTS.value_type))


def _links(batch: SpanBatch, spans: Shorts) -> pa.Array:
    offsets, rows = gather.children(spans[at.FIRST_LINK], spans[at.LAST_LINK])
    links = gather.in_order(batch.columns.links, rows)
    phase, tokens = links[at.LINK_PHASE], links[at.LINK_TOKENS]
    attributes, row = batch.columns.attributes, np.maximum(phase, 0)
    text, length = attributes[at.VALUE][row], attributes[at.VALUE_LENGTH][row]
    number = batch.columns.numbers[np.maximum(tokens, 0)]
    values = [
        _ids(batch, links[at.LINK_TRACE], 16).cast(pa.binary()),
        _ids(batch, links[at.LINK_SPAN], 8).cast(pa.binary()),
        _texts(batch, np.where(phase >= 0, text, -1).astype(np.int32), length, phase >= 0),
        _with_nulls(number, tokens >= 0, pa.int64()),
        _attributes(batch, at.OF_LINK, links[at.LINK_FIRST], links[at.LINK_LAST])[0],
    ]
    return _lists(offsets, _structs(values, LINKS.value_type))


def _attributes(
    batch: SpanBatch, owner: int, first: Shorts, last: Shorts, promoted: int = 0
) -> tuple[pa.ListArray, gather.Promoted]:
    """Return the attributes of some spans, events or links as a KEY_VALUES column.

    Keys are a dictionary, as they were told apart when they came: nobody looks at them again. And
    what goes into the first `promoted` columns.
    """
    columns = batch.columns
    pairs, others = gather.attributes_of(
        *(columns.attributes, columns.numbers, columns.keys, len(batch.key_names)),
        *(owner, first, last, promoted),
    )
    offsets, codes, used, values, starts, lengths, bits, sums = pairs
    size = codes.size

    def leaf(kind: int, arrow: pa.DataType, *buffers: pa.Buffer) -> pa.Array:
        if not sums[0, kind]:
            return pa.nulls(size, arrow)
        found = [pa.py_buffer(bits[kind]), *buffers]
        return pa.Array.from_buffers(arrow, size, found, size - int(sums[0, kind]))

    def texts(kind: int, arrow: pa.DataType) -> pa.Array:
        if not sums[0, kind]:
            return pa.nulls(size, arrow)
        found = gather.texts_of_kind(columns.data, starts, lengths, bits[kind], size, sums[1, kind])
        return leaf(kind, arrow, *map(pa.py_buffer, found))

    leaves = [
        _dictionary(codes, [batch.key_names[name] for name in used.tolist()]),
        texts(at.TEXT, pa.string()),
        leaf(at.INT, pa.int64(), pa.py_buffer(values)),
        leaf(at.DOUBLE, pa.float64(), pa.py_buffer(values)),
        leaf(at.BOOL, pa.bool_(), _bits(values != 0)),
        texts(at.BYTES, pa.binary()),
        texts(at.NESTED, pa.string()),
    ]
    return _lists(offsets, _structs(leaves, KEY_VALUE)), others


def _texts(
    batch: SpanBatch, starts: Shorts, lengths: Shorts, is_there: Mask | None = None
) -> pa.Array:
    """Return texts; null where `is_there` is not."""
    offsets, data = gather.texts(batch.columns.data, starts, lengths)
    buffers = [None if is_there is None else _bitmap(is_there), pa.py_buffer(offsets)]
    return pa.Array.from_buffers(pa.string(), starts.size, [*buffers, pa.py_buffer(data)])


def _texts_or_null(batch: SpanBatch, starts: Shorts, lengths: Shorts) -> pa.Array:
    """Return texts, null where one is empty: protobuf's way to say absent."""
    if not lengths.any():
        return pa.nulls(starts.size, pa.string())
    return _texts(batch, starts, lengths, lengths > 0)


def _ids(batch: SpanBatch, starts: Shorts, size: int) -> pa.Array:
    data = gather.fixed(batch.columns.data, starts, size)
    buffers = [_bitmap(starts >= 0), pa.py_buffer(data)]
    return pa.Array.from_buffers(pa.binary(size), starts.size, buffers)


def _coded(codes: Shorts, names: Sequence[str]) -> pa.Array:
    return _dictionary(codes, names)


def _with_nulls(values: NDArray[np.generic], is_there: Mask, kind: pa.DataType) -> pa.Array:
    buffers = [_bitmap(is_there), pa.py_buffer(np.ascontiguousarray(values))]
    return pa.Array.from_buffers(kind, values.size, buffers)


def _bitmap(is_there: Mask) -> pa.Buffer | None:
    return None if is_there.all() else _bits(is_there)


def _bits(mask: Mask) -> pa.Buffer:
    return pa.py_buffer(np.packbits(mask, bitorder="little"))


def _structs(values: list[pa.Array], kind: pa.StructType) -> pa.Array:
    fields = [field.with_type(of.type) for field, of in zip(kind, values, strict=True)]
    return pa.StructArray.from_arrays(values, fields=fields)


def _lists(offsets: Shorts, values: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array(offsets), values)
