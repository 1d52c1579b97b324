"""One file of a source: its bytes, its digest, and what its name says of its format and compression."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from shutil import copyfileobj
from typing import BinaryIO, Protocol, cast

from storage.store import Store
from twinkle_core.errors import ConfigError, DataError, StorageError

BLOCK_BYTES = 1 << 20

_COMPRESSIONS = {".gz": "gzip", ".zst": "zstd"}
_FORMATS = {
    ".jsonl": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
}
KNOWN_ENDINGS = f"{', '.join(_FORMATS)}, each also with {' or '.join(_COMPRESSIONS)} at its end"


class UnreadableFileError(DataError):
    """A file as a whole is not what its name says, or is damaged; no `on_bad_row` passes over that. The message starts with its name."""


@dataclass(frozen=True)
class FileType:
    """What rows are read from the bytes, and how they are packed."""

    format: str
    """jsonl, json, csv, parquet, arrow or text."""
    compression: str | None
    """gzip, zstd or None."""


def file_type(name: str) -> FileType | None:
    """From the ending of `name`, in any case; None for one that is not known."""
    suffixes = [suffix.lower() for suffix in Path(name).suffixes[-2:]]
    compression = _COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    if compression:
        suffixes.pop()
    found = _FORMATS.get(suffixes[-1]) if suffixes else None
    return FileType(found, compression) if found else None


class Content(Protocol):
    """Where the bytes of a file lie."""

    def open(self) -> BinaryIO:
        """For reading, seekable. Raises `DataError` or `StorageError` naming what is not there."""
        ...


@dataclass(frozen=True)
class LocalContent:
    path: Path

    def open(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except OSError as error:
            raise DataError(f"cannot read source file {self.path}: {error.strerror}; give the path of a {KNOWN_ENDINGS} file") from error


@dataclass(frozen=True)
class StoredContent:
    store: Store
    key: str

    def open(self) -> BinaryIO:
        return self.store.open(self.key)


@dataclass(frozen=True)
class DataFile:
    """One file. `name` is for people and holds no path of this machine."""

    name: str
    content: Content
    type: FileType
    loose_json: bool = False
    """Whether a .json file may hold one object a line: so it is on hubs, where the user cannot rename it."""

    def digest(self) -> str:
        """sha256 hex of the raw bytes, read in blocks."""
        digest = hashlib.sha256()
        with self.content.open() as stream:
            while block := stream.read(BLOCK_BYTES):
                digest.update(block)
        return digest.hexdigest()

    @contextmanager
    def reading(self) -> Iterator[BinaryIO]:
        """The unpacked bytes, front to back. Raises `UnreadableFileError` where a compressed file is cut short or damaged."""
        with self.content.open() as raw:
            if self.type.compression is None:
                yield raw
                return
            import pyarrow as pa

            # pyarrow's streams tell a file that was cut off from one that ends, and read files glued together
            with pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), self.type.compression) as unpacked:
                yield cast(BinaryIO, _Unpacked(unpacked, self))

    @contextmanager
    def seeking(self) -> Iterator[BinaryIO]:
        """The unpacked bytes, seekable: a compressed file is unpacked into a temporary one first."""
        if self.type.compression is None:
            with self.content.open() as raw:
                yield raw
            return
        with tempfile.TemporaryFile() as unpacked, self.reading() as stream:
            copyfileobj(stream, unpacked, BLOCK_BYTES)
            unpacked.seek(0)
            yield cast(BinaryIO, unpacked)


class _Unpacked:
    def __init__(self, stream: BinaryIO, file: DataFile) -> None:
        self._stream, self._file = stream, file

    def read(self, size: int) -> bytes:
        try:
            return self._stream.read(size)
        except StorageError:
            raise
        except OSError as error:
            reason = f"{self._file.name} is no whole {self._file.type.compression} file: {error}; fetch or write it again"
            raise UnreadableFileError(reason) from error


def typed(source: str, name: str) -> FileType:
    """The type of a file that the user named. Raises `ConfigError` for an unknown ending."""
    found = file_type(name)
    if found is None:
        raise ConfigError(f"source '{source}': {name!r} is of no known type; known are {KNOWN_ENDINGS}")
    return found
