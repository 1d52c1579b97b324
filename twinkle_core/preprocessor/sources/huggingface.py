"""Datasets of Hugging Face's hub, through huggingface_hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinkle_core.errors import DamagedError
from twinkle_core.hub.huggingface_client import digest_as_hub, named_errors
from twinkle_core.preprocessor.sources.hubs import HubFile


@dataclass(frozen=True)
class HuggingFaceHub:
    """`endpoint` and `token` are huggingface_hub's; None means its defaults."""

    endpoint: str | None = None
    token: str | None = None

    def commit(self, repo: str, revision: str) -> str:
        """Asks the hub at each call, so that a branch that moved is seen."""
        with named_errors("dataset", repo, revision, self.endpoint):
            return str(self._api().dataset_info(repo, revision=revision).sha)

    def files(self, repo: str, commit: str) -> dict[str, HubFile]:
        with named_errors("dataset", repo, commit, self.endpoint):
            tree = list(self._api().list_repo_tree(repo, revision=commit, recursive=True, repo_type="dataset"))
        return {
            item.path: HubFile(size=item.size, sha256=item.lfs.sha256 if item.lfs else None, blob_id=item.blob_id)
            for item in tree
            if hasattr(item, "blob_id")
        }

    def fetch(self, repo: str, commit: str, name: str, stated: HubFile, cache: Path | None) -> Path:
        """A file of a commit that was fetched before is served without network; a damaged one is fetched once more."""
        for again in (False, True):
            with named_errors("dataset", repo, commit, self.endpoint):
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
    return path.stat().st_size == stated.size and digest_as_hub(path, is_large=stated.sha256 is not None) == (
        stated.sha256 or stated.blob_id
    )
