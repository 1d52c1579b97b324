"""Actors that live and die together, each hosting objects of one rank, and waiting for their answers. Imports Ray.

Nothing is restarted or retried here: a death ends the whole gang, frees its cores, and says who died, in which call, and
of what. Whoever drives the training builds a new gang and goes on from the last checkpoint.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
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
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from twinkle_core.errors import TrainingError, TwinkleError, WorkerLostError
from twinkle_core.infra.deaths import describe_death, read_log
from twinkle_core.infra.local_ray import log_folder
from twinkle_core.infra.placement import Room
from twinkle_core.infra.worker_host import HostSettings, WorkerHost

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Answer:
    """What one worker was asked for, and will give."""

    gang: Gang
    """Whose worker."""
    rank: int
    """Of the worker in its gang."""
    what: str
    """The call, as errors name it."""
    value: Any
    """Ray reference of the result."""
    meta: Any
    """Ray reference of its `Meta`, which fails when the call does."""
    call: list[tuple[Any, Any]]
    """`meta` and `value` of all workers' answers to the same call. No cycle may hold a reference: the collector would drop it at any
    time, in any thread, and Ray ends a process that drops one while it shuts down."""


@dataclass(eq=False)
class Watch:
    """What is waited for, whichever call one waits in: all workers' lives, and the answers that nobody asked for yet."""

    alive: dict[Any, tuple[Gang, int]] = field(default_factory=dict)
    """Life reference -> gang and rank."""
    outstanding: dict[Any, Answer] = field(default_factory=dict)
    """Meta reference -> answer of a lazy call."""


class Gang:
    """One actor for each bundle of `room`. `strict` ends the gang at any error; else it lives on where all workers have answered."""

    def __init__(
        self,
        room: Room,
        settings: HostSettings,
        *,
        name: str = "",
        watch: Watch | None = None,
        strict: bool = True,
        environment: Sequence[dict[str, str]] = (),
    ) -> None:
        self.world_size = len(room.bundles)
        self.watch = watch or Watch()
        self._of = f"{len(room.bundles)}{f' of group {name!r}' if name else ''}"
        self._room: Room | None = room
        self._strict = strict
        self._actors: list[Any] = []
        self._process_ids: list[int] = []
        self._closed: TwinkleError | None = None
        try:
            self._start(room, settings, environment)
        except BaseException:
            self.shutdown()
            raise

    def _start(self, room: Room, settings: HostSettings, environment: Sequence[dict[str, str]]) -> None:
        actor_class: Any = ray.remote  # its typing knows neither concurrency groups nor options
        host = actor_class(
            num_cpus=room.bundle.get("CPU", 0.0),
            num_gpus=room.bundle.get("GPU", 0.0),
            resources={name: amount for name, amount in room.bundle.items() if name not in ("CPU", "GPU")},
            max_restarts=0,
            max_task_retries=0,
            concurrency_groups={"life": 1},
        )(WorkerHost)
        threads = {"OMP_NUM_THREADS": str(settings.threads), "OMP_WAIT_POLICY": "PASSIVE"}
        for rank, bundle in enumerate(room.bundles):
            place = PlacementGroupSchedulingStrategy(placement_group=room.group, placement_group_bundle_index=bundle)
            own = {**threads, **(environment[rank] if environment else {})}
            actor = host.options(scheduling_strategy=place, runtime_env={"env_vars": own}).remote(rank, self.world_size, settings)
            self._actors.append(actor)
            self.watch.alive[actor.live.options(concurrency_group="life").remote()] = (self, rank)
        self._process_ids = self.run("process_id", [()] * self.world_size, "start")
        address: tuple[str | None, int | None] = (None, None)
        if self.world_size > 1:
            address = self.run("open_rendezvous", [()], "start")[0]
        self.run("start", [address] * self.world_size, "start")

    @property
    def is_open(self) -> bool:
        return self._closed is None

    def process_ids(self) -> list[int]:
        """In rank order, each on its own node."""
        self._check_open()
        return list(self._process_ids)

    def ask(self, host_method: str, arguments: Sequence[tuple[Any, ...]], what: str) -> list[Answer]:
        """Sends one method to the first `len(arguments)` actors; waits for nothing."""
        self._check_open()
        answers: list[Answer] = []
        call: list[tuple[Any, Any]] = []
        for rank, args in enumerate(arguments):
            value, meta = getattr(self._actors[rank], host_method).options(num_returns=2).remote(*args)
            call.append((meta, value))
            answers.append(Answer(gang=self, rank=rank, what=what, value=value, meta=meta, call=call))
        return answers

    def run(self, host_method: str, arguments: Sequence[tuple[Any, ...]], what: str, timeout: float | None = None) -> list[Any]:
        """As `ask`, and waits for the results or the first failure of any worker."""
        answers = self.ask(host_method, arguments, what)
        self.wait(answers, timeout)
        return self.values(answers)

    def values(self, answers: Sequence[Answer]) -> list[Any]:
        """The results of answers that were waited for."""
        try:
            return list(ray.get([answer.value for answer in answers]))
        except LOST as error:
            self._lose(answers[0].rank, answers[0].what, error)

    def wait(self, answers: Sequence[Answer], timeout: float | None = None) -> list[Any]:
        """The `Meta` of each. Raises what a worker raised, or `WorkerLostError` for any worker that died or a time-out (seconds)."""
        pending = {answer.meta: answer for answer in answers}
        metas: dict[Any, Any] = {}
        deadline = None if timeout is None else time.monotonic() + timeout
        while len(metas) < len(pending):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            asked = [ref for ref in pending if ref not in metas]
            late = [ref for ref in self.watch.outstanding if ref not in pending]
            ready, _ = ray.wait([*late, *asked, *self.watch.alive], num_returns=1, timeout=left)
            if not ready:
                self._time_out([pending[ref] for ref in asked], len(answers), timeout or 0.0)
            for ref in ready:
                answer = self.watch.outstanding.get(ref) or pending.get(ref)
                if answer is None:
                    gang, rank = self.watch.alive[ref]
                    gang.die(rank, self._what(gang, pending))
                meta = answer.gang.read(answer)
                self.watch.outstanding.pop(ref, None)
                if ref in pending:
                    metas[ref] = meta
        return [metas[answer.meta] for answer in answers]

    def _what(self, gang: Gang, pending: dict[Any, Answer]) -> str:
        """The call that a gang is in."""
        calls = [answer.what for answer in (*pending.values(), *self.watch.outstanding.values()) if answer.gang is gang]
        return calls[0] if calls else "no call"

    def read(self, answer: Answer) -> Any:
        """The meta of an answer that is there."""
        try:
            return ray.get(answer.meta)
        except LOST as error:
            self._lose(answer.rank, answer.what, error)
        except RayTaskError as error:
            self._fail(answer, error)

    def die(self, rank: int, what: str) -> NoReturn:
        """Tells of a worker whose life reference is ready."""
        life = next(ref for ref, owner in self.watch.alive.items() if owner == (self, rank))
        try:
            ray.get(life)
        except (*LOST, RayTaskError) as error:
            self._lose(rank, what, error)
        raise AssertionError("a worker's life ends only with its process")

    def shutdown(self, reason: TwinkleError | None = None) -> None:
        """Kills the actors and gives their cores back. May be called twice."""
        if self._closed is None:
            self._closed = reason or TrainingError("this worker group was shut down; build a new one")
        for ref in [ref for ref, (gang, _) in self.watch.alive.items() if gang is self]:
            del self.watch.alive[ref]
        for ref in [ref for ref, answer in self.watch.outstanding.items() if answer.gang is self]:
            del self.watch.outstanding[ref]
        if ray.is_initialized():
            for actor in self._actors:
                ray.kill(actor, no_restart=True)
        if self._room is not None:
            self._room.release()
        self._actors, self._room = [], None

    def _check_open(self) -> None:
        if self._closed is not None:
            raise self._closed_error()

    def _closed_error(self) -> TwinkleError:
        """A new one each time: a raised one holds the frames that it went through, and with them references of Ray."""
        kept = self._closed or TrainingError("this worker group was shut down; build a new one")
        return type(kept)(*kept.args)

    def _lose(self, rank: int, what: str, error: Exception) -> NoReturn:
        message = " ".join(str(error).split())
        earlier = [answer.what for answer in self.watch.outstanding.values() if answer.gang is self]
        what = earlier[0] if earlier else what  # the oldest call still open: later ones fail with it
        kind = type(error).__name__
        pid = self._process_ids[rank] if rank < len(self._process_ids) else None
        death = describe_death(kind, message, read_log(log_folder(), pid))
        self.shutdown(
            WorkerLostError(
                f"worker {rank} of {self._of} died during '{what}' ({death}; {kind}: {message[:600]}); "
                "the group is ended: build a new one and resume from the last checkpoint"
            )
        )
        raise self._closed_error() from None

    def _time_out(self, missing: list[Answer], num_asked: int, timeout: float) -> NoReturn:
        ranks = ", ".join(str(answer.rank) for answer in missing)
        self.shutdown(
            WorkerLostError(
                f"no answer to '{missing[0].what}' from worker(s) {ranks} of {self._of} within {timeout:g} s, "
                f"{num_asked - len(missing)} answered; the group is ended: build a new one, or allow more time"
            )
        )
        raise self._closed_error()

    def _fail(self, answer: Answer, error: RayTaskError) -> NoReturn:
        """Re-raises a worker's own exception; a broken connection to a peer that died is that peer's death."""
        cause = error.cause if isinstance(error.cause, Exception) else error
        if isinstance(cause, LOST) or (self.world_size > 1 and not isinstance(cause, TwinkleError)):
            dead, _ = ray.wait(list(self.watch.alive), num_returns=1, timeout=DEATH_NOTICE_SECONDS)
            for ref in dead:
                gang, rank = self.watch.alive[ref]
                gang.die(rank, answer.what)
        if self._strict or not self._all_answered():
            self.shutdown(
                TrainingError(
                    f"this worker group was ended when worker {answer.rank} raised {type(cause).__name__} in '{answer.what}'; "
                    "build a new one"
                )
            )
        else:
            self._drop(answer.call)
        cause.add_note(f"raised by worker {answer.rank} in '{answer.what}'")
        if cause is error:
            raise cause
        raise cause from error

    def _drop(self, call: Sequence[tuple[Any, Any]]) -> None:
        """Forgets a call of which one error was told: the others are its like, and Ray would report those that nobody fetched."""
        for meta, value in call:
            self.watch.outstanding.pop(meta, None)
            try:
                ray.get(meta)
            except (RayTaskError, *LOST):
                with suppress(RayTaskError, *LOST):
                    ray.get(value)

    def _all_answered(self) -> bool:
        """Whether every worker is idle again soon after an error: a peer may wait for ever for the one that failed."""
        pings = [actor.process_id.options(num_returns=2).remote()[1] for actor in self._actors]
        return len(ray.wait(pings, num_returns=len(pings), timeout=DEATH_NOTICE_SECONDS)[0]) == len(pings)
