"""The store in this process, for tests."""

from __future__ import annotations

import io
import threading
from pathlib import Path
from typing import BinaryIO, ClassVar, cast

import fsspec  # type: ignore[import-untyped, unused-ignore]

from storage.errors import NotFoundError
from storage.fingerprint import digest_bytes
from storage.store import ObjectInfo, Store
from storage.uri import Location, check_key


class MemoryStore(Store):
    """Objects in fsspec's memory file system. Two stores of one name share their objects."""

    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._files = fsspec.filesystem("memory")
        self._root = f"/{location.root}/"

    def get_versioned(self, key: str) -> tuple[bytes, str]:
        file = self._files.store.get(self._root + check_key(key))
        if file is None:
            raise NotFoundError(f"no object {key!r} in {self.url}")
        data = cast(bytes, file.getvalue())  # not through the file's position, which all readers share
        return data, digest_bytes(data)

    def put(self, key: str, data: bytes) -> None:
        with self._lock:
            self._write(key, data)

    def put_if_absent(self, key: str, data: bytes) -> bool:
        return self.compare_and_swap(key, data, None)

    def compare_and_swap(self, key: str, data: bytes, version: str | None) -> bool:
        with self._lock:
            current = self.get_versioned(key)[1] if self.exists(key) else None
            if current == version:
                self._write(key, data)
            return current == version

    def size(self, key: str) -> int | None:
        file = self._files.store.get(self._root + check_key(key))
        return None if file is None else len(file.getvalue())

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        start = self._root + (check_key(prefix) + "/" if prefix else "")
        found = [(path, file) for path, file in sorted(self._files.store.copy().items()) if path.startswith(start)]
        return [
            ObjectInfo(key=path[len(self._root) :], size=len(file.getvalue()), modified=file.modified.timestamp()) for path, file in found
        ]

    def delete(self, key: str) -> None:
        with self._lock:
            self._files.store.pop(self._root + check_key(key), None)

    def upload(self, path: Path, key: str) -> None:
        self.put(key, path.read_bytes())

    def open(self, key: str) -> BinaryIO:
        return io.BytesIO(self.get(key))

    def _fetch(self, key: str, path: Path) -> None:
        path.write_bytes(self.get(key))

    def _write(self, key: str, data: bytes) -> None:
        self._files.pipe_file(self._root + check_key(key), data)
