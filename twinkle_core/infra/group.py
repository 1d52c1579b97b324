"""What a group of workers can do, whoever hosts them.

A worker is an object of a class whose constructor takes `rank` and `world_size`, and whose methods take and return
plain data. By the time it is built, its process has joined the torch process group (when there is more than one).
"""

from __future__ import annotations

import importlib
from typing import Any, Protocol

from twinkle_core.config import ResourcesConfig
from twinkle_core.errors import ConfigError


class WorkerGroup(Protocol):
    """One or more workers of one class, called together."""

    world_size: int

    def call(self, method: str, *args: Any, dispatch: str = "all", collect: str = "none") -> Any:
        """Calls `method` on every worker and waits for all of them. See `dispatch` for the two names.

        Raises what a worker raised, with its own type, or `WorkerLostError` when a worker's process died.
        """
        ...

    def shutdown(self) -> None:
        """Ends the workers and frees what they held. May be called twice."""
        ...


def open_group(worker_class: str | type, resources: ResourcesConfig) -> WorkerGroup:
    """The group that `resources` describe: one worker in this process, or Ray actors."""
    if resources.mode == "local":
        from twinkle_core.infra.local_group import LocalGroup

        return LocalGroup(worker_class, threads=resources.cpus_per_worker)
    from twinkle_core.infra.ray_group import RayGroup

    return RayGroup(
        worker_class,
        workers=resources.workers,
        cpus_per_worker=resources.cpus_per_worker,
        gpus_per_worker=resources.gpus_per_worker,
        address=resources.ray_address,
        placement_timeout_seconds=resources.placement_timeout_seconds,
    )


def load_class(worker_class: str | type) -> type:
    """`worker_class` itself, or the class that 'package.module:Class' names. Such names come from code, never from a file."""
    if isinstance(worker_class, type):
        return worker_class
    module, _, name = worker_class.partition(":")
    if not name:
        raise ConfigError(f"worker class {worker_class!r} is not of the form 'package.module:Class'")
    found = getattr(importlib.import_module(module), name, None)
    if not isinstance(found, type):
        raise ConfigError(f"module {module} has no class {name}")
    return found
