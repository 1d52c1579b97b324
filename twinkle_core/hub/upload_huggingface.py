"""One commit to a repository of a Hugging Face hub."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from twinkle_core.errors import ConfigError, DamagedError, StorageError
from twinkle_core.hub.huggingface_client import digest_as_hub
from twinkle_core.hub.secrets import without_secret

_REFUSED = (401, 403, 404)


def commit_files(folder: Path, names: Sequence[str], repo: str, token: str | None, endpoint: str | None) -> str:
    """Large files first, to the hub's store of large files, then one commit that names them all. Gives the commit's sha.

    Raises `ConfigError` where the hub refuses, `StorageError` when it cannot be used, `DamagedError` when it lists other bytes.
    """
    from huggingface_hub import CommitOperationAdd, HfApi, get_token
    from huggingface_hub.hf_api import RepoFile

    token = token or get_token()
    api = HfApi(endpoint=endpoint, token=token)
    with _named_errors(repo, api.endpoint, token):
        api.create_repo(repo, exist_ok=True)
        operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=folder / name) for name in names]
        commit = str(api.create_commit(repo, operations, commit_message="Upload of a training checkpoint").oid)
        listed = {item.path: item for item in api.list_repo_tree(repo, revision=commit, recursive=True) if isinstance(item, RepoFile)}
    for name in names:
        item = listed.get(name)
        large = item.lfs if item is not None else None
        stated = None if item is None else large.sha256 if large is not None else item.blob_id
        if stated is None or stated != digest_as_hub(folder / name, is_large=large is not None):
            raise DamagedError(f"{name} of {repo} at {commit} on {api.endpoint} is not the file that was uploaded: upload it again")
    return commit


@contextmanager
def _named_errors(repo: str, hub: str, token: str | None) -> Iterator[None]:
    from huggingface_hub.errors import HfHubHTTPError, HTTPError  # type: ignore[attr-defined]  # httpx's or httpx2's

    try:
        yield
    except (HfHubHTTPError, HTTPError, OSError, RuntimeError) as error:  # RuntimeError: an upload of one file, with its cause
        status = next((found for cause in (error, error.__cause__) if (found := _status(cause)) is not None), None)
        said = without_secret(str(error.__cause__ if isinstance(error, RuntimeError) and error.__cause__ else error), token)
        if status in _REFUSED:
            reason = "it is not there, or the token may not write to it: give hub_token, or set HF_TOKEN"
            raise ConfigError(f"{hub} refuses {repo} ({status}): {reason} ({said})") from None
        raise StorageError(f"cannot upload to {repo} on {hub}: {said}. Try again") from None


def _status(error: BaseException | None) -> int | None:
    status = getattr(getattr(error, "response", None), "status_code", None)
    return status if isinstance(status, int) else None
