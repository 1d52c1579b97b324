"""One file of a source: its bytes, its digest, and what its name says of its format and compression."""

from __future__ import annotations

import hashlib
import re
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
_STARTS = (
    (rb"\x1f\x8b", "", "a gzip file: give it a name that ends in .gz"),
    (rb"\x28\xb5\x2f\xfd", "", "a zstd file: give it a name that ends in .zst"),
    (rb"BZh[1-9]1AY&SY", "", "a bzip2 file: unpack it"),
    (rb"\xfd7zXZ\x00", "", "an xz file: unpack it"),
    (rb"PK\x03\x04", "", "a zip file: unpack it"),
    (rb"PAR1\x15", "parquet", "a Parquet file: give it a name that ends in .parquet"),
    (rb"ARROW1\x00\x00", "arrow", "an Arrow file: give it a name that ends in .arrow"),
)
"""How files start that are no text, whose names should say so."""
_LONGEST_START = 10


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
        """The unpacked bytes, front to back. Raises `UnreadableFileError` where a compressed file is cut short or damaged,
        and where the bytes are of another type than the name says."""
        with self.content.open() as raw:
            if self.type.compression is None:
                yield cast(BinaryIO, _Checked(raw, self))
                return
            import pyarrow as pa

            # pyarrow's streams tell a file that was cut off from one that ends, and read files glued together
            with pa.CompressedInputStream(pa.PythonFile(raw, mode="r"), self.type.compression) as unpacked:
                yield cast(BinaryIO, _Checked(unpacked, self))

    @contextmanager
    def seeking(self) -> Iterator[BinaryIO]:
        """The unpacked bytes, seekable: a compressed file is unpacked into a temporary one first."""
        if self.type.compression is None:
            with self.content.open() as raw:
                self.check_start(raw.read(_LONGEST_START))
                raw.seek(0)
                yield raw
            return
        with tempfile.TemporaryFile() as unpacked, self.reading() as stream:
            copyfileobj(stream, unpacked, BLOCK_BYTES)
            unpacked.seek(0)
            yield cast(BinaryIO, unpacked)

    def check_start(self, start: bytes) -> None:
        """Raises `UnreadableFileError` where the unpacked bytes are of a type that the name does not tell."""
        for pattern, named, problem in _STARTS:
            if named != self.type.format and re.match(pattern, start):
                inside = f"unpacked, {self.name} is" if self.type.compression else f"{self.name} is"
                raise UnreadableFileError(f"{inside} {problem}")


class _Checked:
    def __init__(self, stream: BinaryIO, file: DataFile) -> None:
        self._stream, self._file, self._at_start = stream, file, True

    def read(self, size: int) -> bytes:
        try:
            data = self._stream.read(size)
            if self._at_start:
                self._file.check_start(data[:_LONGEST_START])
                self._at_start = False
            return data
        except StorageError:
            raise
        except OSError as error:
            if self._file.type.compression is None:
                raise
            reason = f"{self._file.name} is no whole {self._file.type.compression} file: {error}; fetch or write it again"
            raise UnreadableFileError(reason) from error


def typed(source: str, name: str) -> FileType:
    """The type of a file that the user named. Raises `ConfigError` for an unknown ending."""
    found = file_type(name)
    if found is None:
        raise ConfigError(f"source '{source}': {name!r} is of no known type; known are {KNOWN_ENDINGS}")
    return found
