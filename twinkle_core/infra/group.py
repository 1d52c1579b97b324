"""What a group of workers can do, whoever hosts them.

A worker is an object of a class whose constructor takes `rank` and `world_size`, and `device_mesh` if it likes, and whose
methods take and return plain data. By the time it is built, its process has joined the torch process group (when there is more than one).
"""

from __future__ import annotations

import importlib
import inspect
from typing import TYPE_CHECKING, Any, Protocol

from twinkle_core.config import ResourcesConfig
from twinkle_core.errors import ConfigError

if TYPE_CHECKING:
    from twinkle_core.device_mesh import DeviceMesh
    from twinkle_core.infra.dispatch import Collect, Dispatch


class WorkerGroup(Protocol):
    """One or more workers of one class, called together."""

    world_size: int

    def call(self, method: str, *args: Any, dispatch: Dispatch = "all", collect: Collect = "none") -> Any:
        """Calls `method` on every worker and waits for all of them. See `dispatch` for the two.

        Raises what a worker raised, with its own type, or `WorkerLostError` when a worker's process died.
        """
        ...

    def call_one(self, method: str, *args: Any) -> Any:
        """Calls `method` on one worker alone: worker 0, or where every process runs the script (torchrun) that of this process.

        The others need not call it too, so it must be a method that waits for no other worker.
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


def resolve_group(remote_group: str | None, device_mesh: DeviceMesh | None, worker_class: str | type) -> WorkerGroup:
    """The workers of a component that was built with `remote_group` and `device_mesh`.

    In ray mode, one on each worker of the named `DeviceGroup`. Else, or without a name, the one of this process: alone, or of its
    rank under torchrun. `device_mesh` None stands for the global one. Raises `ConfigError` for an unknown group, and for a
    mesh of another size than the group.
    """
    from twinkle_core.infra.runtime import current_runtime

    return current_runtime().worker_group(remote_group, device_mesh, worker_class)


def build_worker(worker_class: str | type, rank: int, world_size: int, mesh: DeviceMesh | None) -> Any:
    """A worker of one rank, which is told its mesh where its constructor asks for `device_mesh`."""
    found: Any = load_class(worker_class)
    if "device_mesh" not in inspect.signature(found).parameters:
        return found(rank=rank, world_size=world_size)
    return found(rank=rank, world_size=world_size, device_mesh=None if mesh is None else mesh.at_rank(rank))


def class_name(worker_class: str | type) -> str:
    return worker_class.__name__ if isinstance(worker_class, type) else worker_class.rpartition(":")[2]


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
