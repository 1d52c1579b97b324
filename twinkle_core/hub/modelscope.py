"""Models from ModelScope's hub, verified against the digests that the hub states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from storage.fingerprint import fingerprint
from twinkle_core.errors import ConfigError, DamagedError
from twinkle_core.hub.huggingface_client import digest_as_hub
from twinkle_core.hub.model_files import check_names, is_allowed
from twinkle_core.hub.modelscope_client import named_errors, open_modelscope
from twinkle_core.hub.snapshot import Snapshot, accept, is_commit, is_verified, snapshot_folder

DEFAULT_REVISION = "master"


def fetch_repository(repo: str, revision: str | None, cache: Path, *, endpoint: str | None = None, token: str | None = None) -> Snapshot:
    """The allowed files of `repo` at `revision` (branch, tag or commit; None: master) in a folder named by their stated digests.

    As `twinkle_core.hub.huggingface.fetch_repository`, also in what it raises; the folder of a commit is named by the commit. The hub
    tells no commit of a branch or tag, so the snapshot's revision is the one that was asked for.
    """
    revision = revision or DEFAULT_REVISION
    if is_commit(revision) and is_verified(folder := snapshot_folder(cache, "modelscope", repo, revision), cache):
        return Snapshot(folder=folder, revision=revision)
    api = open_modelscope(endpoint, token)
    where = f"{repo} at {revision} on ModelScope"
    with named_errors("repository", repo, revision):
        listed = api.list_repo_files(repo, "model", revision=revision)
    tree = {file.path: file for file in listed if file.type != "tree"}
    if not tree:
        raise ConfigError(f"there is no file in {where}: check name and revision")
    check_names(tree, where)
    names = sorted(name for name in tree if is_allowed(name))
    stated = fingerprint([[name, tree[name].size, tree[name].sha256] for name in names])
    folder = snapshot_folder(cache, "modelscope", repo, revision if is_commit(revision) else stated)
    if is_verified(folder, cache):
        return Snapshot(folder=folder, revision=revision)
    for name in names:
        if not _is_as_stated(folder / name, tree[name]):
            _fetch(api, repo, revision, tree[name], folder)
    accept(folder, names, [name for name in names if not _is_as_stated(folder / name, tree[name])], where)
    return Snapshot(folder=folder, revision=revision)


def _fetch(api: Any, repo: str, revision: str, file: Any, folder: Path) -> None:
    with named_errors("repository", repo, revision):
        path = Path(
            api.download_file(
                repo,
                "model",
                file.path,
                revision=revision,
                local_dir=folder,
                expected_sha256=file.sha256,
                file_size=file.size,
                force=True,
            )
        )
    if path.resolve() != (folder / file.path).resolve():
        raise DamagedError(f"{file.path} of {repo} was fetched to another place than asked for ({path.name}): update modelscope_hub")


def _is_as_stated(path: Path, file: Any) -> bool:
    """By size and sha256; a branch may have moved between the listing and the file."""
    if not path.is_file() or path.stat().st_size != file.size:
        return False
    return file.sha256 is None or digest_as_hub(path, is_large=True) == file.sha256
