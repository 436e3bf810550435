"""Record a run of your own generation code and measure it.

Run it: python examples/record_and_measure.py [STORE]
"""

import sys
from collections.abc import Iterator

from perfledger import measure, record

PROMPT_TOKENS, OUTPUT_TOKENS = 256, 32


def generate() -> Iterator[int]:
    """Stand in for your model: any iterable that yields a token when it has one."""
    state = 0
    for round_of_prompt in range(PROMPT_TOKENS * 2000):
        state = (state * 31 + round_of_prompt) % 1_000_003
    for _ in range(OUTPUT_TOKENS):
        for round_of_token in range(10_000):
            state = (state * 31 + round_of_token) % 1_000_003
        yield state


def main(store: str) -> None:
    with record(
        model="toy",
        quant="none",
        prompt_tokens=PROMPT_TOKENS,
        output_tokens=OUTPUT_TOKENS,
        temperature=0.0,
        store=store,
    ) as run:
        result = measure(run, generate, repeat=5, warmup=1)

    print(f"TTFT          {result.ttft_ns / 1e6:8.2f} ms")
    print(f"ITL p50       {(result.itl_p50_ns or 0) / 1e6:8.2f} ms")
    print(f"ITL p95       {(result.itl_p95_ns or 0) / 1e6:8.2f} ms")
    print(f"output        {result.tokens_per_s:8.1f} tokens/s")
    if result.joules_per_token is None:
        print(f"energy        {result.joules_note}")
    else:
        print(f"energy        {result.joules_per_token:8.4f} J/token")
    print(f"kept as run {run.run_id} in {store}")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "./perfledger-data")
