"""Datasets of ModelScope's hub, through modelscope_hub, the client that modelscope is built on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinkle_core.errors import ConfigError, DamagedError, StorageError
from twinkle_core.preprocessor.sources.hubs import HubFile


@dataclass(frozen=True)
class ModelScopeHub:
    """`endpoint` and `token` are modelscope_hub's; None means its defaults."""

    endpoint: str | None = None
    token: str | None = None

    def commit(self, repo: str, revision: str) -> str:
        """The revision itself: the hub tells no commit of a branch or tag. The files are pinned by their stated digests."""
        return revision

    def files(self, repo: str, commit: str) -> dict[str, HubFile]:
        with _named_errors(repo, commit):
            listed = self._api().list_repo_files(repo, "dataset", revision=commit)
        files = {file.path: HubFile(size=file.size, sha256=file.sha256, blob_id=None) for file in listed if file.type != "tree"}
        if not files:
            raise ConfigError(f"there is no file in dataset {repo} at {commit} on ModelScope: check name and revision")
        return files

    def fetch(self, repo: str, commit: str, name: str, stated: HubFile, cache: Path | None) -> Path:
        """A file whose digest is known is served from the cache; the client fetches a damaged one anew."""
        with _named_errors(repo, commit):
            return Path(
                self._api().download_file(
                    repo,
                    "dataset",
                    name,
                    revision=commit,
                    cache_dir=cache / "modelscope" if cache else None,
                    expected_sha256=stated.sha256,
                    file_size=stated.size,
                    force=stated.sha256 is None,
                )
            )

    def _api(self) -> Any:
        from modelscope_hub.api import HubApi

        return HubApi(endpoint=self.endpoint, token=self.token)


@contextmanager
def _named_errors(repo: str, revision: str) -> Iterator[None]:
    from modelscope_hub.errors import FileIntegrityError, HubError, NotExistError
    from requests import RequestException

    where = f"dataset {repo} at {revision}"
    try:
        yield
    except NotExistError as error:
        raise ConfigError(f"there is no {where} on ModelScope, or it is private: check name and revision, or log in ({error})") from error
    except FileIntegrityError as error:
        raise DamagedError(f"a file of {where} is not what ModelScope states: {error}. Try again later") from error
    except (HubError, RequestException, OSError) as error:
        raise StorageError(f"cannot fetch {where} from ModelScope: {error}. Try again, or fetch it yourself and name the folder") from error
