"""OTLP's messages as we read them: the same on the wire, but nothing in them can spoil the rest.

Made from the official descriptors with two changes. Every `string` is `bytes`, so that one string
that is not UTF-8 is repaired alone where protobuf would refuse the whole request. And the elements
of arrays and maps are left as bytes, read one level at a time (`ANY_VALUE`, `KEY_VALUE`), so that
the depth of a value is our limit and not the parser's stack.
"""

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import FileDescriptor
from google.protobuf.descriptor_pb2 import FieldDescriptorProto, FileDescriptorProto
from google.protobuf.message import Message
from opentelemetry.proto.collector.logs.v1 import logs_service_pb2
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2

_ROOTS = (
    trace_service_pb2.DESCRIPTOR,
    metrics_service_pb2.DESCRIPTOR,
    logs_service_pb2.DESCRIPTOR,
)
_COMMON = "opentelemetry.proto.common.v1."
# Fields whose elements stay bytes until they are asked for.
_LAZY = frozenset({("ArrayValue", "values"), ("KeyValueList", "values")})
_VALUE = ("KeyValue", "value")


def _files(of: FileDescriptor, found: dict[str, FileDescriptor]) -> None:
    """Collect a file and what it imports, each after its imports."""
    for imported in of.dependencies:
        _files(imported, found)
    found.setdefault(of.name, of)


def _relaxed(of: FileDescriptor, every: bool) -> FileDescriptorProto:
    proto = descriptor_pb2.FileDescriptorProto()
    of.CopyToProto(proto)
    todo = list(proto.message_type)
    while todo:
        message = todo.pop()
        todo += message.nested_type
        if every and message.name == "AnyValue":
            del message.oneof_decl[:]
        for field in message.field:
            if field.type == FieldDescriptorProto.TYPE_STRING:
                field.type = FieldDescriptorProto.TYPE_BYTES
            elif (message.name, field.name) in _LAZY:
                field.type = FieldDescriptorProto.TYPE_BYTES
                field.ClearField("type_name")
            if every and (message.name == "AnyValue" or (message.name, field.name) == _VALUE):
                field.label = FieldDescriptorProto.LABEL_REPEATED
                field.ClearField("oneof_index")
    return proto


def _pool(every: bool = False) -> descriptor_pool.DescriptorPool:
    files: dict[str, FileDescriptor] = {}
    for root in _ROOTS:
        _files(root, files)
    pool = descriptor_pool.DescriptorPool()
    for file in files.values():
        pool.Add(_relaxed(file, every))
    return pool


_POOL, _EVERY_POOL = _pool(), _pool(every=True)


def lenient(name: str, *, every: bool = False) -> type[Message]:
    """Return the class for a message of OTLP by its full name.

    With `every` it has every value that was sent for an attribute, where the last one wins.
    """
    pool = _EVERY_POOL if every else _POOL
    found: type[Message] = message_factory.GetMessageClass(pool.FindMessageTypeByName(name))
    return found


ANY_VALUE = lenient(_COMMON + "AnyValue")
KEY_VALUE = lenient(_COMMON + "KeyValue")
TRACES_REQUEST = lenient("opentelemetry.proto.collector.trace.v1.ExportTraceServiceRequest")
_RESOURCE_SPANS = "opentelemetry.proto.trace.v1.ResourceSpans"
_SCOPE_SPANS = "opentelemetry.proto.trace.v1.ScopeSpans"
RESOURCE_SPANS, SCOPE_SPANS = lenient(_RESOURCE_SPANS), lenient(_SCOPE_SPANS)
EVERY_RESOURCE_SPANS = lenient(_RESOURCE_SPANS, every=True)
EVERY_SCOPE_SPANS = lenient(_SCOPE_SPANS, every=True)
