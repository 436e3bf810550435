"""Server-sent events of the OpenAI API: bytes as they come to what each chunk holds. No I/O."""

from dataclasses import dataclass

import orjson

from perfledger.instrumented_runtime.load.plan import OUTPUT, REASONING, TOOL
from perfledger.schema.errors import PerfledgerError

MAX_LINE_BYTES = 4 * 1024 * 1024
DONE = b"[DONE]"


class StreamError(PerfledgerError):
    """A stream that is not what the API promises. `kind` is of low cardinality."""

    def __init__(self, kind: str, what: str) -> None:
        super().__init__(what)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as the server gave them; None where it did not."""

    input_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    reasoning_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Chunk:
    """One event: the channel of its text ("" without any) and what else it says."""

    channel: str = ""
    choice: int = 0
    usage: Usage | None = None
    finish_reason: str = ""
    response_id: str = ""


class EventBuffer:
    """Cuts a byte stream into the data of its events, however the network cut it."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the data of the events that are complete now. Raises StreamError."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise StreamError("malformed", f"an event of more than {MAX_LINE_BYTES} bytes")
        found = (line.removeprefix(b"data:").strip() for line in lines if line[:5] == b"data:")
        return [event for event in found if event]


def read_chunk(event: bytes) -> Chunk:
    """Return what one event of either endpoint holds. Raises StreamError."""
    try:
        fields = orjson.loads(event)
    except orjson.JSONDecodeError as error:
        raise StreamError("malformed", f"an event that is not JSON: {error}") from None
    if not isinstance(fields, dict):
        raise StreamError("malformed", "an event that is not an object")
    if fields.get("error"):
        raise StreamError("stream_error", str(fields["error"]))
    choices = fields.get("choices")
    choice = choices[0] if isinstance(choices, list) and choices else None
    choice = choice if isinstance(choice, dict) else {}
    usage = fields.get("usage")
    return Chunk(
        channel=_channel(choice),
        choice=_count(choice, "index") or 0,
        usage=_usage(usage) if isinstance(usage, dict) else None,
        finish_reason=_text(choice.get("finish_reason")),
        response_id=_text(fields.get("id"))[:256],
    )


def _channel(choice: dict[str, object]) -> str:
    """Return the channel of a choice's text. Output wins where one chunk holds several."""
    if _text(choice.get("text")):
        return OUTPUT
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return ""
    if _text(delta.get("content")) or _text(delta.get("refusal")):
        return OUTPUT
    # vLLM calls it reasoning, DeepSeek and SGLang reasoning_content.
    if _text(delta.get("reasoning_content")) or _text(delta.get("reasoning")):
        return REASONING
    return TOOL if delta.get("tool_calls") or delta.get("function_call") else ""


def _usage(fields: dict[str, object]) -> Usage:
    return Usage(
        input_tokens=_count(fields, "prompt_tokens"),
        cached_tokens=_count(fields.get("prompt_tokens_details"), "cached_tokens"),
        output_tokens=_count(fields, "completion_tokens"),
        reasoning_tokens=_count(fields.get("completion_tokens_details"), "reasoning_tokens"),
    )


def _count(fields: object, name: str) -> int | None:
    value = fields.get(name) if isinstance(fields, dict) else None
    return value if type(value) is int and 0 <= value < 2**63 else None


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
