"""OTLP's JSON of a protobuf message, as a client would send it.

google.protobuf writes proto3's JSON, in which ids are base64; here they become hexadecimal.
"""

import base64
import json

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message

_IDS = ("traceId", "spanId", "parentSpanId")


def as_json(message: Message) -> str:
    return json.dumps(_with_hex(MessageToDict(message, use_integers_for_enums=True)))


def _with_hex(value: object) -> object:
    if isinstance(value, list):
        return [_with_hex(item) for item in value]
    if isinstance(value, dict):
        return {
            name: base64.b64decode(item).hex() if name in _IDS else _with_hex(item)
            for name, item in value.items()
        }
    return value
