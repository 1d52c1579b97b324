"""The files of a long computation, kept in the store one by one: when it is killed, the next one goes on after the last of them.

Each part is put below the attempt's data prefix and then gets a marker with its size, digest and facts. Whoever computes the
same artifact again, on any machine, finds the attempt by its markers. Parts depend on the artifact's key alone, so an older
process that wakes up writes the same bytes to the same names. The markers lie beside the attempt and are no part of the
artifact; `artifacts gc` takes them when they are old.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from storage import layout
from storage.artifact import FileEntry, read_record, verify_files
from storage.errors import DamagedError, NotFoundError
from storage.fingerprint import folder_files
from storage.store import Store
from storage.transfer import UPLOAD_THREADS, upload_file, upload_folder

MAX_WAITING = 2 * UPLOAD_THREADS
"""Finished files that wait on the local disk for their upload, those that are being uploaded included."""


class StoredParts:
    """A `PartSink` over the store, for one artifact. As a context manager: no upload is under way at its end.

    Uploads run beside the computation; the error of a failed one is raised by the next `add` or by `stored`.
    """

    def __init__(self, store: Store, stage: str, key: str) -> None:
        self._store, self._stage, self._key = store, stage, key
        self.attempt = _attempt_to_go_on_with(store, stage, key)
        self.prefix = layout.data_prefix(stage, key, self.attempt)
        self._entries: list[FileEntry] = []
        self._uploads: list[Future[FileEntry]] = []
        self._pool = ThreadPoolExecutor(UPLOAD_THREADS, thread_name_prefix="parts")

    def __enter__(self) -> StoredParts:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.shutdown(cancel_futures=True)

    def finished(self, name: str) -> dict[str, Any] | None:
        """The facts of a part that stands in the store with the right size and digest, else None."""
        try:
            marker = json.loads(self._store.get(layout.part_marker_key(self._stage, self._key, self.attempt, name)))
            entry, facts = FileEntry.from_json(marker["file"]), dict(marker["facts"])
        except (NotFoundError, DamagedError, ValueError, KeyError, TypeError):  # unreadable markers are as none
            return None
        if entry.path != name or verify_files(self._store, self.prefix, [entry]):
            return None
        self._entries.append(entry)
        return facts

    def add(self, path: Path, facts: dict[str, Any]) -> None:
        """Takes the file over: it is uploaded, marked and deleted. Returns before that, unless many are waiting."""
        while len(self._uploads) >= MAX_WAITING:
            self._collect()
        self._uploads.append(self._pool.submit(self._upload, path, facts))

    def stored(self, work: Path) -> tuple[str, tuple[FileEntry, ...]]:
        """(attempt, files) for the record, when all parts are up. What else lies in the folder `work` is uploaded too."""
        while self._uploads:
            self._collect()
        rest = upload_folder(self._store, work, self.prefix) if folder_files(work) else ()
        return self.attempt, tuple(sorted([*self._entries, *rest], key=lambda entry: entry.path))

    def _collect(self) -> None:
        self._entries.append(self._uploads.pop(0).result())

    def _upload(self, path: Path, facts: dict[str, Any]) -> FileEntry:
        entry = upload_file(self._store, path, self.prefix, path.name)
        marker = json.dumps({"file": entry.to_json(), "facts": facts}, ensure_ascii=False)
        self._store.put(layout.part_marker_key(self._stage, self._key, self.attempt, path.name), marker.encode())
        path.unlink()
        return entry


def _attempt_to_go_on_with(store: Store, stage: str, key: str) -> str:
    """The attempt with the most markers, other than one that has a record (which is damaged: it is not written into); else a new one."""
    new = uuid.uuid4().hex[:12]
    try:
        record = read_record(store, stage, key)
    except DamagedError:
        return new  # the record that cannot be read may name any attempt
    folders = (info.key.split("/")[3] for info in store.list(layout.attempts_prefix(stage, key)))
    marked = Counter(folder.removesuffix(layout.PARTS_SUFFIX) for folder in folders if folder.endswith(layout.PARTS_SUFFIX))
    if record is not None:
        marked.pop(record.attempt, None)
    return max(marked, key=lambda attempt: (marked[attempt], attempt)) if marked else new
