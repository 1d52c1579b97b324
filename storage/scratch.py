"""Folders for what is on its way to a store, which do not outlive their process by much."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PREFIX = "twinkle-scratch-"


@contextmanager
def scratch_folder() -> Iterator[Path]:
    """An empty folder under the system's temporary one, removed at the end; those of processes that were killed are removed first.

    A live process holds a lock in its folder, which its death sets free, so that processes in other containers over the same disk
    count too. The folder bears the name that others look for only once it is locked.
    """
    root = Path(tempfile.gettempdir())
    _remove_abandoned(root)
    draft = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=root))
    final = draft.with_name(draft.name.removeprefix("."))
    try:
        with (draft / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            draft.rename(final)
            (final / "files").mkdir()
            yield final / "files"
    finally:
        shutil.rmtree(final if final.exists() else draft, ignore_errors=True)


def _remove_abandoned(root: Path) -> None:
    for folder in root.glob(f"{PREFIX}*"):
        try:
            with (folder / "lock").open("r") as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if folder.stat().st_uid == os.getuid():
                    shutil.rmtree(folder, ignore_errors=True)
        except OSError:  # it is held, or goes just now, or is somebody else's
            continue
