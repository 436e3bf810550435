"""The text of one answer: tokens to text piece by piece, cut at the first stop string."""

from collections.abc import Sequence

from perfledger.instrumented_runtime.tokenizer import Detokenizer


class StopFilter:
    """Cuts a text that comes in pieces at the first stop string.

    The first is the one that is complete first (of several that end together, the longest), so the
    result does not depend on the pieces. What may begin a stop string is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = stops
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text that is certain now, and whether a stop string was hit."""
        if not self._stops:
            return text, False
        text = self._held + text
        hits = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if hits:
            self._held = ""
            return text[: min(hits)[1]], True
        certain = len(text) - max(_open_prefix(text, stop) for stop in self._stops)
        self._held = text[certain:]
        return text[:certain], False

    def flush(self) -> str:
        """Return what was held back: the text has ended and it was no stop string."""
        held, self._held = self._held, ""
        return held


class AnswerText:
    """Tokens in, text out; counts the tokens."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str]) -> None:
        self._detokenizer = detokenizer
        self._stops = StopFilter(stops)
        self.tokens = 0

    def push(self, token: int, finish: str | None) -> tuple[str, str | None]:
        """Return the new text, and the finish reason where the answer ends here.

        `finish` is the engine's; a token that stops the answer by itself has no text.
        """
        self.tokens += 1
        text = "" if finish == "stop" else self._detokenizer.push(token)
        if finish is not None:
            text += self._detokenizer.flush()
        text, hit = self._stops.push(text)
        if hit:
            return text, "stop"
        return text + (self._stops.flush() if finish is not None else ""), finish


def _open_prefix(text: str, stop: str) -> int:
    """Return the length of the longest proper beginning of `stop` that `text` ends with."""
    lengths = range(min(len(stop) - 1, len(text)), 0, -1)
    return next((length for length in lengths if text.endswith(stop[:length])), 0)
