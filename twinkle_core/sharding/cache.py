"""A bounded folder of shards fetched from a remote store, shared by all processes of a host."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import BufferedReader
from pathlib import Path
from typing import Any, BinaryIO, cast

from storage.artifact import FileEntry
from storage.store import Store
from storage.transfer import fetch_files
from twinkle_core.errors import ConfigError, StorageError

_LOCK = "lock"
DISK_SLACK_BYTES = 1 << 16
"""What a fetch may take on the disk beside the file's bytes: whole blocks, folders, the lock's file."""


class ShardCache:
    """Whole files, each named by its digest, of together at most `max_bytes`, those being fetched included.

    A file is fetched once, by whoever wants it first; others wait for it. It is fetched into a folder of its own, verified,
    and renamed, so what has a final name was whole; each process makes sure of that again when it first opens a file that it has not
    fetched. The least recently opened files make room, those that nobody has open first; who has an unlinked one open reads on (and its
    disk space is free only when it is closed). Where the disk has less room than `max_bytes`, files that nobody has open make room for
    the next one there too. A process that dies holds nothing: its locks are the kernel's, and what it left is removed by the next one
    that wants the file or the room.

    In the folder: `<sha256>` is a file, `<sha256>.part/` one being fetched, `<sha256>.lock` its size, locked by who fetches it.
    """

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = Path(folder), max_bytes
        self._seen_whole: set[tuple[str, int]] = set()  # digests and inodes

    def __reduce__(self) -> tuple[Any, ...]:
        return ShardCache, (self.folder, self.max_bytes)

    def open(self, store: Store, prefix: str, entry: FileEntry) -> BinaryIO:
        """The file, opened for reading, and kept from making room while it is open; fetched first if it is not here.

        Raises `DamagedError` where the store's object is missing or not what `entry` says, `ConfigError` for a file larger than the
        whole cache, and `StorageError` with errno ENOSPC where the disk is full.
        """
        if entry.size > self.max_bytes:
            raise ConfigError(
                f"{entry.path} has {entry.size} bytes, more than the whole shard cache of {self.max_bytes}; "
                f"raise resources.shard_cache_bytes, or lower shard.rows_per_shard"
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            return self._open(store, prefix, entry)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            full = StorageError(
                f"the disk of the shard cache {self.folder} is full: {shutil.disk_usage(self.folder).free} bytes are free, and "
                f"{entry.path} of {entry.size} bytes is to be fetched; free some, or use a larger disk"
            )
            full.errno = errno.ENOSPC
            raise full from error

    def _open(self, store: Store, prefix: str, entry: FileEntry) -> BinaryIO:
        while True:
            with self._locked():
                found = self._cached(entry)
                handle, ours = (-1, False) if found is not None else self._claim(entry)
            if found is not None:
                if self._is_whole(found, entry):
                    return found
                continue
            with os.fdopen(handle, "rb") as lock:
                if ours:
                    return self._fetch(store, prefix, entry)
                fcntl.flock(lock, fcntl.LOCK_SH)  # until that fetch has ended, well or not; then look again

    def _is_whole(self, file: BinaryIO, entry: FileEntry) -> bool:
        """Whether a cached file is what it is called; one that was damaged on the disk is closed and removed."""
        inode = os.fstat(file.fileno()).st_ino
        if (entry.sha256, inode) in self._seen_whole:
            return True
        if hashlib.file_digest(cast(BufferedReader, file), "sha256").hexdigest() == entry.sha256:
            file.seek(0)
            self._seen_whole.add((entry.sha256, inode))
            return True
        with self._locked():
            path = self.folder / entry.sha256
            if path.exists() and path.stat().st_ino == inode:
                path.unlink()
        file.close()
        return False

    def _cached(self, entry: FileEntry) -> BinaryIO | None:
        path = self.folder / entry.sha256
        try:
            file = path.open("rb")
        except FileNotFoundError:
            return None
        if os.fstat(file.fileno()).st_size != entry.size:  # the host lost power before it was on disk
            file.close()
            path.unlink()
            return None
        os.utime(path)
        fcntl.flock(file, fcntl.LOCK_SH)
        return file

    def _claim(self, entry: FileEntry) -> tuple[int, bool]:
        """(a lock that is ours, True), with room for the file; or (the lock of a living fetch to wait for, False)."""
        mine = self._try_lock(entry.sha256)
        if mine is None:
            return os.open(self._lock_path(entry.sha256), os.O_RDWR), False
        try:
            in_flight, busy = self._in_flight(entry)
            fits = in_flight + entry.size <= self.max_bytes
            if fits:
                self._make_room(self.max_bytes - in_flight - entry.size, in_flight + entry.size + DISK_SLACK_BYTES)
                shutil.rmtree(self._part(entry.sha256), ignore_errors=True)
                os.pwrite(mine, str(entry.size).encode(), 0)
        except BaseException:
            self._drop(entry.sha256)
            os.close(mine)
            raise
        if fits:
            return mine, True
        self._drop(entry.sha256)
        os.close(mine)
        return os.open(busy, os.O_RDWR), False

    def _in_flight(self, entry: FileEntry) -> tuple[int, Path]:
        """Bytes that others are fetching, and the lock of one of them. What dead ones left is removed."""
        in_flight, busy = 0, self._lock_path(entry.sha256)
        for path in [path for path in self.folder.glob("*.lock") if path.stem != entry.sha256]:
            dead = self._try_lock(path.stem)
            if dead is None:
                in_flight, busy = in_flight + int(path.read_text()), path
            else:
                self._drop(path.stem)
                os.close(dead)
        return in_flight, busy

    def _fetch(self, store: Store, prefix: str, entry: FileEntry) -> BinaryIO:
        part = self._part(entry.sha256)
        try:
            fetched = fetch_files(store, prefix, [entry], part) / entry.path
            file = fetched.open("rb")
            fcntl.flock(file, fcntl.LOCK_SH)
            os.fsync(file.fileno())
        except BaseException:
            with self._locked():
                self._drop(entry.sha256)
            raise
        with self._locked():
            os.replace(fetched, self.folder / entry.sha256)
            self._drop(entry.sha256)
        self._seen_whole.add((entry.sha256, os.fstat(file.fileno()).st_ino))
        return file

    def _make_room(self, most_bytes: int, disk_bytes: int) -> None:
        """Unlinks the least recently opened files until the others take at most `most_bytes`: first those that nobody has open, and
        these until the disk has `disk_bytes` free, too."""
        stats = {path: path.stat() for path in self.folder.iterdir() if path.is_file() and not path.suffix and path.name != _LOCK}
        total = sum(stat.st_size for stat in stats.values())
        for may_be_open in (False, True):
            for path in sorted(stats, key=lambda path: stats[path].st_mtime_ns):
                if total <= most_bytes and (may_be_open or shutil.disk_usage(self.folder).free >= disk_bytes):
                    return
                if may_be_open or not _is_open(path):
                    path.unlink()
                    total -= stats.pop(path).st_size

    def _drop(self, sha256: str) -> None:
        """Ends the fetch of a file; whoever waits on the lock's file then finds it gone, and looks again."""
        shutil.rmtree(self._part(sha256), ignore_errors=True)
        self._lock_path(sha256).unlink(missing_ok=True)

    def _try_lock(self, sha256: str) -> int | None:
        """An open and locked lock file, made when missing; None while somebody alive holds it."""
        handle = os.open(self._lock_path(sha256), os.O_RDWR | os.O_CREAT, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(handle)
            return None
        return handle

    def _part(self, sha256: str) -> Path:
        return self.folder / f"{sha256}.part"

    def _lock_path(self, sha256: str) -> Path:
        return self.folder / f"{sha256}.lock"

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """One at a time looks at the folder and changes names in it; nobody fetches or reads meanwhile under this lock."""
        with (self.folder / _LOCK).open("wb") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _is_open(path: Path) -> bool:
    """Whether anybody has a file of a cache open."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        return False
