"""Text to token ids and back, and chats to text: tokenizer.json and its neighbours. No torch."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as FastTokenizer

from perfledger.instrumented_runtime.chat_template import ChatTemplate
from perfledger.instrumented_runtime.checkpoints.config import read_json
from perfledger.schema.errors import UsageError

REPLACEMENT = "\ufffd"  # what bytes decode to that are no UTF-8, or not yet
# A character has up to 4 bytes; some decoders show each byte of an unfinished one.
_UNFINISHED = 3
# Tokens kept in front of the newest when the window moves: some decoders look back.
_LOOK_BACK = 4
_WINDOW = 16


class Tokenizer:
    """The tokenizer of one checkpoint. Safe to share; each answer has its own Detokenizer."""

    def __init__(
        self,
        fast: FastTokenizer,
        template: ChatTemplate | None,
        eos_token_ids: tuple[int, ...],
        *,
        hash: str,
        template_hash: str,
    ) -> None:
        self._fast = fast
        self._template = template
        self.eos_token_ids = eos_token_ids
        self.hash = hash  # SHA-256 (hex) of tokenizer.json
        self.template_hash = template_hash  # SHA-256 (hex) of the chat template; "" without one

    @classmethod
    def load(cls, folder: Path) -> "Tokenizer":
        """Read the tokenizer of a checkpoint. Raises UsageError for missing or malformed files."""
        path = folder / "tokenizer.json"
        content = _read_bytes(path)
        try:
            fast = FastTokenizer.from_str(content.decode())
        except Exception as error:  # the library raises nothing narrower
            raise UsageError(f"cannot read the tokenizer: {error}", where=str(path)) from None
        settings = _read_settings(folder)
        special_tokens = _special_tokens(settings)
        source = _template_source(folder, settings)
        return cls(
            fast,
            None if source is None else ChatTemplate(source, special_tokens),
            _eos_token_ids(folder, fast, special_tokens.get("eos_token")),
            hash=hashlib.sha256(content).hexdigest(),
            template_hash="" if source is None else hashlib.sha256(source.encode()).hexdigest(),
        )

    @property
    def vocab_size(self) -> int:
        """Token ids, special ones included."""
        return int(self._fast.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """Return the token ids of `text`.

        Special tokens are added for a bare completion only: a rendered chat holds its own.
        """
        return list(self._fast.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of `tokens`, special tokens left out."""
        return str(self._fast.decode(list(tokens), skip_special_tokens=True))

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Return the prompt for a chat. Raises UsageError without a template or if it refuses."""
        if self._template is None:
            raise UsageError(
                "this checkpoint has no chat template",
                fix="/v1/completions, or a checkpoint with a chat_template",
            )
        return self._template.render(messages)

    def detokenizer(self) -> "Detokenizer":
        """Return a new incremental detokenizer, for one answer."""
        return Detokenizer(self.decode)


class Detokenizer:
    """Text of one answer as its tokens come; characters not yet complete are held back.

    All pushes and the flush, joined, are the text of all tokens.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str]) -> None:
        self._decode = decode
        self._window: list[int] = []  # the newest tokens
        self._sent = 0  # characters of the window's text that were returned

    def push(self, token: int) -> str:
        """Take the next token; return the text that is now certain."""
        self._window.append(token)
        text = self._decode(self._window)
        held = len(text) - len(text.rstrip(REPLACEMENT))
        certain = max(self._sent, len(text) - min(held, _UNFINISHED))
        new, self._sent = text[self._sent : certain], certain
        if len(self._window) > _WINDOW and not held:
            self._move_window()
        return new

    def flush(self) -> str:
        """Return what was held back, at the end of the answer."""
        text = self._decode(self._window)[self._sent :]
        self._sent += len(text)
        return text

    def _move_window(self) -> None:
        self._window = self._window[-_LOOK_BACK:]
        self._sent = len(self._decode(self._window))


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read {path.name}: {error.strerror}", where=str(path)) from None


def _read_settings(folder: Path) -> dict[str, Any]:
    path = folder / "tokenizer_config.json"
    return read_json(path) if path.exists() else {}


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """Return the named special tokens (bos_token, eos_token, …), written in one of two ways."""
    found = {}
    for name, value in settings.items():
        if name.endswith("_token"):
            text = value.get("content") if isinstance(value, dict) else value
            if isinstance(text, str):
                found[name] = text
    return found


def _template_source(folder: Path, settings: dict[str, Any]) -> str | None:
    file = folder / "chat_template.jinja"
    if file.exists():
        return _read_bytes(file).decode()
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _eos_token_ids(folder: Path, fast: FastTokenizer, eos_token: str | None) -> tuple[int, ...]:
    """Return the ids that end an answer: of the generation config, else of config.json; and the
    tokenizer's own, with which chat models end a turn."""
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        declared = read_json(path).get("eos_token_id") if path.exists() else None
        if declared is not None:
            ids.update(declared if isinstance(declared, list) else [declared])
            break
    if eos_token is not None and (own := fast.token_to_id(eos_token)) is not None:
        ids.add(own)
    if not all(isinstance(one, int) for one in ids):
        raise UsageError("eos_token_id must be an integer or a list of them", where=str(folder))
    return tuple(sorted(ids))
