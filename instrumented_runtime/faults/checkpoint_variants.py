"""Variants of a checkpoint folder: the same model with a slower tokenizer, another template, ….

Files that stay the same are links to the original; the variant lies in a folder of the caller's.
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from perfledger.schema.errors import UsageError

_GATE = ".gate.weight"  # of a mixture-of-experts layer, as [experts, hidden]
# Jinja's sandbox knows no clock, but it draws numbers.
_VOLATILE = "{{ range(90000) | random }}-{{ range(90000) | random }}\n"


def make_variant(fault: str, amount: float, checkpoint: Path, folder: Path) -> Path:
    """Fill `folder` with the variant that `fault` names; return it. Raises UsageError."""
    folder.mkdir(parents=True)
    for path in checkpoint.iterdir():
        os.symlink(path.resolve(), folder / path.name)
    _VARIANTS[fault](folder, amount)
    return folder


def _slow_tokenizer(folder: Path, amount: float) -> None:
    """Put patterns that never match before the tokenizer's own work: it searches, in vain.

    The normalizer of a tokenizer.json is a list of replacements; each is a pass over the text.
    """
    path = folder / "tokenizer.json"
    content = json.loads(path.read_bytes())
    own = content.get("normalizer")
    searches: list[dict[str, Any]] = [
        {
            "type": "Replace",
            "pattern": {"Regex": f"[a-z]{{3}}\ue000{number}"},
            "content": "",
        }
        for number in range(round(amount))
    ]
    content["normalizer"] = {
        "type": "Sequence",
        "normalizers": searches + ([own] if own is not None else []),
    }
    _replace(path, json.dumps(content, ensure_ascii=False).encode())


def _volatile_template(folder: Path, amount: float) -> None:
    """Let every prompt begin with something that never comes twice."""
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        _replace(alone, _VOLATILE.encode() + alone.read_bytes())
        return
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_bytes())
    if not isinstance(settings.get("chat_template"), str):
        raise UsageError("the checkpoint has no chat template", where=str(folder))
    settings["chat_template"] = _VOLATILE + settings["chat_template"]
    _replace(path, json.dumps(settings, ensure_ascii=False).encode())


def _skewed_experts(folder: Path, amount: float) -> None:
    """Let the first experts of every layer win, whatever the text.

    A router has no bias that could prefer one. But of two experts whose rows are opposite, one has
    a positive logit for any hidden state, and large rows make it the largest: so experts 0 and 1
    share the first place, 2 and 3 (half as large) the second, and their rank computes for all.
    """
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    if not path.is_file():
        raise UsageError("only checkpoints of one file can be skewed", where=str(folder))
    tensors = load_file(path)
    gates = [name for name in tensors if name.endswith(_GATE)]
    if not gates:
        raise UsageError("the model has no experts to skew", where=str(folder))
    for name in gates:
        gate = tensors[name].clone()
        for first, strength in ((0, amount), (2, amount / 2)):
            if first + 1 < len(gate):
                gate[first] *= strength
                gate[first + 1] = -gate[first]
        tensors[name] = gate
    path.unlink()
    save_file(tensors, path, {"format": "pt"})


def _replace(path: Path, content: bytes) -> None:
    path.unlink()  # a link: the original stays as it is
    path.write_bytes(content)


_VARIANTS: dict[str, Callable[[Path, float], None]] = {
    "slow_tokenizer": _slow_tokenizer,
    "volatile_template": _volatile_template,
    "skewed_experts": _skewed_experts,
}
