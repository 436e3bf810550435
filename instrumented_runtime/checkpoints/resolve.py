"""From the word behind --model to a checkpoint folder."""

from pathlib import Path

from perfledger.schema.errors import UsageError

REFERENCES = ("reference", "reference-small", "reference-moe", "reference-moe-small")
SMOLLM2 = "smollm2"


def resolve(model: str) -> Path:
    """Return the checkpoint folder of a REFERENCES name, "smollm2" or a path.

    The named ones are made or converted once, into the cache. Raises UsageError for a folder that
    does not exist or holds no config.json, and for a missing package.
    """
    if model in REFERENCES:
        from perfledger.instrumented_runtime.checkpoints.reference import make_reference

        return make_reference(model)
    if model == SMOLLM2:
        from perfledger.instrumented_runtime.checkpoints.smollm2 import make_smollm2

        return make_smollm2()
    folder = Path(model).expanduser()
    if not (folder / "config.json").is_file():
        what = "holds no config.json" if folder.is_dir() else "is not a folder"
        raise UsageError(
            f"{model} {what}",
            fix=f"{', '.join((*REFERENCES, SMOLLM2))}, or a folder with config.json,"
            " *.safetensors and tokenizer.json (nothing is downloaded)",
        )
    return folder
