"""What every stage of a run shares: the frozen settings, the store, and where to report to."""

from __future__ import annotations

import json
import platform
import subprocess
import time
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from storage import layout
from storage.store import Store, open_store
from tasks.settings import Settings
from twinkle_core.config import Config, recipe, resource
from twinkle_core.errors import ConfigError


class RunSpec(Config):
    """A run's resolved settings, frozen at its start and read back by every retry, so that nothing drifts."""

    run_id: str = resource(doc="Prefect's flow-run id; the same for every retry.")
    flow: str = recipe(doc="Name of the flow.")
    params: dict[str, Any] = recipe(doc="All settings, defaults included.")
    code: dict[str, Any] = resource(doc="Versions of the project and its parts when the run began.")


def freeze(settings: Settings, spec: RunSpec) -> tuple[RunSpec, list[str]]:
    """The spec that stands for this run id, and how the code has changed since it was frozen.

    The first start writes it (create-only); a retry gets that one back, whatever it was called with.
    """
    store = open_store(settings.store_url)
    store.probe()
    key = layout.run_spec_key(spec.run_id)
    if store.put_if_absent(key, spec.model_dump_json(indent=1).encode()):
        return spec, []
    frozen = RunSpec.model_validate_json(store.get(key))
    if frozen.flow != spec.flow:
        raise ConfigError(f"run {spec.run_id} began as flow '{frozen.flow}', not '{spec.flow}'; start a new run instead of a retry")
    changes = [f"{name} {frozen.code.get(name)} → {now}" for name, now in spec.code.items() if frozen.code.get(name) != now]
    return frozen, changes


def finish(context: Context) -> None:
    """Notes that the run has ended well: what it used is no longer held back from `artifacts gc`."""
    context.store.put(layout.run_end_key(context.spec.run_id), b"{}")


@dataclass(frozen=True)
class Context:
    """Handed from the flow to each stage."""

    settings: Settings
    spec: RunSpec

    @cached_property
    def store(self) -> Store:
        return open_store(self.settings.store_url)

    @property
    def cache(self) -> Path:
        """Local files that can be made again: converted base models, fetched artifacts."""
        return self.settings.cache_dir

    @property
    def scratch(self) -> Path:
        """Work folders of stages that are being computed."""
        return self.settings.cache_dir / "scratch"


def code_versions() -> dict[str, Any]:
    """Facts recorded with every run and artifact, never part of a key."""
    facts: dict[str, Any] = {"python": platform.python_version()}
    for name in ("twinkle-flows", "torch", "transformers", "peft", "ray", "prefect", "mlflow"):
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = None
    facts["commit"] = _commit()
    return facts


def provenance(spec: RunSpec) -> dict[str, Any]:
    """Who made an artifact, when, with what. No user name, no path."""
    return {"run_id": spec.run_id, "flow": spec.flow, "created": time.time(), "code": spec.code}


def _commit() -> str | None:
    here = Path(__file__).resolve().parent.parent
    if not (here / ".git").exists():
        return None
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    asked = subprocess.run(command, capture_output=True, text=True, check=False)
    return asked.stdout.strip() or None


def to_json(value: Any) -> str:
    """Readable JSON for documents people open."""
    return json.dumps(value, indent=1, ensure_ascii=False, sort_keys=True)
