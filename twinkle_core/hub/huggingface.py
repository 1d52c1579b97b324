"""Models from a Hugging Face hub, pinned to a commit and verified against the digests that the hub states."""

from __future__ import annotations

import glob
import json
import os
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinkle_core.errors import DamagedError
from twinkle_core.hub.file_digests import FileDigests
from twinkle_core.hub.huggingface_client import digest_as_hub, named_errors
from twinkle_core.hub.model_files import check_names, is_allowed

_LISTING = ".verified.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A fetched repository at one commit."""

    folder: Path
    revision: str
    """Commit sha: 40 hex digits."""


def fetch_repository(repo: str, revision: str | None, cache: Path, *, endpoint: str | None = None, token: str | None = None) -> Snapshot:
    """The allowed files of `repo` at `revision` (branch, tag or commit; None: main) in a folder named by the commit.

    A commit that was fetched before is served from the cache without network. A branch or tag always asks the hub, so that nothing trains
    on an old model because the hub was away. `endpoint` and `token` are huggingface_hub's; None means its defaults.

    Raises `ConfigError` for a missing repository or revision and for one without safetensors, `DamagedError` naming a file
    whose bytes are not what the hub states (it is deleted, so that the next
    try fetches it anew), `StorageError` when the hub cannot be used.
    """
    from huggingface_hub import HfApi, snapshot_download

    is_commit = revision is not None and len(revision) == 40 and set(revision) <= set("0123456789abcdef")
    if is_commit and _is_verified(folder := _folder(cache, repo, str(revision)), FileDigests(cache)):
        return Snapshot(folder=folder, revision=str(revision))
    api = HfApi(endpoint=endpoint, token=token)
    where = f"{repo} at {revision or 'main'} on {api.endpoint}"
    with named_errors("repository", repo, revision, endpoint):
        commit = str(revision) if is_commit else str(api.model_info(repo, revision=revision).sha)
        folder = _folder(cache, repo, commit)
        if _is_verified(folder, FileDigests(cache)):
            return Snapshot(folder=folder, revision=commit)
        tree = {item.path: item for item in api.list_repo_tree(repo, revision=commit, recursive=True) if hasattr(item, "blob_id")}
        check_names(tree, where)
        names = sorted(name for name in tree if is_allowed(name))
        snapshot_download(
            repo,
            revision=commit,
            local_dir=folder,
            allow_patterns=[glob.escape(name) for name in names],
            endpoint=endpoint,
            token=token,
            max_workers=2,
        )
    _verify(folder, {name: tree[name] for name in names}, where)
    return Snapshot(folder=folder, revision=commit)


def _folder(cache: Path, repo: str, commit: str) -> Path:
    return cache / "hub" / f"{repo.replace('/', '--')}@{commit}"


def _verify(folder: Path, tree: dict[str, Any], where: str) -> None:
    """Compare each file with the hub's sha256 (large files) or git blob id (small ones), then write down that it was right."""
    damaged = []
    for name, item in tree.items():
        data_digest = digest_as_hub(folder / name, is_large=item.lfs is not None)
        if data_digest != (item.lfs.sha256 if item.lfs is not None else item.blob_id):
            (folder / name).unlink()
            damaged.append(name)
    if damaged:
        raise DamagedError(f"{', '.join(damaged)} of {where} arrived damaged and was deleted: run again to fetch it anew")
    listing = {name: digest_as_hub(folder / name, is_large=True) for name in tree}
    temporary = folder / f"{_LISTING}.{uuid.uuid4().hex}"
    temporary.write_text(json.dumps(listing, indent=1))
    os.replace(temporary, folder / _LISTING)


def _is_verified(folder: Path, digests: FileDigests) -> bool:
    try:
        listing = json.loads((folder / _LISTING).read_text())
        return all(digests.digest(folder / name) == sha256 for name, sha256 in listing.items())
    except (OSError, ValueError):
        return False
