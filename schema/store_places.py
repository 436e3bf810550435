"""Where a store's files lie: a local folder or an S3 bucket, with the five things done to files.

A key is a file's name below the root, with `/` between folders. A file appears whole under its
key or not at all, is never changed afterwards, and is created by at most one caller.
"""

import builtins
import io
import os
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Protocol
from urllib.parse import urlsplit

import pyarrow as pa

from perfledger.schema.durable_folders import make_durably, sync_folder
from perfledger.schema.errors import UsageError

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Store

# What is being written; never data, whatever became of its writer.
WRITING = ".writing"


@dataclass(frozen=True)
class Entry:
    """One file that is there: its key, size, and when it was last changed (wall ns)."""

    key: str
    bytes: int
    modified_ns: int


class Place(Protocol):
    """A root folder. Every method may raise OSError where the medium fails."""

    @property
    def url(self) -> str:
        """Name the root as a user would."""

    @property
    def polars_options(self) -> dict[str, str] | None:
        """Return the storage options with which polars opens `address(key)`."""

    def address(self, key: str) -> str:
        """Return the path or URL of a file."""

    def list(self, folder: str, first: str = "") -> list[Entry]:
        """Return the files below a folder in order of their keys, from the sub-folder `first` on.

        Files that are there all the while are in it; those that come or go meanwhile may be.
        """

    def folders(self) -> builtins.list[str]:
        """Return the names of the folders in the root, in order."""

    def exists(self, key: str) -> bool:
        """Return whether a file is there."""

    def create(self, key: str, content: pa.Buffer) -> bool:
        """Create a file durably, and return whether this call did: False if it is there."""

    def settle(self, key: str) -> None:
        """Make sure that a file which is there is durable: a sync after it may have failed."""

    def read(self, key: str) -> pa.Buffer:
        """Return a whole file. Raises FileNotFoundError."""

    def open(self, key: str) -> pa.NativeFile:
        """Open a file to be read in parts; close it. Raises FileNotFoundError."""

    def delete(self, key: str) -> None:
        """Delete a file, if it is there."""

    def prepare(self, folder: str) -> None:
        """Make a folder where there are such, and find out whether it can be written to."""


def place_at(url: str) -> Place:
    """Return the place that a URL names: a folder, file://, or s3://bucket/prefix.

    Raises UsageError for anything else.
    """
    if not url:
        raise UsageError("the store has no name", fix="give a folder: --store ./perfledger-data")
    if url.startswith("s3://"):
        return S3Place.at(url)
    if "://" in url and not url.startswith("file://"):
        fix = "give a local folder, e.g. --store ./perfledger-data, or s3://bucket/prefix"
        raise UsageError(f"cannot open the store {url!r}", fix=fix)
    root = Path(url.removeprefix("file://"))
    if root.exists() and not root.is_dir():
        raise UsageError(f"the store {url!r} is not a folder", fix="give a folder")
    return LocalPlace(root)


@dataclass(frozen=True)
class LocalPlace:
    """A local folder (or a mounted one that has hard links)."""

    root: Path

    @property
    def url(self) -> str:
        return str(self.root)

    @property
    def polars_options(self) -> dict[str, str] | None:
        return None

    def address(self, key: str) -> str:
        return str(self.root / key)

    def list(self, folder: str, first: str = "") -> list[Entry]:
        found: list[Entry] = []
        with (
            suppress(FileNotFoundError, NotADirectoryError),
            os.scandir(self.root / folder) as all_,
        ):
            for item in sorted(all_, key=lambda item: item.name):
                key = f"{folder}/{item.name}"
                if item.is_dir():
                    found += self.list(key) if item.name >= first else []
                elif item.name >= first:
                    with suppress(FileNotFoundError):
                        stat = item.stat()
                        found.append(Entry(key, stat.st_size, stat.st_mtime_ns))
        return found

    def folders(self) -> builtins.list[str]:
        try:
            return sorted(path.name for path in self.root.iterdir() if path.is_dir())
        except FileNotFoundError:
            return []

    def exists(self, key: str) -> bool:
        return (self.root / key).exists()

    def create(self, key: str, content: pa.Buffer) -> bool:
        """Write, sync, link, sync the folder: a crash leaves a whole file or none."""
        path = self.root / key
        scratch = path.with_name(f"{path.stem}.{secrets.token_hex(4)}{WRITING}")
        try:
            with _open_new(scratch) as sink:
                sink.write(content)
                sink.flush()
                os.fsync(sink.fileno())
            try:
                os.link(scratch, path)
            except FileExistsError:
                self.settle(key)
                return False
        finally:
            scratch.unlink(missing_ok=True)
        sync_folder(path.parent)
        return True

    def settle(self, key: str) -> None:
        folder = (self.root / key).parent
        sync_folder(folder)
        sync_folder(folder.parent)

    def read(self, key: str) -> pa.Buffer:
        return pa.py_buffer((self.root / key).read_bytes())

    def open(self, key: str) -> pa.NativeFile:
        return pa.OSFile(str(self.root / key))

    def delete(self, key: str) -> None:
        path = self.root / key
        path.unlink(missing_ok=True)
        with suppress(OSError):  # the folder is there until its last file has gone
            path.parent.rmdir()

    def prepare(self, folder: str) -> None:
        path = self.root / folder
        make_durably(path)
        with tempfile.TemporaryFile(dir=path):
            pass


@dataclass(frozen=True)
class S3Place:
    """A prefix of a bucket; credentials, region and endpoint come from AWS_* variables."""

    url: str
    client: "S3Store"

    @classmethod
    def at(cls, url: str) -> "S3Place":
        """Open `s3://bucket/prefix`. Raises UsageError without a bucket or without the extra."""
        parts = urlsplit(url)
        if not parts.netloc:
            raise UsageError(f"no bucket in {url!r}", fix="s3://bucket/prefix")
        try:
            from obstore.store import S3Store
        except ImportError as error:
            raise UsageError("S3 needs a library", fix="pip install perfledger[s3]") from error
        options: ClientConfig = {"allow_http": _endpoint().startswith("http://")}
        prefix = parts.path.strip("/")
        client = S3Store(
            parts.netloc,
            prefix=prefix or None,
            client_options=options,
            retry_config={"max_retries": 5, "retry_timeout": timedelta(seconds=30)},
        )
        return cls(url.rstrip("/"), client)

    @property
    def polars_options(self) -> dict[str, str] | None:
        allow = "true" if _endpoint().startswith("http://") else "false"
        storage = {"aws_allow_http": allow}
        if _endpoint():
            storage["aws_endpoint_url"] = _endpoint()
        return storage

    def address(self, key: str) -> str:
        return f"{self.url}/{key}"

    def list(self, folder: str, first: str = "") -> list[Entry]:
        begin = f"{folder}/{first}"
        # One letter less: SeaweedFS takes "after hour" for "after the folder of that hour".
        offset = begin[:-1] if first else None
        with _as_os_error(folder):
            pages = list(self.client.list(f"{folder}/", offset=offset))
        found = [
            Entry(item["path"], item["size"], int(item["last_modified"].timestamp() * 1e9))
            for page in pages
            for item in page
            if item["path"] >= begin
        ]
        return sorted(found, key=lambda entry: entry.key)

    def folders(self) -> builtins.list[str]:
        with _as_os_error(""):
            found = self.client.list_with_delimiter()["common_prefixes"]
        return sorted(str(path) for path in found)

    def exists(self, key: str) -> bool:
        with suppress(FileNotFoundError), _as_os_error(key):
            self.client.head(key)
            return True
        return False

    def create(self, key: str, content: pa.Buffer) -> bool:
        """One conditional put (If-None-Match: *), which a server obeys or refuses."""
        with suppress(FileExistsError), _as_os_error(key):
            self.client.put(key, content.to_pybytes(), mode="create", use_multipart=False)
            return True
        return False

    def settle(self, key: str) -> None:
        """Do nothing: an object that is there is durable."""

    def read(self, key: str) -> pa.Buffer:
        with _as_os_error(key):
            return pa.py_buffer(self.client.get(key).bytes())

    def open(self, key: str) -> pa.NativeFile:
        return pa.PythonFile(_Ranges(self, key), mode="r")

    def delete(self, key: str) -> None:
        with suppress(FileNotFoundError), _as_os_error(key):
            self.client.delete(key)

    def prepare(self, folder: str) -> None:
        """Create and delete a file, so that a wrong endpoint or credential is found at once."""
        key = f"{folder}/{secrets.token_hex(8)}{WRITING}"
        self.create(key, pa.py_buffer(b""))
        self.delete(key)


class _Ranges(io.RawIOBase):
    """An object of S3 as a file; each read is one ranged get."""

    def __init__(self, place: S3Place, key: str) -> None:
        self._place, self._key, self._at = place, key, 0
        with _as_os_error(key):
            self._bytes = place.client.head(key)["size"]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._bytes}[whence]
        self._at = base + offset
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._bytes - self._at)
        size = left if size < 0 else min(size, left)
        if not size:
            return b""
        with _as_os_error(self._key):
            found = self._place.client.get_range(self._key, start=self._at, length=size)
        self._at += size
        return bytes(found)


def _open_new(path: Path) -> BinaryIO:
    """Open a new file; its folder is made, again if a `delete` took the empty one away."""
    for _ in range(10):
        make_durably(path.parent)
        with suppress(FileNotFoundError):
            return open(path, "xb")
    raise FileNotFoundError(f"{path.parent} keeps vanishing")


def _endpoint() -> str:
    return os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL", "")


@contextmanager
def _as_os_error(key: str) -> Iterator[None]:
    """Raise what the S3 client raises as the OSError that a folder would have raised."""
    from obstore import exceptions

    try:
        yield
    except (exceptions.AlreadyExistsError, exceptions.PreconditionError) as error:
        raise FileExistsError(key) from error
    except (FileNotFoundError, exceptions.NotFoundError) as error:
        raise FileNotFoundError(f"no object {key}, or no bucket") from error
    except exceptions.BaseError as error:
        raise OSError(f"{key}: {type(error).__name__}: {_first_line(error)}") from error


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [""])[0]
