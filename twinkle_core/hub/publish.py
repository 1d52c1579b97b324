"""Releases: a model folder under <target>/<name>/<version>/, visible once its RELEASE.json is there.

The version is a digest of the content, so publishing the same model again finds its own release. Files come first, RELEASE.json last
and create-only, LATEST.json after it. What was cut off in between is finished by the next call.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from storage.artifact import ArtifactRef, FileEntry
from storage.errors import NotFoundError
from storage.fingerprint import digest_bytes, digest_file, fingerprint, folder_files
from storage.store import Store, open_store
from storage.uri import join
from twinkle_core.errors import ConfigError, DamagedError, DataError
from twinkle_core.hub.local_paths import find_local_paths

RELEASE_FILE = "RELEASE.json"
LATEST_FILE = "LATEST.json"
VERSION_DIGITS = 12


@dataclass(frozen=True, kw_only=True, slots=True)
class Release:
    """What RELEASE.json says."""

    name: str
    version: str
    """First hex digits of the sha256 over the names and digests of the files that are not volatile."""
    created: datetime
    files: tuple[FileEntry, ...]
    artifacts: dict[str, ArtifactRef]
    """The artifacts that the release was made of, by stage."""
    url: str
    """Folder or s3:// prefix of the release. Where it lies is not part of it: RELEASE.json has no address."""

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "version": self.version,
            "created": self.created.isoformat(),
            "files": [_entry_to_json(entry) for entry in self.files],
            "artifacts": {role: {"stage": ref.stage, "key": ref.key, "digest": ref.digest} for role, ref in sorted(self.artifacts.items())},
        }


def publish_folder(
    folder: Path, *, target: str, name: str, created: datetime, artifacts: Mapping[str, ArtifactRef], volatile: Collection[str] = ()
) -> Release:
    """Publish all files of `folder` (a model, its README.md, its report) below `target`, a folder or s3:// prefix.

    `created` is used when the release is new; a release that stands is returned as it is. `volatile` names files with
    times in them (the report): they are stored once and not part of the version. LATEST.json points to the newest release by `created`.
    Raises `DataError` when the folder is no whole model or holds a local path, `DamagedError` when a standing release
    cannot be what it says, `ConfigError` for a `created` without time zone.
    """
    if created.tzinfo is None:
        raise ConfigError(f"created {created.isoformat()} has no time zone: pass an aware datetime, e.g. datetime.now(UTC)")
    if problems := [*_incomplete(folder), *find_local_paths(folder)]:
        raise DataError(f"folder {folder.name} cannot be published: {'; '.join(problems)}")
    if unknown := sorted(set(volatile) - set(folder_files(folder))):
        raise DataError(f"volatile files {', '.join(unknown)} are not in folder {folder.name}")
    entries = [_entry(folder, file, file in volatile) for file in folder_files(folder)]
    version = fingerprint([[entry.path, entry.sha256] for entry in entries if not entry.volatile])[:VERSION_DIGITS]
    store, prefix = open_store(target), join(name, version)
    standing = read_release(store, name, version)
    if standing is None:
        files = tuple(_store_file(store, folder, prefix, entry) for entry in entries)
        refs = dict(artifacts)
        url = join(store.url, prefix)
        release = Release(name=name, version=version, created=created.astimezone(UTC), files=files, artifacts=refs, url=url)
        store.put_if_absent(join(prefix, RELEASE_FILE), _json(release.to_json()))
        standing = read_release(store, name, version)  # ours, or that of whoever was faster
        if standing is None:
            raise DamagedError(f"{join(store.url, prefix, RELEASE_FILE)} was written and cannot be read back")
    else:
        _heal(store, folder, prefix, standing)
    _move_latest(store, standing)
    return standing


def read_release(store: Store, name: str, version: str) -> Release | None:
    """The release, or None where it is not (wholly) there. Raises `DamagedError` when RELEASE.json cannot be read."""
    key = join(name, version, RELEASE_FILE)
    try:
        data = json.loads(store.get(key))
        return Release(
            name=data["name"],
            version=data["version"],
            created=datetime.fromisoformat(data["created"]),
            files=tuple(FileEntry(**entry) for entry in data["files"]),
            artifacts={role: ArtifactRef(uri="", **ref) for role, ref in data["artifacts"].items()},
            url=join(store.url, name, version),
        )
    except NotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DamagedError(f"{join(store.url, key)} is not what was written ({error}): delete it and publish again") from error


def verify_release(store: Store, release: Release) -> list[str]:
    """One sentence for each file that is missing or changed, [] when the release is sound. Reads every byte."""
    problems = []
    for entry in release.files:
        key = join(release.name, release.version, entry.path)
        try:
            sha256 = digest_bytes(store.get(key)) if (path := store.local_path(key)) is None else digest_file(path)
        except NotFoundError:
            problems.append(f"{entry.path} is missing")
            continue
        if sha256 != entry.sha256:
            problems.append(f"{entry.path} has sha256 {sha256}, not {entry.sha256}")
    return problems


def _store_file(store: Store, folder: Path, prefix: str, entry: FileEntry) -> FileEntry:
    key = join(prefix, entry.path)
    if not entry.volatile:  # racing publishers of one version write the same bytes
        store.upload(folder / entry.path, key)
        return entry
    data = (folder / entry.path).read_bytes()
    if not store.put_if_absent(key, data):  # theirs may differ from ours, and their RELEASE.json may name it already
        data = store.get(key)
    return FileEntry(path=entry.path, size=len(data), sha256=digest_bytes(data), volatile=True)


def _heal(store: Store, folder: Path, prefix: str, release: Release) -> None:
    """Put back files of a standing release that are gone or cut short; their bytes are known to be the same."""
    for entry in release.files:
        if store.size(join(prefix, entry.path)) == entry.size:
            continue
        if not (folder / entry.path).is_file() or digest_file(folder / entry.path) != entry.sha256:
            raise DamagedError(f"{entry.path} of release {release.name} {release.version} is missing or cut short, and not in this folder")
        store.upload(folder / entry.path, join(prefix, entry.path))


def _move_latest(store: Store, release: Release) -> None:
    key = join(release.name, LATEST_FILE)
    pointer = _json({"name": release.name, "version": release.version, "created": release.created.isoformat()})
    while True:
        try:
            data, token = store.get_versioned(key)
        except NotFoundError:
            if store.compare_and_swap(key, pointer, None):
                return
            continue
        if datetime.fromisoformat(json.loads(data)["created"]) >= release.created:
            return
        if store.compare_and_swap(key, pointer, token):
            return


def _incomplete(folder: Path) -> list[str]:
    """What a folder lacks to be used by itself: weights, config, tokenizer, chat template."""
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    problems = []
    if not names & {"config.json", "adapter_config.json"}:
        problems.append("it has no config.json or adapter_config.json")
    if not any(name.endswith(".safetensors") for name in names):
        problems.append("it has no .safetensors weights")
    if not {"tokenizer_config.json"} <= names or not names & {"tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"}:
        problems.append("it has no tokenizer files")
    elif "chat_template.jinja" not in names and "chat_template" not in json.loads((folder / "tokenizer_config.json").read_text()):
        problems.append("it has no chat template, in chat_template.jinja or tokenizer_config.json")
    return problems


def _entry(folder: Path, file: str, volatile: bool) -> FileEntry:
    if (folder / file).is_symlink():
        raise DataError(f"{file} in folder {folder.name} is a symbolic link: copy the file itself")
    if file in (RELEASE_FILE, LATEST_FILE):
        raise DataError(f"folder {folder.name} holds a {file}: that name belongs to the release")
    return FileEntry(path=file, size=(folder / file).stat().st_size, sha256=digest_file(folder / file), volatile=volatile)


def _entry_to_json(entry: FileEntry) -> dict[str, Any]:
    return {"path": entry.path, "size": entry.size, "sha256": entry.sha256, "volatile": entry.volatile}


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode()
