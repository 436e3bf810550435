"""Text to tokens and back, and chats to text, as transformers does it."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models
from transformers import AutoTokenizer

from perfledger.instrumented_runtime.checkpoints import train_tokenizer
from perfledger.instrumented_runtime.checkpoints.reference import CHAT_TEMPLATE
from perfledger.instrumented_runtime.checkpoints.resolve import resolve
from perfledger.instrumented_runtime.tokenizer import Detokenizer, Tokenizer
from perfledger.schema.errors import UsageError

CHAT = [
    {"role": "system", "content": "Be brief. <b>&</b>"},
    {"role": "user", "content": "Où est la gare ? 駅はどこ 🚉\n\n  indented"},
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve("reference-small")


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.load(folder)


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    for file in folder.glob("*.json"):
        shutil.copyfile(file, tmp_path / file.name)
    return tmp_path


def edit(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_facts(tokenizer: Tokenizer, folder: Path) -> None:
    assert tokenizer.vocab_size == 8192
    assert tokenizer.eos_token_ids == (2,)
    assert tokenizer.hash == hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
    assert tokenizer.template_hash == hashlib.sha256(CHAT_TEMPLATE.encode()).hexdigest()


def test_chat_and_ids_equal_transformers(tokenizer: Tokenizer, folder: Path) -> None:
    theirs = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.render_chat(CHAT)
    assert text == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert tokenizer.encode(text) == theirs.encode(text, add_special_tokens=False)


@settings(deadline=None)
@given(text=st.text(max_size=60))
def test_any_text_survives(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(token) for token in tokenizer.encode(text)]
    assert "".join(pieces) + detokenizer.flush() == text


@settings(deadline=None)
@given(tokens=st.lists(st.integers(0, 8191), max_size=80))
def test_pieces_join_to_the_text_of_any_tokens(tokenizer: Tokenizer, tokens: list[int]) -> None:
    """Random tokens end amid characters, as a random model's do."""
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(token) for token in tokens]
    assert "".join(pieces) + detokenizer.flush() == tokenizer.decode(tokens)
    assert detokenizer.flush() == ""


def test_an_unfinished_character_is_held_back(tokenizer: Tokenizer) -> None:
    tokens = tokenizer.encode("a駅")
    detokenizer = tokenizer.detokenizer()
    pieces = [detokenizer.push(token) for token in tokens[:-1]]
    assert "".join(pieces) == "a"
    assert detokenizer.push(tokens[-1]) == "駅"
    broken = tokenizer.detokenizer()
    assert [broken.push(token) for token in tokens[:2]] == ["a", ""]
    assert broken.flush() == "\ufffd"


def test_a_decoder_that_strips_the_first_space() -> None:
    """SentencePiece-like vocabularies (Mistral, Llama 2): spaces are part of the pieces."""
    words = ["▁the", "▁cat", "s", "▁sat", "<0xE9>", "<0xA7>", "<0x85>"]
    fast = FastTokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    fast.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    detokenizer = Detokenizer(fast.decode)
    pieces = [detokenizer.push(token) for token in [0, 1, 2, 3, 4, 5, 6] * 4]
    assert pieces[:7] == ["the", " cat", "s", " sat", "", "", "駅"]
    assert "".join(pieces) == " ".join(["the cats sat駅"] * 4)


def test_training_again_gives_the_same_kind_of_file(tmp_path: Path) -> None:
    """Not byte for byte: another Python has other sources. On one machine it is deterministic."""
    files = [path for path in train_tokenizer.corpus_files() if path.name.startswith("a")]
    twice = [train_tokenizer.train(files).to_str() for _ in range(2)]
    assert twice[0] == twice[1]
    again, committed = json.loads(twice[0]), json.loads(train_tokenizer.TOKENIZER_FILE.read_text())
    assert {**again, "model": None} == {**committed, "model": None}
    assert len(committed["model"]["vocab"]) == train_tokenizer.VOCAB_SIZE


def test_template_in_its_own_file_wins(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text(
        "{%- for message in messages %}\n"
        "    {%- if loop.index > 1 %}{% break %}{% endif %}\n"
        "{{ bos_token }}{% generation %}{{ message | tojson }}{% endgeneration %}\n"
        "{%- endfor %}"
    )
    rendered = Tokenizer.load(copy).render_chat(CHAT)
    assert rendered == "<|im_start|>" + json.dumps(CHAT[0])


def test_named_templates_and_eos_of_the_config(copy: Path) -> None:
    edit(
        copy / "tokenizer_config.json",
        chat_template=[{"name": "tool", "template": "x"}, {"name": "default", "template": "hi"}],
        eos_token={"content": "<|endoftext|>"},
    )
    (copy / "generation_config.json").unlink()
    edit(copy / "config.json", eos_token_id=[2, 5])
    tokenizer = Tokenizer.load(copy)
    assert tokenizer.render_chat(CHAT) == "hi"
    assert tokenizer.eos_token_ids == (0, 2, 5)


def test_what_a_template_refuses_is_a_usage_error(copy: Path) -> None:
    def refusal(template: object) -> str:
        edit(copy / "tokenizer_config.json", chat_template=template)
        with pytest.raises(UsageError) as error:
            Tokenizer.load(copy).render_chat(CHAT)
        return error.value.what

    assert refusal("{{ raise_exception('no system role') }}") == (
        "the chat template refuses these messages: no system role"
    )
    assert refusal("{{ messages.append(1) }}").startswith("the chat template refuses")
    assert refusal("{{ ''.__class__.__mro__ }}").startswith("the chat template refuses")
    assert refusal("{% for %}").startswith("the chat template does not compile")
    assert refusal(None) == "this checkpoint has no chat template"


@pytest.mark.parametrize("content", [None, "{", "[]", '{"model": {"type": "BPE"}}'])
def test_missing_or_malformed_tokenizer(copy: Path, content: str | None) -> None:
    path = copy / "tokenizer.json"
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(UsageError, match="cannot read") as error:
        Tokenizer.load(copy)
    assert error.value.where == str(path)
