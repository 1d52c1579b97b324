"""Where this process keeps things and whom it talks to. The only module that reads or writes the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from storage.uri import parse

QUIET = {
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    "TQDM_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""No part that we start reports home, writes between our lines and bars, or takes the cores that a stage shares out itself."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Resources of the process. Nothing here changes what a run computes, so nothing here enters a key."""

    home: Path
    """Absolute folder of everything that is local: store, caches, service databases and logs."""
    store_url: str
    """Root of the artifacts: file:///folder, s3://bucket/prefix or memory://name; never relative to a working folder."""
    prefect_api_url: str | None
    """API of a running Prefect server; None means the one that `twinkle up` starts on this machine."""
    mlflow_uri: str | None
    """MLflow tracking server; None means the one that `twinkle up` starts on this machine."""
    cache_dir: Path
    """Folder for what can be fetched or converted again: base models, downloaded artifacts."""
    trusted_code: Path | None = None
    """Folder whose Python files recipes may name as processors and filters; None allows none."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Settings from TWINKLE_HOME, TWINKLE_STORE, TWINKLE_TRUSTED_CODE, PREFECT_API_URL and MLFLOW_TRACKING_URI of `environ`
        (this process's, if None).

        Raises `StorageError` for a store address that cannot be read.
        """
        environ = os.environ if environ is None else environ
        home = Path(environ.get("TWINKLE_HOME") or "~/.twinkle").expanduser().absolute()
        return cls(
            home=home,
            store_url=parse(environ.get("TWINKLE_STORE") or str(home / "store")).url,
            prefect_api_url=environ.get("PREFECT_API_URL") or None,
            mlflow_uri=environ.get("MLFLOW_TRACKING_URI") or None,
            cache_dir=home / "cache",
            trusted_code=Path(environ["TWINKLE_TRUSTED_CODE"]).expanduser().absolute() if environ.get("TWINKLE_TRUSTED_CODE") else None,
        )

    def environment(self) -> dict[str, str]:
        """The variables with which `from_env` gives these settings in another process."""
        variables = {"TWINKLE_HOME": str(self.home), "TWINKLE_STORE": self.store_url}
        if self.trusted_code:
            variables["TWINKLE_TRUSTED_CODE"] = str(self.trusted_code)
        if self.prefect_api_url:
            variables["PREFECT_API_URL"] = self.prefect_api_url
        if self.mlflow_uri:
            variables["MLFLOW_TRACKING_URI"] = self.mlflow_uri
        return variables

    def apply(self) -> None:
        """Set them in this process, and make `home`. Call it before Prefect or MLflow is imported: they read them then."""
        self.home.mkdir(parents=True, exist_ok=True)  # Prefect makes its own folder, but not those above it
        os.environ.update(child_environment(self))


def child_environment(settings: Settings, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Whole environment for a process that we start: this one's, telemetry off, the settings', then `extra`.

    Prefect's home is put under ours, but not for users who work against a server of their own: their login lies in their profile.
    """
    own_profile = "PREFECT_HOME" in os.environ or "PREFECT_API_URL" in os.environ
    home = {} if own_profile else {"PREFECT_HOME": str(settings.home / "prefect")}
    return {**os.environ, **QUIET, **home, **settings.environment(), **(extra or {})}
