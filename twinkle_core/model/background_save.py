"""Writing a snapshot while training goes on. Imports torch."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from storage.scratch import scratch_folder
from storage.store import open_store
from storage.transfer import upload_folder
from twinkle_core.errors import TrainingError
from twinkle_core.model.checkpoint_files import Snapshot, write_snapshot

if TYPE_CHECKING:
    from storage.artifact import FileEntry


class BackgroundSave:
    """A thread that writes a snapshot to scratch and uploads it. Start by building it; ask `result` for the files."""

    def __init__(self, snapshot: Snapshot, store_url: str, prefix: str) -> None:
        self._files: tuple[FileEntry, ...] | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(snapshot, store_url, prefix), name="checkpoint-upload", daemon=True)
        self._thread.start()

    def wait(self, seconds: float) -> bool:
        """Whether the thread is done, after at most `seconds`. Raises what it raised."""
        self._thread.join(seconds)
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def result(self) -> tuple[FileEntry, ...]:
        """The uploaded files. Waits for the thread; raises what it raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
        if self._files is None:
            raise TrainingError("the thread that saves ended without files and without an error")
        return self._files

    def _run(self, snapshot: Snapshot, store_url: str, prefix: str) -> None:
        try:
            with scratch_folder() as scratch:
                write_snapshot(snapshot, scratch)
                self._files = upload_folder(open_store(store_url), scratch, prefix)
        except Exception as error:  # the edge of the thread: kept for whoever asks for the result
            self._error = error
