"""The tensors of a checkpoint folder: safetensors only, every name and shape checked."""

import hashlib
import math
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from perfledger.instrumented_runtime.checkpoints.config import ModelConfig, read_json
from perfledger.instrumented_runtime.checkpoints.model_part import ModelPart
from perfledger.schema.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Written by older versions of transformers; computed from the config instead.
IGNORED_SUFFIX = ".rotary_emb.inv_freq"
WHOLE = ModelPart()


@dataclass(frozen=True, slots=True)
class ExpertNames:
    """What the tensors of a layer's experts are called, after `model.layers.N.`."""

    router: str
    expert: str  # to be formatted with the expert's number
    gate: str
    up: str
    down: str


MIXTRAL = ExpertNames("block_sparse_moe.gate", "block_sparse_moe.experts.{}", "w1", "w3", "w2")
QWEN3_MOE = ExpertNames("mlp.gate", "mlp.experts.{}", "gate_proj", "up_proj", "down_proj")


def expert_names(config: ModelConfig) -> ExpertNames:
    """Return how the checkpoints of this architecture name their experts."""
    return MIXTRAL if config.architecture == "MixtralForCausalLM" else QWEN3_MOE


def expected_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor that a checkpoint of this config must hold."""
    hidden = config.hidden_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not config.tied_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        **_mlp_shapes(config),
    }
    if config.qkv_bias:
        layer["self_attn.q_proj.bias"] = (queries,)
        layer["self_attn.k_proj.bias"] = layer["self_attn.v_proj.bias"] = (keys,)
    if config.output_bias:
        layer["self_attn.o_proj.bias"] = (hidden,)
    if config.qk_norm:
        layer["self_attn.q_norm.weight"] = layer["self_attn.k_norm.weight"] = (config.head_dim,)
    for index in range(config.layers):
        shapes |= {f"model.layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes


def _mlp_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    hidden, ffn = config.hidden_size, config.intermediate_size
    if config.experts is None:
        return {
            "mlp.gate_proj.weight": (ffn, hidden),
            "mlp.up_proj.weight": (ffn, hidden),
            "mlp.down_proj.weight": (hidden, ffn),
        }
    names, ffn = expert_names(config), config.experts.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {f"{names.router}.weight": (config.experts.count, hidden)}
    for number in range(config.experts.count):
        expert = names.expert.format(number)
        shapes[f"{expert}.{names.gate}.weight"] = (ffn, hidden)
        shapes[f"{expert}.{names.up}.weight"] = (ffn, hidden)
        shapes[f"{expert}.{names.down}.weight"] = (hidden, ffn)
    return shapes


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files of a checkpoint, sharded or not. Raises UsageError."""
    if (folder / INDEX).exists():
        weight_map = read_json(folder / INDEX).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UsageError("the index has no weight_map", where=str(folder / INDEX))
        names = sorted({str(name) for name in weight_map.values()})
        if any(Path(name).name != name for name in names):
            raise UsageError("the index points outside its folder", where=str(folder / INDEX))
        files = [folder / name for name in names]
    else:
        files = [folder / SINGLE]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise UsageError(
            f"the checkpoint lacks {', '.join(missing[:3])}",
            where=str(folder),
            fix="weights saved as safetensors (other formats can run code and are not read)",
        )
    return files


def count_parameters(config: ModelConfig) -> int:
    """Return how many numbers a checkpoint of this config holds."""
    return sum(math.prod(shape) for shape in expected_shapes(config).values())


def read_weights(folder: Path, config: ModelConfig, part: ModelPart = WHOLE) -> "dict[str, Tensor]":
    """Return the expected tensors of a part of a checkpoint, on the CPU, in their stored dtype.

    Only the part is read, but all names and shapes are checked. Raises UsageError if a tensor is
    missing, unknown, in two files or of another shape.
    """
    expected = expected_shapes(config)
    files: dict[str, Any] = {}
    with ExitStack() as stack:
        for name, file in _opened(weight_files(folder), stack):
            if name in files:
                raise UsageError(f"the tensor {name} is in two files", where=str(folder))
            files[name] = file
        if config.tied_embeddings:
            files.pop("lm_head.weight", None)  # some writers store the tied head twice
        shapes = {name: tuple(file.get_slice(name).get_shape()) for name, file in files.items()}
        _check(expected, shapes, folder)
        held = [name for name in files if part.holds(name, config)]
        return {name: _read(files[name], name, part.piece(name, shapes[name])) for name in held}


def _read(file: Any, name: str, piece: tuple[slice, ...] | None) -> "Tensor":
    tensor: Tensor = file.get_tensor(name) if piece is None else file.get_slice(name)[piece]
    return tensor


def weights_hash(folder: Path) -> str:
    """Return the SHA-256 (hex) of the weight files' bytes, in the order of their names."""
    digest = hashlib.sha256()
    for path in weight_files(folder):
        with open(path, "rb") as file:
            while block := file.read(1 << 22):
                digest.update(block)
    return digest.hexdigest()


def _opened(files: list[Path], stack: ExitStack) -> Iterator[tuple[str, Any]]:
    for path in files:
        try:
            file = stack.enter_context(safe_open(str(path), framework="pt"))
        except (SafetensorError, OSError) as error:
            raise UsageError(f"cannot read {path.name}: {error}", where=str(path)) from None
        for name in file.keys():  # noqa: SIM118 (not a dict)
            if not name.endswith(IGNORED_SUFFIX):
                yield name, file


def _check(
    expected: dict[str, tuple[int, ...]], found: dict[str, tuple[int, ...]], folder: Path
) -> None:
    def refuse(what: str, names: list[str]) -> None:
        shown = ", ".join(sorted(names)[:3]) + (" …" if len(names) > 3 else "")
        raise UsageError(
            f"{len(names)} tensors {what}: {shown}",
            where=str(folder),
            fix="config.json and the weights must belong together",
        )

    if missing := [name for name in expected if name not in found]:
        refuse("are missing from the checkpoint", missing)
    if extra := [name for name in found if name not in expected]:
        refuse("are in the checkpoint, but not in its architecture", extra)
    wrong = [
        f"{name} {found[name]} instead of {shape}"
        for name, shape in expected.items()
        if found[name] != shape
    ]
    if wrong:
        refuse("have another shape than config.json says", wrong)
