"""The decoder gives the logits that transformers gives, however a prompt is cut into steps."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from perfledger.instrumented_runtime.attention import PagedKvCache, kernel_path
from perfledger.instrumented_runtime.checkpoints.config import read_config
from perfledger.instrumented_runtime.checkpoints.resolve import resolve
from perfledger.instrumented_runtime.messages import SamplingParams, Submit
from perfledger.instrumented_runtime.model import Decoder, load_decoder
from perfledger.instrumented_runtime.scheduling.plan import Chunk, StepPlan
from perfledger.instrumented_runtime.scheduling.sequences import Sequence, request_of
from perfledger.instrumented_runtime.step_rows import build_rows, prepare_chunk

CPU = torch.device("cpu")
BLOCKS, BLOCK_SIZE = 24, 16
TINY = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**TINY, attention_bias=True)),
    "llama3-rope": lambda: LlamaForCausalLM(LlamaConfig(**TINY, rope_parameters=LLAMA3)),
    "llama-mha": lambda: LlamaForCausalLM(LlamaConfig(**{**TINY, "num_key_value_heads": 4})),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**TINY, sliding_window=None, head_dim=32)),
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**TINY, tie_word_embeddings=True)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**TINY, head_dim=24)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**TINY, num_local_experts=6)),
    "qwen3-moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **TINY, head_dim=24, num_experts=8, num_experts_per_tok=3, moe_intermediate_size=48
        )
    ),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


class Driver:
    """Feeds known tokens through the decoder and keeps the logits of every position."""

    def __init__(self, model: Decoder) -> None:
        self.model = model
        self.cache = PagedKvCache(model.config, BLOCKS, BLOCK_SIZE, torch.float32, CPU)
        self.free = list(range(BLOCKS))
        random.Random(7).shuffle(self.free)

    def sequence(self, text: list[int]) -> Sequence:
        sequence = request_of(Submit(0, text, SamplingParams(1), 0, 0, 0)).sequences[0]
        for _ in range(len(text) // BLOCK_SIZE + 1):
            sequence.blocks.append(self.free.pop())
        return sequence

    def step(self, plan: StepPlan) -> torch.Tensor:
        prepared = [prepare_chunk(chunk, BLOCK_SIZE) for chunk in plan.chunks]
        rows = dataclasses.replace(build_rows(plan, prepared, BLOCK_SIZE, CPU), sampled=None)
        for chunk in plan.chunks:
            chunk.sequence.computed += chunk.tokens
        for sequence in plan.decodes:
            sequence.computed += 1
        return self.model.forward(rows, self.cache)

    def chunk(self, sequence: Sequence, tokens: int) -> torch.Tensor:
        return self.step(StepPlan(0, chunks=[Chunk(sequence, sequence.computed, tokens)]))

    def decode(self, *sequences: Sequence) -> torch.Tensor:
        """One step that decodes the token each sequence holds next."""
        later = [one.tokens[one.computed + 1 :] for one in sequences]
        for one in sequences:
            del one.tokens[one.computed + 1 :]
        logits = self.step(StepPlan(0, decodes=list(sequences)))
        for one, rest in zip(sequences, later, strict=True):
            one.tokens.extend(rest)
        return logits


def text_of(length: int, vocab_size: int, seed: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(vocab_size) for _ in range(length)]


@torch.inference_mode()
def oracle(model: PreTrainedModel, text: list[int]) -> torch.Tensor:
    logits: torch.Tensor = model(torch.tensor([text])).logits[0]
    return logits


def assert_close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    relative = (ours - theirs).abs().max() / theirs.abs().max()
    assert relative.item() <= 1e-4
    assert torch.equal(ours.argmax(-1), theirs.argmax(-1))


def assert_same_logits(ours: Decoder, theirs: PreTrainedModel) -> None:
    """Whole prefill, chunks, decodes, and a step with both, over shuffled blocks."""
    first = text_of(90, ours.config.vocab_size, 1)
    second = text_of(70, ours.config.vocab_size, 2)
    first_logits, second_logits = oracle(theirs, first), oracle(theirs, second)

    driver = Driver(ours)
    whole = driver.sequence(first)
    assert_close(driver.chunk(whole, 90), first_logits)

    driver = Driver(ours)
    one, two = driver.sequence(first), driver.sequence(second)
    chunks = [driver.chunk(one, tokens) for tokens in (16, 1, 40, 13)]
    assert_close(torch.cat(chunks), first_logits[:70])
    assert_close(torch.cat([driver.decode(one) for _ in range(3)]), first_logits[70:73])
    # One decodes while a first and then a later chunk of two is computed.
    for start, tokens in ((0, 33), (33, 20)):
        later = one.tokens[one.computed + 1 :]
        del one.tokens[one.computed + 1 :]
        plan = StepPlan(0, decodes=[one], chunks=[Chunk(two, start, tokens)])
        position = one.computed
        logits = driver.step(plan)
        one.tokens.extend(later)
        assert_close(logits[:1], first_logits[position : position + 1])
        assert_close(logits[1:], second_logits[start : start + tokens])
    # Both decode, at different lengths.
    for step in range(4):
        logits = driver.decode(one, two)
        assert_close(logits[:1], first_logits[75 + step : 76 + step])
        assert_close(logits[1:], second_logits[53 + step : 54 + step])


@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(11)
    theirs = MODELS[name]().eval()
    for parameter in theirs.parameters():  # norms and biases too, which start as 1 and 0
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.15)
    theirs.save_pretrained(tmp_path)
    config = read_config(tmp_path)
    assert_same_logits(load_decoder(tmp_path, config, torch.float32, CPU), theirs)


@pytest.mark.parametrize("name", ["reference", "reference-small", "reference-moe-small"])
def test_reference_logits_equal_transformers(name: str) -> None:
    folder = resolve(name)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ours = load_decoder(folder, read_config(folder), torch.float32, CPU)
    assert_same_logits(ours, theirs)


def test_sharded_checkpoint_gives_the_same_logits(tmp_path: Path) -> None:
    torch.manual_seed(11)
    theirs = MODELS["llama"]().eval()
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours = load_decoder(tmp_path, read_config(tmp_path), torch.float32, CPU)
    text = text_of(40, 300, 3)
    driver = Driver(ours)
    assert_close(driver.chunk(driver.sequence(text), 40), oracle(theirs, text))


def test_bfloat16_follows_float32(tmp_path: Path) -> None:
    torch.manual_seed(11)
    theirs = MODELS["qwen3"]().eval()
    theirs.save_pretrained(tmp_path)
    text = text_of(40, 300, 3)
    model = load_decoder(tmp_path, read_config(tmp_path), torch.bfloat16, CPU)
    driver = Driver(model)
    driver.cache = PagedKvCache(model.config, BLOCKS, BLOCK_SIZE, torch.bfloat16, CPU)
    ours = driver.chunk(driver.sequence(text), 40).float()
    expected = oracle(theirs.to(torch.bfloat16), text).float()
    correlation = torch.corrcoef(torch.stack((ours.flatten(), expected.flatten())))[0, 1]
    assert correlation > 0.999


def test_kernel_path_names_what_torch_chose() -> None:
    config = read_config(resolve("reference-small"))
    path = kernel_path(config, torch.float32, CPU)
    assert path == "prefill: sdpa flash; decode: block gather, sdpa flash, group as query"
