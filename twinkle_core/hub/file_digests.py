"""Digests of files, remembered by what `stat` says, so that gigabytes of weights are not read at each run."""

from __future__ import annotations

import json
import os
import time
import uuid
from pathlib import Path
from typing import Any

from storage.fingerprint import digest_file
from twinkle_core.errors import DataError

SETTLED_SECONDS = 2.0
"""A file changed less long ago is digested but not remembered: a second change within the clock's grain would not show in `stat`."""


class FileDigests:
    """sha256 by path, kept in one JSON file. Losing that file costs time and nothing else.

    A digest is taken again when size, modification time, change time or inode differ. The change time catches
    what copies an old modification time along.
    """

    def __init__(self, cache: Path) -> None:
        self._file = cache / "digests.json"
        self._known = self._read()

    def digest(self, path: Path) -> str:
        """sha256 hex. Raises `DataError` when the file changes while it is read."""
        name = str(path.resolve())
        stamp = _stamp(path)
        entry = self._known.get(name)
        if entry and entry[:-1] == stamp:
            return str(entry[-1])
        digest = digest_file(path)
        if _stamp(path) != stamp:
            raise DataError(f"{path} changed while its digest was taken: run again when nothing writes to it")
        if time.time() - max(stamp[1], stamp[2]) / 1e9 > SETTLED_SECONDS:
            self._remember(name, [*stamp, digest])
        return digest

    def _remember(self, name: str, entry: list[Any]) -> None:
        self._known = {**self._read(), name: entry}  # read again: another process may have added to it
        self._file.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._file.with_name(f".digests-{uuid.uuid4().hex}.json")
        temporary.write_text(json.dumps(self._known, indent=0))
        os.replace(temporary, self._file)

    def _read(self) -> dict[str, list[Any]]:
        try:
            known = json.loads(self._file.read_text())
        except (FileNotFoundError, ValueError):
            return {}
        entries = known.items() if isinstance(known, dict) else ()
        return {name: entry for name, entry in entries if isinstance(entry, list) and len(entry) == 5}


def _stamp(path: Path) -> list[int]:
    stat = path.stat()
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino]
