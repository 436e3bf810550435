"""Decode at batch 1 against the memory bandwidth of a CUDA device: one command, some minutes.

    python benchmarks/gpu_roofline.py [--device cuda:0] [--shape 8b|1b|tiny] [--context 1024]

A decode step at batch 1 reads every weight and the KV cache once, so it cannot take less than
their bytes over the bandwidth. The ceiling is measured in the same run: the best of some copies of
a buffer far larger than the caches (bytes read and written). Target: at least 0.6 of it. Weights
are random, in bfloat16; the step is the runtime's own, with its sampler. Without a CUDA device it
says so, measures nothing and ends with 0. Not run on a device so far.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from perfledger.instrumented_runtime.attention import DecodeRows, PagedKvCache, StepRows
from perfledger.instrumented_runtime.checkpoints.config import parse_config
from perfledger.instrumented_runtime.checkpoints.weights import expected_shapes
from perfledger.instrumented_runtime.model import build_decoder
from perfledger.instrumented_runtime.sampling import greedy

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves it out
from recording import write_result  # noqa: E402

GOAL = "decode at batch 1 at least 0.6 of the bandwidth that a copy reaches on the same device"
BLOCK_SIZE, STEPS, WARM_UP, COPIES = 16, 64, 8, 20
# hidden, intermediate, layers, heads, KV heads: one to try the script, Llama 3's 8B, 3.2's 1B.
SHAPES = {
    "tiny": (128, 256, 2, 4, 2),
    "8b": (4096, 14_336, 32, 32, 8),
    "1b": (2048, 8192, 16, 32, 8),
}


def config_of(shape: str) -> dict[str, Any]:
    """Return a config.json of the shape."""
    hidden, intermediate, layers, heads, kv_heads = SHAPES[shape]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "vocab_size": 128_256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "dtype": "bfloat16",
    }


def synchronize(device: torch.device) -> None:
    """Wait for what the device was given to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def copy_bytes_per_s(device: torch.device) -> float:
    """Return the best bandwidth of copies within the device's memory, read and write counted."""
    size = 2**31 if device.type == "cuda" else 2**27
    source = torch.empty(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    best = 0.0
    for _ in range(COPIES):
        synchronize(device)
        started = time.perf_counter()
        target.copy_(source)
        synchronize(device)
        best = max(best, 2 * source.nbytes / (time.perf_counter() - started))
    return best


def decode_s(shape: str, context: int, device: torch.device) -> tuple[list[float], int]:
    """Return the time of each step, s, and the bytes that one must read."""
    config, dtype = parse_config(config_of(shape)), torch.bfloat16
    tensors = {
        name: torch.randn(size, dtype=dtype, device=device) * (size[-1] ** -0.5)
        for name, size in expected_shapes(config).items()
    }
    lookup = tensors["model.embed_tokens.weight"].nbytes  # one row of it is read
    weights = sum(tensor.nbytes for tensor in tensors.values()) - lookup
    model = build_decoder(tensors, config, dtype, device)
    blocks = -(-(context + WARM_UP + STEPS + 1) // BLOCK_SIZE)
    cache = PagedKvCache(config, blocks, BLOCK_SIZE, dtype, device)
    kv = 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize * context
    token, times = 3, []
    for position in range(context, context + WARM_UP + STEPS):
        held = position // BLOCK_SIZE + 1
        synchronize(device)
        started = time.perf_counter()
        rows = StepRows(
            torch.tensor([token], device=device),
            torch.tensor([position], device=device),
            torch.tensor([position], device=device),
            DecodeRows(
                1,
                torch.arange(held, device=device),
                (torch.arange(held * BLOCK_SIZE, device=device) <= position)[None, None, None],
            ),
            (),
            None,
        )
        token = greedy(model.forward(rows, cache))[0]
        times.append(time.perf_counter() - started)
    return times[WARM_UP:], weights + kv


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--shape", choices=tuple(SHAPES), default="8b")
    parser.add_argument("--context", type=int, default=1024)
    asked = parser.parse_args()
    device = torch.device(asked.device)
    if device.type == "cuda" and not torch.cuda.is_available():
        print("no CUDA device here: nothing was measured")
        return
    ceiling = copy_bytes_per_s(device)
    times, least_bytes = decode_s(asked.shape, asked.context, device)
    step_s = statistics.median(times)
    share = least_bytes / step_s / ceiling
    print(f"copy {ceiling / 1e9:.0f} GB/s, step {step_s * 1e3:.2f} ms, {share:.2f} of the ceiling")
    if device.type != "cuda":
        return  # to try the script: a CPU's caches hold the weights, and the share says nothing
    result = {
        "device": torch.cuda.get_device_name(device),
        "shape": asked.shape,
        "context_tokens": asked.context,
        "copy_bytes_per_s": round(ceiling),
        "least_bytes": least_bytes,
        "step_ms": round(step_s * 1e3, 3),
        "share_of_ceiling": round(share, 3),
        "raw_step_ms": [round(value * 1e3, 3) for value in times],
    }
    write_result("gpu_roofline", GOAL, result)


if __name__ == "__main__":
    main()
