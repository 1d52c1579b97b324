"""Models from a Hugging Face hub, pinned to a commit and verified against the digests that the hub states."""

from __future__ import annotations

import glob
from pathlib import Path
from typing import Any

from twinkle_core.hub.huggingface_client import digest_as_hub, named_errors
from twinkle_core.hub.model_files import check_names, is_allowed
from twinkle_core.hub.snapshot import Snapshot, accept, is_commit, is_verified, snapshot_folder


def fetch_repository(repo: str, revision: str | None, cache: Path, *, endpoint: str | None = None, token: str | None = None) -> Snapshot:
    """The allowed files of `repo` at `revision` (branch, tag or commit; None: main) in a folder named by the commit.

    A commit that was fetched before is served from the cache without network. A branch or tag always asks the hub, so that nothing trains
    on an old model because the hub was away. `endpoint` and `token` are huggingface_hub's; None means its defaults.

    Raises `ConfigError` for a missing repository or revision and for one without safetensors, `DamagedError` naming a file
    whose bytes are not what the hub states (it is deleted, so that the next
    try fetches it anew), `StorageError` when the hub cannot be used.
    """
    from huggingface_hub import HfApi, snapshot_download

    if is_commit(revision) and is_verified(folder := snapshot_folder(cache, "hub", repo, str(revision)), cache):
        return Snapshot(folder=folder, revision=str(revision))
    api = HfApi(endpoint=endpoint, token=token)
    where = f"{repo} at {revision or 'main'} on {api.endpoint}"
    with named_errors("repository", repo, revision, endpoint):
        commit = str(revision) if is_commit(revision) else str(api.model_info(repo, revision=revision).sha)
        folder = snapshot_folder(cache, "hub", repo, commit)
        if is_verified(folder, cache):
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
    accept(folder, names, [name for name in names if not _is_as_stated(folder / name, tree[name])], where)
    return Snapshot(folder=folder, revision=commit)


def _is_as_stated(path: Path, item: Any) -> bool:
    """By the hub's sha256 (large files) or git blob id (small ones)."""
    is_large = item.lfs is not None
    stated: str = item.lfs.sha256 if is_large else item.blob_id
    return digest_as_hub(path, is_large=is_large) == stated
