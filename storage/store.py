"""One interface over a local folder, S3 and process memory: bytes under keys, with two atomic conditional writes.

`put_if_absent` and `compare_and_swap` are the only ways to commit. No write is visible before it is whole.
The adapters are `storage.local`, `storage.s3` and `storage.memory`. Differs from the design page: S3 goes through boto3
alone, since s3fs has no compare-and-swap and caches listings, and one client is smaller than two.
"""

from __future__ import annotations

import os
import uuid
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from storage import layout
from storage.errors import StorageError
from storage.uri import Location, parse


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """One line of a listing."""

    key: str
    size: int  # bytes
    modified: float  # unix seconds, by the store's clock


def open_store(url: str) -> Store:
    """The store at a location that `storage.uri.parse` reads. Nothing is created or asked yet; see `Store.probe`."""
    location = parse(url)
    if location.scheme == "file":
        from storage.local import FileStore

        return FileStore(location)
    if location.scheme == "memory":
        from storage.memory import MemoryStore

        return MemoryStore(location)
    from storage.s3 import S3Store  # boto3 takes a third of a second to import

    return S3Store(location)


class Store(ABC):
    """Objects under keys ('a/b.json'). Keys with '..' or empty parts raise StorageError. Safe to share between threads."""

    def __init__(self, location: Location) -> None:
        self.url = location.url

    def __reduce__(self) -> tuple[Any, ...]:
        return open_store, (self.url,)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def get(self, key: str) -> bytes:
        """The whole object; NotFoundError."""
        return self.get_versioned(key)[0]

    @abstractmethod
    def get_versioned(self, key: str) -> tuple[bytes, str]:
        """The object and its version token for `compare_and_swap`; NotFoundError.

        A token is made of the content: writing A, then B, then A again gives back the first token. Whoever swaps puts
        something into the object that never repeats (an epoch, an attempt).
        """

    @abstractmethod
    def put(self, key: str, data: bytes) -> None:
        """Plain overwrite, for what is no commit."""

    @abstractmethod
    def put_if_absent(self, key: str, data: bytes) -> bool:
        """Creates the object, or returns False when there is one; among racing callers exactly one gets True."""

    @abstractmethod
    def compare_and_swap(self, key: str, data: bytes, version: str | None) -> bool:
        """Writes if the object is still at `version` (None: absent); False when somebody else moved it."""

    @abstractmethod
    def size(self, key: str) -> int | None:
        """Bytes, or None when there is no such object."""

    @abstractmethod
    def list(self, prefix: str = "") -> list[ObjectInfo]:
        """All objects below the folder `prefix` ('a' holds 'a/b' and 'a/b/c', not 'ab'), sorted by key, never from a cache."""

    @abstractmethod
    def delete(self, key: str) -> None:
        """No error when absent."""

    @abstractmethod
    def upload(self, path: Path, key: str) -> None:
        """The whole file as one object, overwriting; killed or failing half-way, it leaves what was there before."""

    @abstractmethod
    def open(self, key: str) -> BinaryIO:
        """Read-only and seekable; NotFoundError."""

    @abstractmethod
    def _fetch(self, key: str, path: Path) -> None:
        """Writes the object to a new file; NotFoundError."""

    def exists(self, key: str) -> bool:
        return self.size(key) is not None

    def download(self, key: str, path: Path) -> None:
        """Through a temporary name beside `path`, then a rename; the folder is made when missing."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name[:100]}.{uuid.uuid4().hex}.part")
        try:
            self._fetch(key, temporary)
            os.replace(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def local_path(self, key: str) -> Path | None:
        """The file or folder itself, for reading, where the store is a local folder (whether it exists or not); else None."""
        return None

    def sweep(self, older_than: float) -> int:
        """Deletes unfinished files that killed processes left before `older_than` (unix seconds), where there can be such; how many."""
        return 0

    def identity(self) -> str:
        """A random name of this store, made at the first call: tells two stores apart, wherever they lie."""
        self.put_if_absent(layout.store_id_key(), uuid.uuid4().hex.encode())
        return self.get(layout.store_id_key()).decode()

    def probe(self) -> None:
        """StorageError unless both conditional writes are honoured here. Writes one small object and deletes it."""
        key = layout.probe_key(uuid.uuid4().hex)
        refusal = f"the store {self.url} cannot be used, since racing writers would overwrite each other: "
        try:
            if not self.put_if_absent(key, b"first"):
                raise StorageError(refusal + "a create-only write of a new name was turned down")
            if self.put_if_absent(key, b"second") or self.get(key) != b"first":
                raise StorageError(refusal + "it ignores create-only writes (If-None-Match)")
            if self.compare_and_swap(key, b"second", '"00000000000000000000000000000000"') or self.get(key) != b"first":
                raise StorageError(refusal + "it ignores the version of a compare-and-swap (If-Match)")
            if not self.compare_and_swap(key, b"third", self.get_versioned(key)[1]) or self.get(key) != b"third":
                raise StorageError(refusal + "it turns down a compare-and-swap from the right version (If-Match)")
        except StorageError:
            raise
        except OSError as error:  # no permission, read-only, no hard links on this file system
            raise StorageError(f"the store {self.url} cannot be written safely: {error}") from error
        finally:
            with suppress(OSError):  # the first error is the one to tell
                self.delete(key)
