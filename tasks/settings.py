"""Where this process keeps things and whom it talks to. The only module that reads or writes the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

QUIET = {
    "DO_NOT_TRACK": "true",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "RAY_USAGE_STATS_ENABLED": "0",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}
"""No part that we start reports home."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Resources of the process. Nothing here changes what a run computes, so nothing here enters a key."""

    home: Path
    """Absolute folder of everything that is local: store, caches, service databases and logs."""
    store_url: str
    """Root of the artifacts: an absolute path, file://…, s3://bucket/prefix or memory://name."""
    prefect_api_url: str | None
    """API of a running Prefect server; None means the one that `twinkle up` starts on this machine."""
    mlflow_uri: str | None
    """MLflow tracking server; None means the one that `twinkle up` starts on this machine."""
    cache_dir: Path
    """Folder for what can be fetched or converted again: base models, downloaded artifacts."""

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None) -> Settings:
        """Settings from TWINKLE_HOME, TWINKLE_STORE, PREFECT_API_URL and MLFLOW_TRACKING_URI of `environ` (this process's, if None)."""
        environ = os.environ if environ is None else environ
        home = Path(environ.get("TWINKLE_HOME") or "~/.twinkle").expanduser().absolute()
        return cls(
            home=home,
            store_url=environ.get("TWINKLE_STORE") or str(home / "store"),
            prefect_api_url=environ.get("PREFECT_API_URL") or None,
            mlflow_uri=environ.get("MLFLOW_TRACKING_URI") or None,
            cache_dir=home / "cache",
        )

    def environment(self) -> dict[str, str]:
        """The variables with which `from_env` gives these settings in another process, telemetry off.

        Prefect's home is moved under ours unless the user works against a server of their own, whose login lies in their profile.
        """
        variables = {**QUIET, "TWINKLE_HOME": str(self.home), "TWINKLE_STORE": self.store_url, "PREFECT_HOME": str(self.home / "prefect")}
        if self.prefect_api_url:
            variables["PREFECT_API_URL"] = self.prefect_api_url
        if self.mlflow_uri:
            variables["MLFLOW_TRACKING_URI"] = self.mlflow_uri
        return variables

    def apply(self, environ: MutableMapping[str, str] | None = None) -> None:
        """Set those variables in this process. Call it before Prefect or MLflow is imported: they read them then."""
        environ = os.environ if environ is None else environ
        keep = {"PREFECT_HOME"} if "PREFECT_HOME" in environ else set()
        environ.update({name: value for name, value in self.environment().items() if name not in keep})


def child_environment(settings: Settings, extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Whole environment for a process that we start: this one's, the settings', then `extra`."""
    return {**os.environ, **settings.environment(), **(extra or {})}
