"""The workers of each device group, on Ray: reserved at once, started when something first runs on them. Imports Ray."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

import ray

from twinkle_core.device_mesh import DeviceGroup, DeviceMesh
from twinkle_core.errors import ConfigError
from twinkle_core.infra.environment import ray_address
from twinkle_core.infra.gang import Gang, Watch
from twinkle_core.infra.group import class_name
from twinkle_core.infra.local_ray import RayLink
from twinkle_core.infra.placement import RESOURCES, Room, reserve
from twinkle_core.infra.ray_group import GangGroup
from twinkle_core.infra.worker_host import HostSettings

PLACEMENT_TIMEOUT_SECONDS = 120.0
NO_DEVICE_CHOICE = {"cuda": "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "npu": "RAY_EXPERIMENTAL_NOSET_ASCEND_RT_VISIBLE_DEVICES"}
"""What keeps Ray from choosing the devices itself."""
VISIBLE_DEVICES = {"cuda": "CUDA_VISIBLE_DEVICES", "npu": "ASCEND_RT_VISIBLE_DEVICES"}


class RayRuntime:
    """Rooms for all groups, and their gangs. Raises `ConfigError` when the groups do not fit."""

    def __init__(self, groups: Sequence[DeviceGroup], *, seed: int | None, full_determinism: bool) -> None:
        self._groups = {group.name: group for group in groups}
        self._rooms: dict[str, Room] = {}
        self._gangs: dict[str, Gang] = {}
        self._watch = Watch()
        self.meshes: dict[tuple[str, str], DeviceMesh | None] = {}
        """(group, component) -> its mesh, for `get_device_placement`."""
        self._link = RayLink(ray_address())
        self._settings = HostSettings(threads=1, hidden=self._link.hidden, seed=seed, full_determinism=full_determinism)
        try:
            self._check_total()
            for group in groups:
                self._rooms[group.name] = reserve(
                    group.num_workers,
                    bundle_of(group),
                    timeout_seconds=PLACEMENT_TIMEOUT_SECONDS,
                    may_grow=not self._link.is_own,
                    name=group.name,
                )
        except BaseException:
            self.shutdown()
            raise

    def _check_total(self) -> None:
        """A Ray of our own never gets larger: groups that cannot all be placed are refused at once, before one waits for the others."""
        if not self._link.is_own:
            return
        total = ray.cluster_resources()
        for resource in sorted({resource for group in self._groups.values() for resource in bundle_of(group)}):
            wanted = {name: group.num_workers * bundle_of(group).get(resource, 0.0) for name, group in self._groups.items()}
            if sum(wanted.values()) > total.get(resource, 0.0):
                shown = ", ".join(f"{name} {amount:g}" for name, amount in wanted.items())
                raise ConfigError(
                    f"the groups need {sum(wanted.values()):g} {resource} ({shown}), this machine has {total.get(resource, 0.0):g}: "
                    "use fewer ranks, or a cluster (RAY_ADDRESS)"
                )

    def gang(self, name: str) -> Gang:
        """The workers of a group, started at the first call."""
        if name not in self._gangs or not self._gangs[name].is_open:
            group = self._groups[name]
            if name in self._gangs:  # its workers died, and its room went with them
                self._rooms[name] = reserve(
                    group.num_workers, bundle_of(group), timeout_seconds=PLACEMENT_TIMEOUT_SECONDS, may_grow=True, name=name
                )
            self._gangs[name] = Gang(
                self._rooms[name], self._settings, name=name, watch=self._watch, strict=False, environment=device_environment(group)
            )
        return self._gangs[name]

    def worker_group(self, name: str, mesh: DeviceMesh | None, worker_class: str | type) -> GangGroup:
        """One worker of `worker_class` on each worker of the group."""
        self.check_mesh(name, mesh, class_name(worker_class))
        return GangGroup(self.gang(name), worker_class, device_mesh=mesh, key=new_key(class_name(worker_class)))

    def check_mesh(self, name: str, mesh: DeviceMesh | None, what: str) -> None:
        workers = self._groups[name].num_workers
        if mesh is not None and mesh.world_size != workers:
            raise ConfigError(f"{what}: a device_mesh of {mesh.world_size} ranks on group {name!r}, which has {workers} worker(s)")
        self.meshes[name, what] = mesh

    def wait(self) -> None:
        """Waits for all outstanding answers."""
        while self._watch.outstanding:
            answer = next(iter(self._watch.outstanding.values()))
            answer.gang.wait([answer])

    def shutdown(self) -> None:
        """Ends all gangs, gives back all rooms, and ends or leaves Ray."""
        for gang in self._gangs.values():
            gang.shutdown()
        for room in self._rooms.values():
            room.release()
        self._gangs, self._rooms = {}, {}
        self._link.close()


def new_key(name: str) -> str:
    """A name for an object on its workers that no other has."""
    return f"{name}-{uuid.uuid4().hex[:12]}"


def bundle_of(group: DeviceGroup) -> dict[str, float]:
    """What one worker of the group takes: a core, and its GPUs."""
    if group.device_type == "cpu":
        return {"CPU": 1.0}
    return {"CPU": 1.0, RESOURCES[group.device_type]: float(group.gpus_per_worker)}


def device_environment(group: DeviceGroup) -> list[dict[str, str]]:
    """Each worker's variables where the group names its devices."""
    found = []
    for worker in range(group.num_workers):
        devices = group.devices_of(worker)
        if devices is None:
            return []
        found.append({NO_DEVICE_CHOICE[group.device_type]: "1", VISIBLE_DEVICES[group.device_type]: ",".join(devices)})
    return found
