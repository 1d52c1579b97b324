"""Datasets of ModelScope's hub, through modelscope_hub."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from twinkle_core.errors import ConfigError
from twinkle_core.hub.modelscope_client import named_errors, open_modelscope
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
        with named_errors("dataset", repo, commit):
            listed = self._api().list_repo_files(repo, "dataset", revision=commit)
        files = {file.path: HubFile(size=file.size, sha256=file.sha256, blob_id=None) for file in listed if file.type != "tree"}
        if not files:
            raise ConfigError(f"there is no file in dataset {repo} at {commit} on ModelScope: check name and revision")
        return files

    def fetch(self, repo: str, commit: str, name: str, stated: HubFile, cache: Path | None) -> Path:
        """A file whose digest is known is served from the cache; the client fetches a damaged one anew."""
        with named_errors("dataset", repo, commit):
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
        return open_modelscope(self.endpoint, self.token)
