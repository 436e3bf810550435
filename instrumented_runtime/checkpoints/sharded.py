"""Checkpoints of a job: a shard from each rank, each with its checksum, and one manifest.

    FOLDER/step-00000040/shard-00000-of-00002.safetensors
                         shard-00000-of-00002.json      its size and SHA-256
                         manifest.json                  written last: the checkpoint counts

A checkpoint without its manifest never happened. Nothing is handed out before its bytes were
checked, and the one before the newest stays, so that there is something to go back to.
"""

import hashlib
import json
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from perfledger.schema.durable_folders import make_durably, sync_folder
from perfledger.schema.errors import NoDataError, PerfledgerError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

# Of what is written here; another number is refused, never guessed at.
FORMAT = 1
MANIFEST = "manifest.json"
KEPT = 2  # the newest and the one before it
ASIDE = "aside-"  # before the name of a checkpoint that the job went back before
_PREFIX = "step-"
_PIECE_BYTES = 1 << 22


class CheckpointError(PerfledgerError):
    """A checkpoint that must not be loaded: a shard is missing or damaged, or it is another's."""


@dataclass(frozen=True, slots=True)
class Shard:
    """The file of one rank."""

    name: str
    rank: int
    bytes: int
    sha256: str


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint is of. `layout` is the job's, like "fsdp=2"."""

    format: int
    step: int
    model_hash: str
    runtime_version: str
    layout: str
    shards: tuple[Shard, ...]

    @property
    def bytes(self) -> int:
        """Bytes of all shards."""
        return sum(shard.bytes for shard in self.shards)


@dataclass(frozen=True, slots=True)
class ShardIo:
    """One shard written or read: monotonic ns, checksum and sync included."""

    shard: Shard
    start_ns: int
    end_ns: int


@dataclass(frozen=True, slots=True)
class Identity:
    """What a checkpoint must agree with to be loaded here."""

    model_hash: str
    runtime_version: str
    layout: str
    ranks: int


def save_shard(
    folder: Path, step: int, rank: int, ranks: int, tensors: "Mapping[str, Tensor]"
) -> ShardIo:
    """Write and sync the shard of one rank; it counts once `commit` has named it.

    Every rank calls it. Raises CheckpointError with the path where the disk is full or gone.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    start_ns = time.monotonic_ns()
    place, name = _place(folder, step), shard_name(rank, ranks)
    part = place / f"{name}.part"
    try:
        make_durably(place)
        save_file({key: value.detach().contiguous().cpu() for key, value in tensors.items()}, part)
        shard = Shard(name, rank, part.stat().st_size, _sha256(part))
        _sync_file(part)
        part.replace(place / name)
        _write_json((place / name).with_suffix(".json"), asdict(shard))
    except (OSError, SafetensorError) as error:
        with suppress(OSError):
            part.unlink()  # it may fill the disk
        raise _unwritable(place / name, error) from None
    return ShardIo(shard, start_ns, time.monotonic_ns())


def commit(folder: Path, step: int, identity: Identity) -> Manifest:
    """Name the shards of all ranks in a manifest, and drop checkpoints that are no longer kept.

    One rank calls it, after all have saved. Later checkpoints are set aside: the job went back
    before them. Raises CheckpointError naming a rank whose shard is not there, or the manifest
    that cannot be written.
    """
    place = _place(folder, step)
    shards = []
    for rank in range(identity.ranks):
        name = shard_name(rank, identity.ranks)
        described = (place / name).with_suffix(".json")
        if not described.is_file():
            raise CheckpointError(f"rank {rank} did not save its shard", where=str(place))
        shards.append(_shard(_read_json(described), described))
    manifest = Manifest(
        FORMAT, step, identity.model_hash, identity.runtime_version, identity.layout, tuple(shards)
    )
    try:
        _write_json(place / MANIFEST, asdict(manifest))
    except OSError as error:
        raise _unwritable(place / MANIFEST, error) from None
    _tidy(folder, step)
    return manifest


def steps(folder: Path) -> list[int]:
    """Return the steps of the checkpoints that were committed, oldest first."""
    return sorted(step for step, place in _places(folder) if (place / MANIFEST).is_file())


def read_manifest(folder: Path, step: int) -> Manifest:
    """Return the manifest of a checkpoint. Raises CheckpointError if it is none of ours."""
    path = _place(folder, step) / MANIFEST
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint of step {step}", where=str(folder))
    fields = _read_json(path)
    if fields.get("format") != FORMAT:
        what = f"the checkpoint has format {fields.get('format')!r}, this runtime reads {FORMAT}"
        raise CheckpointError(what, where=str(path), fix="use the runtime that wrote it")
    try:
        shards = tuple(_shard(one, path) for one in fields.pop("shards"))
        return Manifest(**fields, shards=shards)
    except (KeyError, TypeError):
        raise CheckpointError("the manifest is damaged", where=str(path)) from None


def check_identity(manifest: Manifest, expected: Identity, folder: Path) -> None:
    """Raise CheckpointError unless a checkpoint is of this model, runtime and layout."""
    where = str(_place(folder, manifest.step))
    for name, found, wanted in (
        ("model", manifest.model_hash, expected.model_hash),
        ("layout", manifest.layout, expected.layout),
        ("ranks", len(manifest.shards), expected.ranks),
    ):
        if found != wanted:
            raise CheckpointError(
                f"the checkpoint's {name} is {found}, but this job's is {wanted}", where=where
            )
    if _major_minor(manifest.runtime_version) != _major_minor(expected.runtime_version):
        raise CheckpointError(
            f"runtime {manifest.runtime_version} wrote the checkpoint,"
            f" and {expected.runtime_version} is not compatible with it",
            where=where,
            fix=f"use runtime {manifest.runtime_version}",
        )


def load_shard(
    folder: Path, step: int, rank: int, expected: Identity
) -> "tuple[dict[str, Tensor], ShardIo]":
    """Return the tensors of a rank's shard, after its checksum was found right.

    Raises CheckpointError naming the shard that is missing or damaged, or what does not agree.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load

    start_ns = time.monotonic_ns()
    manifest = read_manifest(folder, step)
    check_identity(manifest, expected, folder)
    shard = manifest.shards[rank]
    body = _checked(_place(folder, step) / shard.name, shard)
    try:
        tensors: dict[str, Tensor] = load(body)
    except SafetensorError as error:
        raise CheckpointError(f"cannot read {shard.name}: {error}", where=str(folder)) from None
    return tensors, ShardIo(shard, start_ns, time.monotonic_ns())


def verify(folder: Path, step: int) -> Manifest:
    """Check the bytes of every shard of a checkpoint. Raises CheckpointError naming the first."""
    manifest = read_manifest(folder, step)
    for shard in manifest.shards:
        _checked(_place(folder, step) / shard.name, shard)
    return manifest


def newest_good(folder: Path) -> tuple[Manifest, list[CheckpointError]]:
    """Return the newest checkpoint whose shards are all right, and why newer ones are not.

    It is for going back after a crash; the caller says what was passed over. Raises NoDataError
    if there is no checkpoint, and the newest one's CheckpointError if none is good.
    """
    passed_over: list[CheckpointError] = []
    for step in reversed(steps(folder)):
        try:
            return verify(folder, step), passed_over
        except CheckpointError as error:
            passed_over.append(error)
    if not passed_over:
        raise NoDataError("there is no checkpoint", where=str(folder))
    raise passed_over[0]


def _checked(path: Path, shard: Shard) -> bytes:
    try:
        body = path.read_bytes()
    except OSError as error:
        what = f"{shard.name} (rank {shard.rank}) is missing or unreadable: {error.strerror}"
        raise CheckpointError(what, where=str(path.parent)) from None
    if len(body) != shard.bytes:
        what = f"{shard.name} (rank {shard.rank}) has {len(body)} bytes instead of {shard.bytes}"
        raise CheckpointError(what, where=str(path.parent))
    if hashlib.sha256(body).hexdigest() != shard.sha256:
        what = f"{shard.name} (rank {shard.rank}) is damaged: its checksum is another"
        raise CheckpointError(what, where=str(path.parent))
    return body


def _shard(fields: Any, path: Path) -> Shard:
    try:
        shard = Shard(**fields)
        if Path(shard.name).name != shard.name or shard.bytes < 0:
            raise ValueError
    except (TypeError, ValueError):
        raise CheckpointError("a shard is described wrongly", where=str(path)) from None
    return shard


def _tidy(folder: Path, newest: int) -> None:
    """Drop what is no longer kept, set aside what lies ahead. What fails is left as it is."""
    with suppress(OSError):
        for ahead in (step for step in steps(folder) if step > newest):
            aside = folder / f"{ASIDE}{_place(folder, ahead).name}"
            shutil.rmtree(aside, ignore_errors=True)
            _place(folder, ahead).replace(aside)
        for old in steps(folder)[:-KEPT]:
            _drop(_place(folder, old))
        for step, place in _places(folder):
            if step < newest and not (place / MANIFEST).exists():
                shutil.rmtree(place, ignore_errors=True)  # killed while it was saved


def _unwritable(path: Path, error: Exception) -> CheckpointError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    what = f"cannot save the checkpoint: {reason}"
    fix = "make room there, or another folder; what was saved before is still good"
    return CheckpointError(what, where=str(path), fix=fix)


def _drop(place: Path) -> None:
    """Remove a checkpoint: first it stops counting, then its bytes go."""
    (place / MANIFEST).unlink(missing_ok=True)
    sync_folder(place)
    shutil.rmtree(place, ignore_errors=True)


def _place(folder: Path, step: int) -> Path:
    if step < 0:
        raise UsageError(f"step {step} is before the first")
    return folder / f"{_PREFIX}{step:08d}"


def _places(folder: Path) -> list[tuple[int, Path]]:
    """Return the folders of all checkpoints, those that were not committed too."""
    named = [(place.name.removeprefix(_PREFIX), place) for place in folder.glob(f"{_PREFIX}*")]
    return [(int(number), place) for number, place in named if number.isdecimal()]


def shard_name(rank: int, ranks: int) -> str:
    """Return the file name of a rank's shard."""
    return f"shard-{rank:05d}-of-{ranks:05d}.safetensors"


def _major_minor(version: str) -> tuple[str, ...]:
    return tuple(version.split(".")[:2])


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


def _sync_file(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())


def _write_json(path: Path, fields: dict[str, Any]) -> None:
    """Write a file that is whole or not there, and durable."""
    part = path.with_name(f"{path.name}.part")
    part.write_text(json.dumps(fields, indent=1, sort_keys=True))
    _sync_file(part)
    part.replace(path)
    sync_folder(path.parent)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path.name} cannot be read: {error}", where=str(path)) from None
    if not isinstance(fields, dict):
        raise CheckpointError(f"{path.name} is not a JSON object", where=str(path))
    return fields
