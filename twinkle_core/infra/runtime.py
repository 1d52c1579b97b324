"""Where a script's components run: `initialize`, once, at its start.

    with initialize(mode="ray", groups=[DeviceGroup("model", 2, "CPU")]) as runtime:
        ...

The same script runs in this process (`local`), in each process of torchrun (`local` too: RANK and WORLD_SIZE say so), and with its
components on Ray workers (`ray`). Imports neither torch nor Ray until they are needed.
"""

from __future__ import annotations

import atexit
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from types import TracebackType
from typing import TYPE_CHECKING, Any

from twinkle_core.device_mesh import DeviceGroup, DeviceMesh, place_ranks
from twinkle_core.errors import ConfigError
from twinkle_core.infra.environment import Torchrun, torchrun
from twinkle_core.infra.group import WorkerGroup, class_name
from twinkle_core.infra.local_group import LocalGroup
from twinkle_core.infra.seeding import seed_everything
from twinkle_core.infra.state import STATE

if TYPE_CHECKING:
    from twinkle_core.infra.ray_runtime import RayRuntime

MODES = ("local", "ray")


@dataclass(frozen=True, kw_only=True, eq=False)
class Runtime:
    """What `initialize` was told, and how to end it: by `shutdown`, or by leaving a `with` block."""

    mode: str = "local"
    """'local' or 'ray'."""
    nproc_per_node: int = 8
    """GPUs of a node: a worker takes no more."""
    ncpu_proc_per_node: int = 8
    """Taken for scripts that have it; a node's cores bound its workers."""
    seed: int = 42
    """Seeds this process and each worker."""
    full_determinism: bool = False
    """torch refuses kernels whose results vary."""
    groups: tuple[DeviceGroup, ...] = ()
    """What `remote_group=` can name."""
    global_device_mesh: DeviceMesh | None = None
    """The mesh of components that are given none."""
    lazy_collect: bool = True
    """Whether remote methods give a `LazyCollect` where they do not say themselves."""
    name: str | None = None
    """Of the run, in messages to the notifier."""
    notifier: Callable[[str], Any] | None = None
    """Is called with a message when a remote method raises."""
    process: Torchrun = field(default_factory=lambda: Torchrun(rank=0, world_size=1))
    """This process's rank among those that run the script."""
    ray: RayRuntime | None = None
    """Ray's side, in ray mode."""

    def worker_group(self, remote_group: str | None, device_mesh: DeviceMesh | None, worker_class: str | type) -> WorkerGroup:
        """See `group.resolve_group`."""
        mesh = device_mesh if device_mesh is not None else self.global_device_mesh
        if remote_group is not None and self.groups:
            self.group(remote_group)
        if self.ray is not None and remote_group is not None:
            return self.ray.worker_group(remote_group, mesh, worker_class)
        process = self.process
        if mesh is not None and mesh.world_size != process.world_size:
            raise ConfigError(
                f"{class_name(worker_class)}: a device_mesh of {mesh.world_size} ranks, but {process.world_size} process(es) run this "
                "script: start it with torchrun --nproc_per_node, or use mode='ray' and remote_group"
            )
        return LocalGroup(worker_class, rank=process.rank, world_size=process.world_size, device_mesh=mesh)

    def group(self, name: str) -> DeviceGroup:
        """The group of that name, or `ConfigError` naming the known ones."""
        for group in self.groups:
            if group.name == name:
                return group
        raise ConfigError(f"remote_group is {name!r}; initialize() was given: {', '.join(group.name for group in self.groups) or 'none'}")

    def wait(self) -> None:
        """Waits for all calls that gave a `LazyCollect`. Raises what any of them raised."""
        if self.ray is not None:
            self.ray.wait()

    def shutdown(self) -> None:
        """Ends the workers, and Ray where it was started here. May be called twice; `initialize` may be called again."""
        if STATE.runtime is self:
            STATE.runtime = None
        if self.ray is not None:
            self.ray.shutdown()

    def __enter__(self) -> Runtime:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """A block that ends well first waits for what is still running, so that no error is lost."""
        try:
            if error is None:
                self.wait()
        finally:
            self.shutdown()


def initialize(
    mode: str = "local",
    *,
    nproc_per_node: int = 8,
    ncpu_proc_per_node: int = 8,
    seed: int = 42,
    full_determinism: bool = False,
    groups: Sequence[DeviceGroup] | None = None,
    global_device_mesh: DeviceMesh | None = None,
    lazy_collect: bool = True,
    name: str | None = None,
    notifier: Callable[[str], Any] | None = None,
) -> Runtime:
    """Says where components run; see `Runtime` for the arguments.

    In ray mode the cores and GPUs of all groups are reserved here. It joins the Ray that this process uses, or the cluster of
    RAY_ADDRESS, or starts a local one. Called again with the same arguments it gives the same runtime; with others it raises
    `ConfigError` until `shutdown` was called. In a worker it does nothing, so that a module may call it when imported.
    """
    asked = Runtime(
        mode=mode,
        nproc_per_node=nproc_per_node,
        ncpu_proc_per_node=ncpu_proc_per_node,
        seed=seed,
        full_determinism=full_determinism,
        groups=tuple(groups or ()),
        global_device_mesh=global_device_mesh,
        lazy_collect=lazy_collect,
        name=name,
        notifier=notifier,
    )
    if STATE.in_worker:
        return current_runtime()
    if STATE.runtime is not None:
        return _same(STATE.runtime, asked)
    _check(asked)
    seed_everything(seed, full_determinism)
    runtime = _with_ray(asked) if mode == "ray" else _with_process(asked)
    STATE.runtime = runtime
    atexit.register(_end, runtime)
    return runtime


def current_runtime() -> Runtime:
    """What `initialize` made; before it, and in workers, this process alone (or of its rank under torchrun)."""
    if STATE.runtime is not None:
        return STATE.runtime
    if STATE.in_worker:
        return Runtime()
    process = torchrun()
    return Runtime() if process is None else Runtime(process=process)


def _same(runtime: Runtime, asked: Runtime) -> Runtime:
    told = [item.name for item in fields(Runtime) if item.name not in ("process", "ray")]
    other = [name for name in told if getattr(runtime, name) != getattr(asked, name)]
    if other:
        shown = ", ".join(f"{name} was {getattr(runtime, name)!r}, now {getattr(asked, name)!r}" for name in other)
        raise ConfigError(f"initialize() was called before, with other arguments: {shown}. Call shutdown() on what it gave first")
    return runtime


def _check(asked: Runtime) -> None:
    if asked.mode not in MODES:
        raise ConfigError(f"mode is {asked.mode!r}; known: {', '.join(MODES)}")
    place_ranks(asked.groups)
    if asked.mode == "ray" and not asked.groups:
        raise ConfigError("mode is 'ray' without groups: say which devices there are, e.g. groups=[DeviceGroup('model', 4, 'GPU')]")
    for group in asked.groups:
        if group.device_type != "cpu" and group.gpus_per_worker > asked.nproc_per_node:
            raise ConfigError(
                f"group {group.name!r}: gpus_per_worker {group.gpus_per_worker} is more than nproc_per_node {asked.nproc_per_node}"
            )


def _told(asked: Runtime) -> dict[str, Any]:
    return {item.name: getattr(asked, item.name) for item in fields(Runtime)}


def _with_process(asked: Runtime) -> Runtime:
    process = torchrun() or Torchrun(rank=0, world_size=1)
    mesh = asked.global_device_mesh
    if mesh is not None and mesh.world_size != process.world_size:
        raise ConfigError(
            f"global_device_mesh has {mesh.world_size} ranks, but {process.world_size} process(es) run this script: "
            f"start it with torchrun --nproc_per_node={mesh.world_size}"
        )
    if process.world_size > 1:
        from twinkle_core.infra.process_group import join

        join(process.rank, process.world_size, init_method="env://")
    return Runtime(**{**_told(asked), "process": process})


def _with_ray(asked: Runtime) -> Runtime:
    from twinkle_core.infra.ray_runtime import RayRuntime

    return Runtime(**{**_told(asked), "ray": RayRuntime(asked.groups, seed=asked.seed, full_determinism=asked.full_determinism)})


def _end(runtime: Runtime) -> None:
    """At the end of the script: a script that ended well has its last calls done first."""
    if STATE.runtime is not runtime:
        return
    try:
        if getattr(sys, "last_value", None) is None:  # no exception ended the script
            runtime.wait()
    finally:
        runtime.shutdown()
