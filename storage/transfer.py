"""Folders to prefixes and back, with digests. What was fetched before and still has the right digest is not fetched again."""

from __future__ import annotations

import os
import uuid
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from storage.artifact import FileEntry
from storage.errors import DamagedError, NotFoundError, StorageError
from storage.fingerprint import digest_file, folder_files
from storage.store import Store
from storage.uri import join, resolve_inside

UPLOAD_THREADS = 4
"""Files of a folder that are uploaded at a time."""


def upload_folder(store: Store, folder: Path, prefix: str, volatile: Collection[str] = ()) -> tuple[FileEntry, ...]:
    """Uploads every file below `folder`, several at a time; the entries are in order of names.

    `volatile` names files that no content digest shall depend on.

    StorageError for a symbolic link, an empty folder, a `volatile` name that is no file, and a file that changed meanwhile.
    """
    names = folder_files(folder)
    links = [name for name in names if (folder / name).is_symlink()]
    if links:
        raise StorageError(f"{links} in {str(folder)!r} are symbolic links: copy the files themselves")
    if not names:
        raise StorageError(f"{str(folder)!r} holds no file: nothing to upload to {prefix!r}")
    if unknown := sorted(set(volatile) - set(names)):
        raise StorageError(f"volatile {unknown} are no files of {str(folder)!r}, which holds {names}")
    pool = ThreadPoolExecutor(UPLOAD_THREADS, thread_name_prefix="upload")
    try:
        return tuple(pool.map(lambda name: upload_file(store, folder / name, prefix, name, volatile=name in volatile), names))
    finally:
        pool.shutdown(cancel_futures=True)


def upload_file(store: Store, path: Path, prefix: str, name: str, *, volatile: bool = False) -> FileEntry:
    """Uploads one file as `prefix`/`name`. StorageError when it changed meanwhile."""
    before = path.stat()
    entry = FileEntry(path=name, size=before.st_size, sha256=digest_file(path), volatile=volatile)
    store.upload(path, join(prefix, name))
    after = path.stat()
    if (before.st_size, before.st_mtime_ns, before.st_ino) != (after.st_size, after.st_mtime_ns, after.st_ino):
        raise StorageError(f"{str(path)!r} was changed while it was uploaded: upload only what is finished")
    return entry


def fetch_files(store: Store, prefix: str, entries: Iterable[FileEntry], into: Path) -> Path:
    """Puts the files into the folder `into` and returns it; a file appears there only when its size and digest are right.

    DamagedError naming a file that is missing in the store or is not what its entry says.
    """
    into.mkdir(parents=True, exist_ok=True)
    for entry in entries:
        target = resolve_inside(into, entry.path)
        if target.is_file() and _problem(target, entry) is None:
            continue
        target.parent.mkdir(parents=True, exist_ok=True)
        unverified = target.with_name(f".{uuid.uuid4().hex}.unverified")
        try:
            store.download(join(prefix, entry.path), unverified)
            if problem := _problem(unverified, entry):
                raise DamagedError(f"{join(prefix, entry.path)!r} in {store.url} {problem}")
            os.replace(unverified, target)
        except NotFoundError as error:
            raise DamagedError(f"{join(prefix, entry.path)!r} is missing from {store.url}") from error
        finally:
            unverified.unlink(missing_ok=True)
    return into


def local_folder(store: Store, prefix: str, entries: Iterable[FileEntry], cache: Path) -> Path:
    """A folder with these files, for reading: the store's own one where it is local, else one fetched to `cache`/`prefix`.

    Verified in both cases: DamagedError names the file. Other files may lie in it.
    """
    own = store.local_path(prefix)
    if own is None:
        return fetch_files(store, prefix, entries, resolve_inside(cache, prefix))
    for entry in entries:
        path = resolve_inside(own, entry.path)
        if not path.is_file():
            raise DamagedError(f"{join(prefix, entry.path)!r} is missing from {store.url}")
        if problem := _problem(path, entry):
            raise DamagedError(f"{join(prefix, entry.path)!r} in {store.url} {problem}")
    return own


def _problem(path: Path, entry: FileEntry) -> str | None:
    size = path.stat().st_size
    if size != entry.size:
        return f"has {size} bytes, not {entry.size}"
    digest = digest_file(path)
    return None if digest == entry.sha256 else f"is changed: sha256 {digest}, not {entry.sha256}"
