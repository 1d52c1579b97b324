"""One commit to a repository of ModelScope's hub.

`modelscope_hub.HubApi.upload_folder` commits in batches, and in smaller ones after a failure, so that half a model can be visible. Here its
calls are made one by one: large files to the hub's store of large files, then one commit that names them all.
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from storage.fingerprint import digest_file
from twinkle_core.errors import ConfigError, DamagedError, StorageError
from twinkle_core.hub.modelscope_client import default_token, open_modelscope
from twinkle_core.hub.secrets import without_secret

BRANCH = "master"
BLOBS_A_REQUEST = 64
MESSAGE = "Upload of a training checkpoint"


def commit_files(folder: Path, names: Sequence[str], repo: str, token: str | None, endpoint: str | None) -> str:
    """Gives the commit, or the branch where the hub tells none.

    Raises `ConfigError` where the hub refuses, `StorageError` when it cannot be used, `DamagedError` when it lists other bytes.
    """
    token = token or default_token()
    api = open_modelscope(endpoint, token)
    digests = {name: digest_file(folder / name) for name in names}
    large = [name for name in names if _is_large(name, (folder / name).stat().st_size)]
    with _named_errors(repo, token):
        _make(api, repo)
        _store(api.legacy, repo, folder, {digests[name]: name for name in large})
        actions = [_action(folder, name, digests[name] if name in large else None) for name in names]
        answer = api.legacy.create_commit(repo, "model", actions, MESSAGE, revision=BRANCH)
        listed = {file.path: file for file in api.list_repo_files(repo, "model", revision=BRANCH) if file.type != "tree"}
    for name in names:
        file = listed.get(name)
        if file is None or file.size != (folder / name).stat().st_size or file.sha256 not in (None, digests[name]):
            raise DamagedError(f"{name} of {repo} on ModelScope is not the file that was uploaded: upload it again")
    return str(answer.get("commit_id") or answer.get("oid") or BRANCH) if isinstance(answer, dict) else BRANCH


def _make(api: Any, repo: str) -> None:
    from modelscope_hub.errors import AlreadyExistsError

    with suppress(AlreadyExistsError):
        api.create_repo(repo, "model")


def _store(client: Any, repo: str, folder: Path, names: dict[str, str]) -> None:
    """Sends the files (sha256 → name) that the hub does not have yet."""
    objects = [{"oid": oid, "size": (folder / name).stat().st_size} for oid, name in names.items()]
    for start in range(0, len(objects), BLOBS_A_REQUEST):
        wanted = client.validate_blobs(repo, "model", objects[start : start + BLOBS_A_REQUEST])
        for oid, url in wanted.items():
            if url is not None:
                path = folder / names[oid]
                with path.open("rb") as file:
                    client.upload_blob(url, file, path.stat().st_size)


def _action(folder: Path, name: str, oid: str | None) -> dict[str, Any]:
    """What the commit says of a file; `oid` is the sha256 of a large one, whose bytes the hub has already."""
    action: dict[str, Any] = {"action": "create", "path": name, "size": (folder / name).stat().st_size}
    if oid is not None:
        return action | {"type": "lfs", "sha256": oid, "content": "", "encoding": ""}
    content = base64.b64encode((folder / name).read_bytes()).decode()
    return action | {"type": "normal", "sha256": "", "content": content, "encoding": "base64"}


def _is_large(name: str, size: int) -> bool:
    """The hub's own rule: what it reads itself stays small, weights and what is longer than a threshold go to the store."""
    from modelscope_hub.constants import MODEL_LFS_SUFFIX, UPLOAD_INLINE_METADATA_PATHS, UPLOAD_LFS_FORCE_THRESHOLD_BYTES

    if Path(name).name.upper() in {known.upper() for known in UPLOAD_INLINE_METADATA_PATHS}:
        return False
    return size > UPLOAD_LFS_FORCE_THRESHOLD_BYTES or Path(name).suffix.lower() in MODEL_LFS_SUFFIX


@contextmanager
def _named_errors(repo: str, token: str | None) -> Iterator[None]:
    from modelscope_hub.errors import AuthenticationError, HubError, NotExistError, PermissionDeniedError
    from requests import RequestException

    try:
        yield
    except (AuthenticationError, PermissionDeniedError, NotExistError) as error:
        reason = "it is not there, or the token may not write to it: give hub_token, or set MODELSCOPE_API_TOKEN"
        raise ConfigError(f"ModelScope refuses {repo}: {reason} ({without_secret(str(error), token)})") from None
    except (HubError, RequestException, OSError) as error:
        raise StorageError(f"cannot upload to {repo} on ModelScope: {without_secret(str(error), token)}. Try again") from None
