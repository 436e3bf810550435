"""Coverage-guided fuzzing of the span scanner against protobuf's own parser.

    python benchmarks/fuzz_scanner.py [SECONDS] [FOLDER]

atheris mutates requests for so long (default 60 s), starting from odd but valid ones, and keeps in
FOLDER (default: a temporary one) what reaches new code. Whatever is not answered with the right
rows or a refusal stops it with exit code 77, and the input is in FOLDER/crash-…; a test of it
belongs into tests/test_wire_damage.py.

Coverage is of Python: kernels are machine code that atheris does not see into. To have every index
into an array checked, set NUMBA_BOUNDSCHECK=1 and a PERFLEDGER_CACHE of its own.
"""

import sys
import tempfile
from pathlib import Path

import atheris

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))
# Not the modules with kernels: numba cannot read what atheris makes of a function.
_KERNELS = ("jit", "protobuf", "text", "scan", "keys", "fates", "simple_json", "gather")
_KERNELS += ("plain_attributes", "recent_spans")
_UNSEEN = [f"perfledger.collectors.wire.{name}" for name in _KERNELS]
with atheris.instrument_imports(include=["perfledger"], exclude=_UNSEEN):
    from wire_damage import damaged
    from wire_forms import Writer
    from wire_verdict import assert_survived

_SEEDS = 300
_LIMIT = 48


def one_input(body: bytes) -> None:
    """Fuzz with one input."""
    assert_survived(body, _LIMIT)


def main() -> None:
    """Write the first inputs and fuzz."""
    seconds = sys.argv[1] if len(sys.argv) > 1 else "60"
    folder = Path(sys.argv[2] if len(sys.argv) > 2 else tempfile.mkdtemp(prefix="fuzz-scanner-"))
    folder.mkdir(parents=True, exist_ok=True)
    for seed in range(_SEEDS):
        (folder / f"form-{seed}").write_bytes(Writer(seed, 0.1, content=seed % 2 == 0).request())
        (folder / f"damaged-{seed}").write_bytes(damaged(seed))
    print(f"inputs and crashes: {folder}", flush=True)
    limits = [f"-max_total_time={seconds}", "-max_len=4096", "-timeout=20", "-rss_limit_mb=3000"]
    arguments = [sys.argv[0], *limits, f"-artifact_prefix={folder}/", str(folder)]
    atheris.Setup(arguments, one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
