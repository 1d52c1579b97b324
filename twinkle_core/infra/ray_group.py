"""A gang of Ray actors in one placement group, that lives and dies together.

Nothing is restarted or retried here: the first failure ends the whole gang, frees its cores, and says who failed, in
which call, and why. Whoever drives the training builds a new gang and goes on from the last checkpoint.
"""

from __future__ import annotations

from types import TracebackType
from typing import Any, NoReturn

import ray
from ray.exceptions import (
    ActorUnschedulableError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayTaskError,
    WorkerCrashedError,
)
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from twinkle_core.errors import ConfigError, TrainingError, TwinkleError, WorkerLostError
from twinkle_core.infra.dispatch import collect_results, split_arguments
from twinkle_core.infra.local_ray import LocalRay, connect
from twinkle_core.infra.worker_host import WorkerHost

LOST = (
    RayActorError,
    ActorUnschedulableError,
    WorkerCrashedError,
    NodeDiedError,
    LocalRayletDiedError,
    ObjectLostError,
    OutOfMemoryError,  # Ray's memory monitor; not a RayActorError
)
"""Errors that say that a process or node is gone, through no fault of the job."""
DEATH_NOTICE_SECONDS = 3.0
"""A survivor's broken connection may be reported before the death that broke it: how long to wait for the death."""


class RayGroup:
    """`workers` actors, each with its own cores and GPUs, hosting one worker of `worker_class` each.

    Connects to `address`, or to the Ray that this process already uses, or starts a local one (and then ends it at
    `shutdown`). Raises `ConfigError` when the cores and GPUs are not free within `placement_timeout_seconds`.
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
    ) -> None:
        self.world_size = workers
        self._bundle = {"CPU": float(cpus_per_worker), **({"GPU": float(gpus_per_worker)} if gpus_per_worker else {})}
        self._actors: list[Any] = []
        self._alive: dict[Any, int] = {}
        self._group: PlacementGroup | None = None
        self._closed: TwinkleError | None = None
        self._connected = False
        self._local_ray: LocalRay | None = None
        if not ray.is_initialized():
            if address is None or address == "local":
                self._local_ray = LocalRay()
            else:
                connect(address)
                self._connected = True
        try:
            self._group = placement_group([self._bundle] * self.world_size, strategy="PACK")
            self._await_room(self._group, placement_timeout_seconds)
            self._start(self._group, worker_class, cpus_per_worker)
        except BaseException:
            self.shutdown()
            raise

    def call(self, method: str, *args: Any, dispatch: str = "all", collect: str = "none") -> Any:
        shares = split_arguments(args, dispatch, self.world_size)
        return collect_results(self._run("call", [(method, share) for share in shares], method), collect)

    def process_ids(self) -> list[int]:
        """The workers' process ids, in rank order, each on its own node."""
        return self._run("process_id", [()] * self.world_size, "process_id")

    def shutdown(self) -> None:
        """Kills the actors, gives their cores back, and ends or leaves Ray where this group started or joined it."""
        if self._closed is None:
            self._closed = TrainingError("this worker group was shut down; build a new one")
        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor, no_restart=True)
            if self._group is not None:
                remove_placement_group(self._group)
            if self._connected:
                ray.shutdown()
        if self._local_ray is not None:
            self._local_ray.shutdown()
        self._actors, self._alive, self._group, self._connected, self._local_ray = [], {}, None, False, None

    def __enter__(self) -> RayGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.shutdown()

    def _await_room(self, group: PlacementGroup, timeout_seconds: float) -> None:
        needed = {name: amount * self.world_size for name, amount in self._bundle.items()}
        total = ray.cluster_resources()
        if self._local_ray is not None and any(total.get(name, 0.0) < amount for name, amount in needed.items()):
            timeout_seconds = 0.0  # a local Ray of our own never gets larger: waiting is of no use
        if group.wait(timeout_seconds):
            return
        free = ray.available_resources()
        amounts = ", ".join(
            f"{name}: {amount:g} needed ({self.world_size} x {self._bundle[name]:g}), "
            f"{free.get(name, 0.0):g} free of {total.get(name, 0.0):g}"
            for name, amount in needed.items()
        )
        raise ConfigError(
            f"no room for {self.world_size} workers after {timeout_seconds:g} s: {amounts}. "
            "Ask for fewer workers or cores, end what holds them, or raise placement_timeout_seconds"
        )

    def _start(self, group: PlacementGroup, worker_class: str | type, threads: int) -> None:
        actor_class: Any = ray.remote  # its typing knows neither concurrency groups nor options
        host = actor_class(
            num_cpus=self._bundle["CPU"],
            num_gpus=self._bundle.get("GPU", 0.0),
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups={"life": 1},
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}},
        )(WorkerHost)
        for rank in range(self.world_size):
            place = PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=rank)
            actor = host.options(scheduling_strategy=place).remote(worker_class, rank, self.world_size, threads)
            self._actors.append(actor)
            self._alive[actor.live.options(concurrency_group="life").remote()] = rank
        address: tuple[str | None, int | None] = (None, None)
        if self.world_size > 1:
            address = self._run("open_rendezvous", [()], "start")[0]
        self._run("start", [address] * self.world_size, "start")

    def _run(self, host_method: str, arguments: list[tuple[Any, ...]], method: str) -> list[Any]:
        """Runs one method on the first `len(arguments)` actors and waits for all, or for the first failure of any actor."""
        if self._closed is not None:
            raise self._closed
        pending = {getattr(self._actors[rank], host_method).remote(*args): rank for rank, args in enumerate(arguments)}
        results: list[Any] = [None] * len(arguments)
        while pending:
            ready, _ = ray.wait([*pending, *self._alive], num_returns=1)
            for ref in ready:
                rank = pending.pop(ref) if ref in pending else self._alive[ref]
                try:
                    results[rank] = ray.get(ref)
                except LOST as error:
                    self._lose(rank, method, error)
                except RayTaskError as error:
                    self._fail(rank, method, error)
        return results

    def _lose(self, rank: int, method: str, error: Exception) -> NoReturn:
        reason = " ".join(str(error).split())[:600]
        self._closed = WorkerLostError(
            f"worker {rank} of {self.world_size} died during '{method}' ({type(error).__name__}: {reason}); "
            "the group is ended: build a new one and resume from the last checkpoint"
        )
        self.shutdown()
        raise self._closed from None

    def _fail(self, rank: int, method: str, error: RayTaskError) -> NoReturn:
        """Re-raises a worker's own exception; a broken connection to a peer that died is that peer's death."""
        cause = error.cause if isinstance(error.cause, Exception) else error
        if self.world_size > 1 and not isinstance(cause, TwinkleError):
            dead, _ = ray.wait(list(self._alive), num_returns=1, timeout=DEATH_NOTICE_SECONDS)
            for ref in dead:
                try:
                    ray.get(ref)
                except LOST as death:
                    self._lose(self._alive[ref], method, death)
        self._closed = TrainingError(
            f"this worker group was ended when worker {rank} raised {type(cause).__name__} in '{method}'; build a new one"
        )
        self.shutdown()
        cause.add_note(f"raised by worker {rank} in '{method}'")
        if cause is error:
            raise cause
        raise cause from error
