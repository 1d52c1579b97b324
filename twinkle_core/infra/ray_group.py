"""A `WorkerGroup` of Ray actors: a gang with one worker of one class in each. Imports Ray."""

from __future__ import annotations

from types import TracebackType
from typing import Any

from twinkle_core.device_mesh import DeviceMesh
from twinkle_core.infra.dispatch import Collect, Dispatch, collect_results, split_arguments
from twinkle_core.infra.gang import Gang
from twinkle_core.infra.group import class_name
from twinkle_core.infra.local_ray import RayLink
from twinkle_core.infra.placement import reserve
from twinkle_core.infra.worker_host import HostSettings


class GangGroup:
    """One object of `worker_class` on each worker of a gang that somebody else owns."""

    def __init__(self, gang: Gang, worker_class: str | type, *, device_mesh: DeviceMesh | None = None, key: str = "worker") -> None:
        self.world_size = gang.world_size
        self._gang = gang
        self._mesh = device_mesh
        self._key = key
        gang.run("build", [(key, worker_class, device_mesh)] * gang.world_size, f"{class_name(worker_class)}()")

    def call(self, method: str, *args: Any, dispatch: Dispatch = "all", collect: Collect = "none") -> Any:
        shares = split_arguments(args, dispatch, self.world_size, self._mesh)
        results = self._gang.run("call", [(self._key, method, share, {}, None) for share in shares], method)
        return collect_results(results, collect, self._mesh)

    def call_one(self, method: str, *args: Any) -> Any:
        return self._gang.run("call", [(self._key, method, args, {}, None)], method)[0]

    def shutdown(self) -> None:
        """Drops the workers; the gang's processes stay, for they belong to the device group."""
        if self._gang.is_open:
            self._gang.run("forget", [(self._key,)] * self.world_size, "shutdown")


class RayGroup:
    """`workers` actors, each with its own cores and GPUs, hosting one worker of `worker_class` each.

    Connects to `address`, or to the Ray that this process already uses, or starts a local one (and then ends it at
    `shutdown`). Raises `ConfigError` when the cores and GPUs are not free within `placement_timeout_seconds`. Any failure
    ends the whole group.
    """

    def __init__(
        self,
        worker_class: str | type,
        *,
        workers: int = 1,
        cpus_per_worker: int = 1,
        gpus_per_worker: float = 0,
        address: str | None = None,
        placement_timeout_seconds: float = 120.0,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        self.world_size = workers
        self._gang: Gang | None = None
        self._link: RayLink | None = RayLink(address)
        try:
            bundle = {"CPU": float(cpus_per_worker), **({"GPU": float(gpus_per_worker)} if gpus_per_worker else {})}
            room = reserve(workers, bundle, timeout_seconds=placement_timeout_seconds, may_grow=not self._link.is_own)
            self._gang = Gang(room, HostSettings(threads=cpus_per_worker, hidden=self._link.hidden))
            self._group = GangGroup(self._gang, worker_class, device_mesh=device_mesh)
        except BaseException:
            self.shutdown()
            raise

    def call(self, method: str, *args: Any, dispatch: Dispatch = "all", collect: Collect = "none") -> Any:
        return self._group.call(method, *args, dispatch=dispatch, collect=collect)

    def call_one(self, method: str, *args: Any) -> Any:
        return self._group.call_one(method, *args)

    def process_ids(self) -> list[int]:
        """The workers' process ids, in rank order, each on its own node."""
        return self._gang.process_ids() if self._gang is not None else []

    def shutdown(self) -> None:
        """Kills the actors, gives their cores back, and ends or leaves Ray where this group started or joined it."""
        if self._gang is not None:
            self._gang.shutdown()
        if self._link is not None:
            self._link.close()
            self._link = None

    def __enter__(self) -> RayGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()
