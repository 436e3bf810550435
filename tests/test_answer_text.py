"""Tokens to text, cut at the first stop string whatever the pieces."""

from hypothesis import given
from hypothesis import strategies as st

from perfledger.instrumented_runtime.answer_text import AnswerText, StopFilter


def cut(text: str, stops: list[str]) -> tuple[str, bool]:
    """The definition: cut at the stop string that is complete first, of several the longest."""
    for end in range(1, len(text) + 1):
        hits = [stop for stop in stops if text[:end].endswith(stop)]
        if hits:
            return text[: end - max(map(len, hits))], True
    return text, False


FEW_LETTERS = st.text(alphabet="ab\u00e9", max_size=30)


@given(
    st.lists(FEW_LETTERS, max_size=12),
    st.lists(st.text(alphabet="ab\u00e9", min_size=1, max_size=4), max_size=4),
)
def test_stop_strings_cut_the_same_whatever_the_pieces(pieces: list[str], stops: list[str]) -> None:
    filter_, out, hit = StopFilter(stops), "", False
    for piece in pieces:
        text, hit = filter_.push(piece)
        out += text
        if hit:
            break
    else:
        out += filter_.flush()
    assert (out, hit) == cut("".join(pieces), stops)


def test_only_what_may_become_a_stop_string_is_held() -> None:
    filter_ = StopFilter(["END", "\n\n"])
    assert [filter_.push(piece) for piece in ("a E", "N", "d\n", "b", "EN", "D c")] == [
        ("a ", False),
        ("", False),
        ("ENd", False),
        ("\nb", False),
        ("", False),
        ("", True),
    ]


class Letters:
    """A tokenizer of one letter a token."""

    def push(self, token: int) -> str:
        return chr(token)

    def flush(self) -> str:
        return ""


def test_tokens_are_counted_up_to_the_hit_and_the_end_token_has_no_text() -> None:
    text = AnswerText(Letters(), ["bc"])  # type: ignore[arg-type]
    assert [text.push(ord(letter), None) for letter in "abc"] == [
        ("a", None),
        ("", None),
        ("", "stop"),
    ]
    assert text.tokens == 3
    ended = AnswerText(Letters(), ["bc"])  # type: ignore[arg-type]
    assert [ended.push(98, None), ended.push(0, "stop")] == [("", None), ("b", "stop")]
    full = AnswerText(Letters(), ())  # type: ignore[arg-type]
    assert [full.push(98, "length"), full.tokens] == [("b", "length"), 1]
