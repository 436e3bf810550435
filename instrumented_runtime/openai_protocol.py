"""Requests of the OpenAI protocol as plain data: from a body to a checked request.

What would change an answer's meaning and is not done here is refused by name; other unknown fields
are ignored, since clients send extras. Fields follow OpenAI's API reference for chat completions
and (legacy) completions; `ignore_eos` and `priority` are vLLM's. openai_answers has the other way.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import orjson

from perfledger.schema.errors import UsageError

CHAT = "chat"
TEXT_COMPLETION = "text_completion"

MAX_MESSAGES = 4096
MAX_STOPS = 4
MAX_STOP_CHARS = 256
MAX_MODEL_CHARS = 256
DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions, as OpenAI has it; a chat may fill the context
MAX_CHOICES = 128  # of n, as OpenAI has it; the engine takes no more than its batch has places
INT64 = 2**63
PRIORITIES = 2**31  # priorities are from -PRIORITIES to PRIORITIES - 1

# `developer` is the newer name of `system`; chat templates know the older one.
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}

# Fields that would change the answer and are not supported, each with the values that ask for
# nothing (null always does).
UNSUPPORTED: Mapping[str, tuple[object, ...]] = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "logit_bias": ({},),
    "echo": (False,),
    "suffix": ("",),
    "modalities": (["text"],),
    "audio": (),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "repetition_penalty": (1, 1.0),
    "top_k": (0, -1),
    "min_p": (0, 0.0),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "prompt_logprobs": (),
    "stop_token_ids": ([],),
    "include_stop_str_in_output": (False,),
    "bad_words": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "truncate_prompt_tokens": (),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "web_search_options": (),
    "cache_salt": ("",),  # prefixes are shared within a tenant: send x-perfledger-tenant
}


class RefusedError(UsageError):
    """A request that is answered with an HTTP error. `code` is of low cardinality."""

    def __init__(
        self,
        what: str,
        *,
        code: str = "invalid_value",
        param: str | None = None,
        status: int = 400,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(what)
        self.code = code
        self.param = param
        self.status = status
        self.retry_after_s = retry_after_s


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A checked request; `max_tokens` None means up to the model's limit."""

    operation: str
    model: str
    messages: tuple[dict[str, str], ...]
    prompt: str | list[int]
    max_tokens: int | None
    temperature: float
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    ignore_eos: bool
    stream: bool
    include_usage: bool
    n: int = 1
    priority: int | None = None


def parse_request(operation: str, body: bytes) -> CompletionRequest:
    """Return the checked request of a body. Raises RefusedError, naming the field."""
    fields = _parse_object(body)
    for name, neutral in UNSUPPORTED.items():
        _refuse_unless_neutral(name, fields.get(name), neutral)
    n = _integer(fields, "n", 1, MAX_CHOICES) or 1
    _refuse_unless_neutral("best_of", fields.get("best_of"), (n,))
    chat = operation == CHAT
    stream = _boolean(fields, "stream")
    return CompletionRequest(
        operation=operation,
        model=_text(fields, "model", MAX_MODEL_CHARS),
        messages=_messages(fields.get("messages")) if chat else (),
        prompt="" if chat else _prompt(fields.get("prompt")),
        max_tokens=_max_tokens(fields, chat),
        temperature=_number(fields, "temperature", 1.0, 0.0, 2.0),
        top_p=_top_p(fields),
        seed=_integer(fields, "seed", -INT64, INT64 - 1),
        stop=_stops(fields.get("stop")),
        ignore_eos=_boolean(fields, "ignore_eos"),
        stream=stream,
        include_usage=_include_usage(fields.get("stream_options"), stream),
        n=n,
        priority=_integer(fields, "priority", -PRIORITIES, PRIORITIES - 1),
    )


def _parse_object(body: bytes) -> dict[str, object]:
    try:
        fields = orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise RefusedError(f"the body is not JSON: {error}", code="invalid_json") from None
    if not isinstance(fields, dict):
        raise RefusedError("the body must be a JSON object", code="invalid_type")
    return fields


def _refuse_unless_neutral(name: str, value: object, neutral: tuple[object, ...]) -> None:
    if value is None or any(type(value) is type(one) and value == one for one in neutral):
        return
    raise RefusedError(f"{name} is not supported", code="unsupported_parameter", param=name)


def _wrong_type(name: str, expected: str) -> RefusedError:
    return RefusedError(f"{name} must be {expected}", code="invalid_type", param=name)


def _text(fields: dict[str, object], name: str, limit: int) -> str:
    value = fields.get(name)
    if value is None:
        return ""
    if not isinstance(value, str):
        raise _wrong_type(name, "a string")
    if len(value) > limit:
        raise RefusedError(f"{name} is longer than {limit} characters", param=name)
    return value


def _boolean(fields: dict[str, object], name: str) -> bool:
    value = fields.get(name)
    if value is None:
        return False
    if not isinstance(value, bool):
        raise _wrong_type(name, "true or false")
    return value


def _integer(fields: dict[str, object], name: str, low: int, high: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise _wrong_type(name, "an integer")
    if not low <= value <= high:
        raise RefusedError(f"{name} is {value}, must be from {low} to {high}", param=name)
    return value


def _number(fields: dict[str, object], name: str, default: float, low: float, high: float) -> float:
    value = fields.get(name)
    if value is None:
        return default
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise _wrong_type(name, "a number")
    if not low <= value <= high:
        raise RefusedError(f"{name} is {value}, must be from {low:g} to {high:g}", param=name)
    return float(value)


def _top_p(fields: dict[str, object]) -> float:
    top_p = _number(fields, "top_p", 1.0, 0.0, 1.0)
    if top_p == 0:
        raise RefusedError("top_p is 0, must be above 0", param="top_p")
    return top_p


def _max_tokens(fields: dict[str, object], chat: bool) -> int | None:
    newer = _integer(fields, "max_completion_tokens", 1, INT64 - 1)
    older = _integer(fields, "max_tokens", 1, INT64 - 1)
    if newer is not None and older is not None and newer != older:
        what = f"max_tokens is {older} but max_completion_tokens is {newer}: give one of them"
        raise RefusedError(what, param="max_completion_tokens")
    asked = newer if newer is not None else older
    return DEFAULT_COMPLETION_TOKENS if asked is None and not chat else asked


def _stops(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise _wrong_type("stop", "a string or a list of strings")
    if len(stops) > MAX_STOPS:
        raise RefusedError(f"stop has {len(stops)} strings, at most {MAX_STOPS}", param="stop")
    if any(not 1 <= len(stop) <= MAX_STOP_CHARS for stop in stops):
        what = f"each stop string must have 1 to {MAX_STOP_CHARS} characters"
        raise RefusedError(what, param="stop")
    return tuple(stops)


def _include_usage(value: object, stream: bool) -> bool:
    if value is None:
        return False
    if not isinstance(value, dict):
        raise _wrong_type("stream_options", "an object")
    if not stream:
        what = "stream_options is only for stream: true"
        raise RefusedError(what, param="stream_options")
    return _boolean(value, "include_usage")


def _messages(value: object) -> tuple[dict[str, str], ...]:
    if not isinstance(value, list):
        raise _wrong_type("messages", "a list")
    if not value:
        raise RefusedError("messages is empty", param="messages")
    if len(value) > MAX_MESSAGES:
        what = f"messages has {len(value)} messages, at most {MAX_MESSAGES}"
        raise RefusedError(what, param="messages")
    return tuple(_message(one, f"messages[{at}]") for at, one in enumerate(value))


def _message(value: object, where: str) -> dict[str, str]:
    if not isinstance(value, dict):
        raise _wrong_type(where, "an object")
    if value.get("tool_calls"):
        raise RefusedError(
            "tool_calls is not supported", code="unsupported_parameter", param=f"{where}.tool_calls"
        )
    role = value.get("role")
    if not isinstance(role, str) or role not in ROLES:
        what = f"{where}.role must be one of {', '.join(ROLES)}"
        raise RefusedError(what, param=f"{where}.role")
    return {"role": ROLES[role], "content": _content(value.get("content"), f"{where}.content")}


def _content(value: object, where: str) -> str:
    if isinstance(value, str):
        return value
    if not isinstance(value, list) or not value:
        raise _wrong_type(where, "a string or a list of text parts")
    return "\n".join(_part(part, f"{where}[{at}]") for at, part in enumerate(value))


def _part(value: object, where: str) -> str:
    if not isinstance(value, dict):
        raise _wrong_type(where, "an object")
    if value.get("type") != "text":
        what = f"{where}.type must be text: other parts are not supported"
        raise RefusedError(what, code="unsupported_parameter", param=f"{where}.type")
    if not isinstance(value.get("text"), str):
        raise _wrong_type(f"{where}.text", "a string")
    return str(value["text"])


def _prompt(value: object) -> str | list[int]:
    """Return the one prompt: OpenAI allows a string or token ids, bare or in a list of prompts."""
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], str | list):
        value = value[0]
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise _wrong_type("prompt", "a string or a list of token ids")
    if value and all(isinstance(one, str | list) for one in value):
        what = f"prompt has {len(value)} prompts: send one a request"
        raise RefusedError(what, code="unsupported_parameter", param="prompt")
    if not all(type(token) is int for token in value):
        raise _wrong_type("prompt", "a string or a list of token ids")
    return value
