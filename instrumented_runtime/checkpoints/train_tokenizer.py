"""Train the reference checkpoints' tokenizer again, offline: byte-level BPE with 8192 entries.

    python -m perfledger.instrumented_runtime.checkpoints.train_tokenizer [FILE]

The corpus is what every Debian-like machine with Python has: the standard library's sources and
the texts of the common licences. The same corpus gives the same file; tokenizer.json beside this
module was made so once, and every reference checkpoint uses that one.
"""

import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 8192
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TOKENIZER_FILE = Path(__file__).with_name("tokenizer.json")
LICENCES = Path("/usr/share/common-licenses")


def corpus_files() -> list[Path]:
    """Return the corpus: the standard library without its tests and packages, and licences."""
    library = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}
    sources = [
        path
        for path in library.rglob("*.py")
        if left_out.isdisjoint(path.relative_to(library).parts)
    ]
    licences = [path for path in LICENCES.glob("*") if path.is_file() and not path.is_symlink()]
    return sorted(sources) + sorted(licences)


def train(files: list[Path]) -> Tokenizer:
    """Return a tokenizer trained on `files` in their order, without bytes that are no UTF-8."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(files), trainer)
    return tokenizer


def _texts(files: list[Path]) -> Iterator[str]:
    for path in files:
        yield path.read_text(encoding="utf-8", errors="ignore")


if __name__ == "__main__":
    train(corpus_files()).save(sys.argv[1] if len(sys.argv) > 1 else str(TOKENIZER_FILE))
