"""The whole model as one file: each pipeline stage writes its layers, then they are joined."""

import os
from pathlib import Path


def stage_file(file: str, stage: int) -> Path:
    """Return where the layers of one pipeline stage are written."""
    return Path(f"{file}.stage{stage}")


def join_stages(file: str, stages: int) -> None:
    """Put the layers of all stages into one file, whole or not at all; remove the pieces."""
    from safetensors.numpy import load_file, save_file

    whole = {}
    for stage in range(stages):
        whole.update(load_file(stage_file(file, stage)))
    save_file(whole, f"{file}.part")
    os.replace(f"{file}.part", file)
    for stage in range(stages):
        stage_file(file, stage).unlink()
