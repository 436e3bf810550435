"""Chat templates of Hugging Face checkpoints: jinja in its sandbox, as in `transformers`."""

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from perfledger.schema.errors import UsageError


class _Generation(Extension):
    """`{% generation %}` marks the assistant's part for training; here its body stands as it is."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template with the special tokens it may name."""

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        """Compile `source`. Raises UsageError if it is not a valid template."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, "jinja2.ext.loopcontrols"],
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = time.strftime
        self._special_tokens = dict(special_tokens)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise UsageError(f"the chat template does not compile: {error}") from None

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt that ends where the assistant's answer begins.

        Raises UsageError where the template refuses the messages (roles in a wrong order, …).
        """
        try:
            return self._template.render(
                messages=messages, add_generation_prompt=True, tools=None, **self._special_tokens
            )
        except (TemplateError, TypeError, ValueError) as error:
            raise UsageError(f"the chat template refuses these messages: {error}") from None


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML characters, which no model was trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)
