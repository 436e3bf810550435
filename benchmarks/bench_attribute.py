"""How long `perfledger attribute` takes over 100,000 requests, and how much memory it needs.

    python benchmarks/bench_attribute.py [REQUESTS]

It makes a store (spans, steps and derived requests, about 60 MB), then runs the command as a user
would, several times, and measures each process from the outside.
"""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))  # python -P leaves it out
from command_cost import cost_on_store  # noqa: E402
from recording import write_result  # noqa: E402

GOAL = "perfledger attribute over 100,000 requests: under 5 s, under 1 GiB"


def main() -> None:
    requests = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000

    def expect(_: str) -> Callable[..., None]:
        def check(printed: Mapping[str, Any], rows: Mapping[str, int]) -> None:
            assert printed["requests"] == requests

        return check

    result = cost_on_store("attribute", "synthetic_store.py", requests, 5, expect)
    write_result("attribute", GOAL, result)


if __name__ == "__main__":
    main()
