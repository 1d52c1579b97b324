"""What runs inside a Ray actor: it hosts objects, and knows nothing of models. Imports torch only when there is a group to join.

Every method gives two values, which Ray keeps apart: the result, which may be large and stays here until somebody asks
for it, and a `Meta` that the driver reads.
"""

from __future__ import annotations

import os
import sys
import threading
from dataclasses import dataclass
from typing import Any

from twinkle_core.device_mesh import DeviceMesh
from twinkle_core.infra.batches import Split, batch_length
from twinkle_core.infra.environment import hide
from twinkle_core.infra.group import build_worker
from twinkle_core.infra.parts import resolve
from twinkle_core.infra.seeding import seed_everything
from twinkle_core.infra.state import STATE


@dataclass(frozen=True, kw_only=True)
class Meta:
    """What the driver knows of a result without having it."""

    length: int | None = None
    """Items, where the result is a batch."""
    stopped: bool = False
    """An iterator has ended; the result is None."""


@dataclass(frozen=True, kw_only=True)
class HostSettings:
    """What every worker of a gang is told at its start."""

    threads: int
    """torch's threads; also OMP_NUM_THREADS."""
    hidden: tuple[str, ...] = ()
    """Environment variables to forget."""
    seed: int | None = None
    """None: nothing is seeded."""
    full_determinism: bool = False
    """See `seed_everything`."""


class WorkerHost:
    """Hosts the objects of one rank. The actor's constructor does nothing that can fail, so that errors keep their type."""

    def __init__(self, rank: int, world_size: int, settings: HostSettings) -> None:
        STATE.in_worker = True
        hide(settings.hidden)
        self._rank = rank
        self._world_size = world_size
        self._settings = settings
        self._store: Any = None
        self._objects: dict[str, Any] = {}
        self._iterators: dict[str, Any] = {}

    def process_id(self) -> tuple[int, Meta]:
        return os.getpid(), Meta()

    def open_rendezvous(self) -> tuple[tuple[str, int], Meta]:
        """Host and port where the others find rank 0."""
        import ray

        from twinkle_core.infra.process_group import open_rendezvous

        host = ray.util.get_node_ip_address()
        self._store = open_rendezvous(host, self._world_size)
        return (host, self._store.port), Meta()

    def start(self, host: str | None, port: int | None) -> tuple[int, Meta]:
        """Joins the process group, when there is one to join. Gives the process id."""
        if host is not None and port is not None:
            from twinkle_core.infra.process_group import find_rendezvous, join

            store = self._store or find_rendezvous(host, port, self._world_size)
            join(self._rank, self._world_size, store=store)
        if "torch" in sys.modules:  # elsewhere OMP_NUM_THREADS says it
            sys.modules["torch"].set_num_threads(self._settings.threads)
        if self._settings.seed is not None:
            seed_everything(self._settings.seed, self._settings.full_determinism)
        return os.getpid(), Meta()

    def build(self, key: str, worker_class: str | type, mesh: DeviceMesh | None) -> tuple[None, Meta]:
        """The worker of a `WorkerGroup`."""
        self._objects[key] = build_worker(worker_class, self._rank, self._world_size, mesh)
        return None, Meta()

    def construct(self, key: str, user_class: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[None, Meta]:
        """An object of a user's class."""
        own = {name: self._bound(value) for name, value in kwargs.items()}
        self._objects[key] = user_class(*map(self._bound, args), **own)
        return None, Meta()

    def _bound(self, value: Any) -> Any:
        """A mesh, as this rank sees it."""
        return value.at_rank(self._rank) if isinstance(value, DeviceMesh) and self._rank < value.world_size else value

    def forget(self, key: str) -> tuple[None, Meta]:
        self._objects.pop(key, None)
        return None, Meta()

    def call(self, key: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], split: Split | None) -> tuple[Any, Meta]:
        """`split` is given where results of other workers are among the arguments, which are shared out only here."""
        args, kwargs = resolve(args, kwargs, split, self._rank)
        result = getattr(self._objects[key], method)(*args, **kwargs)
        return result, Meta(length=batch_length(result))

    def iterate(self, key: str, iterator: str) -> tuple[None, Meta]:
        """Starts an iterator over an object."""
        self._iterators[iterator] = iter(self._objects[key])
        return None, Meta()

    def advance(self, iterator: str, key: str) -> tuple[Any, Meta]:
        """The iterator's next value, or (`iterator` '') that of the object itself."""
        if iterator and iterator not in self._iterators:  # ended earlier, while other workers went on
            return None, Meta(stopped=True)
        try:
            result = next(self._iterators[iterator] if iterator else self._objects[key])
        except StopIteration:
            self._iterators.pop(iterator, None)
            return None, Meta(stopped=True)
        return result, Meta(length=batch_length(result))

    def live(self) -> None:
        """Never returns. Its reference fails the moment this process dies, even between calls."""
        threading.Event().wait()
