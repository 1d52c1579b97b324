"""A repository of a hub at one revision, in a folder of its own in the cache, verified once and remembered as such."""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from twinkle_core.errors import DamagedError
from twinkle_core.hub.file_digests import FileDigests
from twinkle_core.hub.huggingface_client import digest_as_hub

LISTING = ".verified.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A fetched repository at one revision."""

    folder: Path
    revision: str
    """Commit sha, 40 hex digits; on ModelScope, which tells no commit of a branch or tag, the revision that was asked for."""


def snapshot_folder(cache: Path, hub: str, repo: str, pinned: str) -> Path:
    """Where a snapshot lies: `cache`/`hub`/org--name@`pinned`. What is pinned never changes: a commit, or a digest of the content."""
    return cache / hub / f"{repo.replace('/', '--')}@{pinned}"


def is_commit(revision: str | None) -> bool:
    return revision is not None and len(revision) == 40 and set(revision) <= set("0123456789abcdef")


def is_verified(folder: Path, cache: Path) -> bool:
    """Whether the folder was found right once and its files are still what they were then."""
    digests = FileDigests(cache)
    try:
        listing = json.loads((folder / LISTING).read_text())
        return all(digests.digest(folder / name) == sha256 for name, sha256 in listing.items())
    except (OSError, ValueError):
        return False


def accept(folder: Path, names: Iterable[str], damaged: Iterable[str], where: str) -> None:
    """Writes down that the files `names` are right. Files in `damaged` are deleted and named in a `DamagedError` instead."""
    wrong = list(damaged)
    for name in wrong:
        (folder / name).unlink()
    if wrong:
        raise DamagedError(f"{', '.join(wrong)} of {where} arrived damaged and was deleted: run again to fetch it anew")
    listing = {name: digest_as_hub(folder / name, is_large=True) for name in names}
    temporary = folder / f"{LISTING}.{uuid.uuid4().hex}"
    temporary.write_text(json.dumps(listing, indent=1))
    os.replace(temporary, folder / LISTING)
