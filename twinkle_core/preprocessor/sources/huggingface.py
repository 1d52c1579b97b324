"""Datasets of Hugging Face's hub, through huggingface_hub."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinkle_core.errors import ConfigError, DamagedError, StorageError
from twinkle_core.preprocessor.sources.hubs import HubFile


@dataclass(frozen=True)
class HuggingFaceHub:
    """`endpoint` and `token` are huggingface_hub's; None means its defaults."""

    endpoint: str | None = None
    token: str | None = None

    def commit(self, repo: str, revision: str) -> str:
        """Asks the hub at each call, so that a branch that moved is seen."""
        with _named_errors(repo, revision):
            return str(self._api().dataset_info(repo, revision=revision).sha)

    def files(self, repo: str, commit: str) -> dict[str, HubFile]:
        with _named_errors(repo, commit):
            tree = list(self._api().list_repo_tree(repo, revision=commit, recursive=True, repo_type="dataset"))
        return {
            item.path: HubFile(size=item.size, sha256=item.lfs.sha256 if item.lfs else None, blob_id=item.blob_id)
            for item in tree
            if hasattr(item, "blob_id")
        }

    def fetch(self, repo: str, commit: str, name: str, stated: HubFile, cache: Path | None) -> Path:
        """A file of a commit that was fetched before is served without network; a damaged one is fetched once more."""
        for again in (False, True):
            with _named_errors(repo, commit):
                path = Path(self._download(repo, commit, name, cache, again))
            if _is_as_stated(path, stated):
                return path
        raise DamagedError(f"{name} of dataset {repo} at {commit} is not what the hub states, twice: try again later")

    def _download(self, repo: str, commit: str, name: str, cache: Path | None, again: bool) -> str:
        from huggingface_hub import hf_hub_download

        return str(
            hf_hub_download(
                repo,
                name,
                repo_type="dataset",
                revision=commit,
                cache_dir=cache / "huggingface" if cache else None,
                endpoint=self.endpoint,
                token=self.token,
                force_download=again,
            )
        )

    def _api(self) -> Any:
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.endpoint, token=self.token)


def _is_as_stated(path: Path, stated: HubFile) -> bool:
    if path.stat().st_size != stated.size:
        return False
    digest = hashlib.sha256() if stated.sha256 else hashlib.sha1(b"blob %d\0" % stated.size, usedforsecurity=False)
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest() == (stated.sha256 or stated.blob_id)


@contextmanager
def _named_errors(repo: str, revision: str) -> Iterator[None]:
    # HTTPError is that of httpx or httpx2, whichever this huggingface_hub uses
    from huggingface_hub.errors import (  # type: ignore[attr-defined]
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        HTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    where = f"dataset {repo} at {revision}"
    try:
        yield
    except GatedRepoError as error:
        raise ConfigError(f"{where} is gated: accept its terms on the hub and log in with `hf auth login`") from error
    except RevisionNotFoundError as error:
        raise ConfigError(f"there is no revision {revision!r} of dataset {repo} on the hub: name a branch, a tag or a commit") from error
    except RepositoryNotFoundError as error:
        raise ConfigError(f"there is no {where} on the hub, or it is private: check the name, or log in with `hf auth login`") from error
    except HFValidationError as error:
        raise ConfigError(f"{repo!r} is no repository name: write hf://organisation/name@revision") from error
    except (HfHubHTTPError, HTTPError, OSError) as error:
        raise StorageError(f"cannot fetch {where} from the hub: {error}. Try again, or fetch it yourself and name the folder") from error
