"""The store in a local folder."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from storage.errors import NotFoundError, StorageError
from storage.fingerprint import digest_bytes
from storage.store import ObjectInfo, Store
from storage.uri import Location, check_key, resolve_inside

_SCRATCH = ".tmp"  # first part of the keys that a local folder keeps for itself


LOCK_SECONDS = 30.0


class FileStore(Store):
    """A folder. Creation is a hard link of a finished file, a swap is a rename under flock; both are synced to disk.

    Unfinished files lie in `.tmp/` of the folder, which is no key and is never listed.
    """

    def __init__(self, location: Location) -> None:
        super().__init__(location)
        self._root = Path(location.root)

    def local_path(self, key: str) -> Path:
        if check_key(key).split("/")[0] == _SCRATCH:
            raise StorageError(f"key {key!r} is refused: {_SCRATCH!r} holds unfinished files")
        return resolve_inside(self._root, key)

    def get_versioned(self, key: str) -> tuple[bytes, str]:
        with self.open(key) as file:
            data = file.read()
        return data, digest_bytes(data)

    def put(self, key: str, data: bytes) -> None:
        with self._finished(data) as temporary:
            self._rename(temporary, self.local_path(key))

    def put_if_absent(self, key: str, data: bytes) -> bool:
        path = self.local_path(key)
        if path.exists():
            return False
        with self._finished(data) as temporary:
            _make_folder(path.parent)
            try:
                os.link(temporary, path)
            except FileExistsError:
                return False
            _sync(path.parent)
        return True

    def compare_and_swap(self, key: str, data: bytes, version: str | None) -> bool:
        if version is None:
            return self.put_if_absent(key, data)
        path = self.local_path(key)
        # Both syncs are outside the lock: a process that is stopped or stalled in one holds nobody up.
        with self._finished(data) as temporary:
            with self._locked(key):
                try:
                    if self.get_versioned(key)[1] != version:
                        return False
                except NotFoundError:
                    return False
                os.replace(temporary, path)
        _sync(path.parent)
        return True

    def size(self, key: str) -> int | None:
        try:
            found = self.local_path(key).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def list(self, prefix: str = "") -> list[ObjectInfo]:
        top = self.local_path(prefix) if prefix else self._root
        found = []
        for folder, subfolders, names in os.walk(top, onerror=_raise_unless_gone):
            if Path(folder) == self._root and _SCRATCH in subfolders:
                subfolders.remove(_SCRATCH)
            for path in (Path(folder) / name for name in names):
                try:
                    info = path.lstat()
                except FileNotFoundError:
                    continue  # deleted since the folder was read
                if stat.S_ISREG(info.st_mode):
                    key = (prefix / path.relative_to(top) if prefix else path.relative_to(top)).as_posix()
                    found.append(ObjectInfo(key=key, size=info.st_size, modified=info.st_mtime))
        return sorted(found, key=lambda info: info.key)

    def delete(self, key: str) -> None:
        path = self.local_path(key)
        try:
            path.unlink()
            _sync(path.parent)
        except (FileNotFoundError, NotADirectoryError):
            return

    def upload(self, path: Path, key: str) -> None:
        with self._temporary() as temporary:
            shutil.copyfile(path, temporary)
            _sync(temporary)
            self._rename(temporary, self.local_path(key))

    def open(self, key: str) -> BinaryIO:
        try:
            return self.local_path(key).open("rb")
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise NotFoundError(f"no object {key!r} in {self.url}") from error

    def _fetch(self, key: str, path: Path) -> None:
        with self.open(key) as source, path.open("xb") as target:
            shutil.copyfileobj(source, target, 1 << 20)

    def sweep(self, older_than: float) -> int:
        swept = 0
        for path in (self._root / _SCRATCH).glob("*"):
            if not path.name.startswith("lock-") and path.stat().st_mtime < older_than:
                path.unlink(missing_ok=True)
                swept += 1
        return swept

    @contextmanager
    def _temporary(self) -> Iterator[Path]:
        path = self._root / _SCRATCH / uuid.uuid4().hex
        _make_folder(path.parent)
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    @contextmanager
    def _finished(self, data: bytes) -> Iterator[Path]:
        """A temporary file with these bytes, on disk."""
        with self._temporary() as path:
            path.write_bytes(data)
            _sync(path)
            yield path

    @contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """One of 256 lock files, by key, held for a moment; the kernel drops the lock of a process that dies.

        StorageError after `LOCK_SECONDS`: only a process that was stopped in that very moment holds it so long.
        """
        path = self._root / _SCRATCH / f"lock-{digest_bytes(key.encode())[:2]}"
        _make_folder(path.parent)
        with path.open("wb") as file:
            deadline = time.monotonic() + LOCK_SECONDS
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise StorageError(
                            f"cannot move {key!r}: another process has held the lock {str(path)!r} for {LOCK_SECONDS:g} s; "
                            f"it is probably stopped (state T in ps): let it go on, or end it, and run again"
                        ) from None
                    time.sleep(0.005)
            yield

    def _rename(self, temporary: Path, path: Path) -> None:
        _make_folder(path.parent)
        os.replace(temporary, path)
        _sync(path.parent)


def _make_folder(path: Path) -> None:
    """As mkdir -p, with each new folder's name on disk."""
    if not path.is_dir():
        _make_folder(path.parent)
        path.mkdir(exist_ok=True)
        _sync(path.parent)


def _sync(path: Path) -> None:
    """fsync of a file or folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error
