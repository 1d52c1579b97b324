"""Which checkpoint to go on from: the newest valid one. A damaged one is named and passed over, never used, never repaired."""

from __future__ import annotations

from dataclasses import dataclass

from storage.artifact import verify_files
from storage.errors import NotFoundError
from storage.fingerprint import digest_bytes
from storage.store import Store
from twinkle_core.checkpoint.manifest import Committed, Head, Manifest


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """The checkpoint to resume from, if any, and what was wrong with newer ones."""

    manifest: Manifest | None
    problems: tuple[str, ...]


def newest_valid(store: Store, head: Head) -> Found:
    """The newest committed checkpoint whose manifest and files are whole (size and sha256), however many newer ones are not."""
    problems: list[str] = []
    for line in head.checkpoints:
        manifest, damage = _read(store, line)
        if manifest is not None and not damage:
            return Found(manifest=manifest, problems=tuple(problems))
        problems.append(f"checkpoint of step {line.step} is not used: {'; '.join(damage)}")
    return Found(manifest=None, problems=tuple(problems))


def _read(store: Store, line: Committed) -> tuple[Manifest | None, list[str]]:
    try:
        data = store.get(line.manifest)
    except NotFoundError:
        return None, [f"{line.manifest} is missing"]
    if digest_bytes(data) != line.sha256:
        return None, [f"{line.manifest} was changed after it was committed"]
    manifest = Manifest.from_json(data)
    return manifest, verify_files(store, manifest.prefix, manifest.files)
