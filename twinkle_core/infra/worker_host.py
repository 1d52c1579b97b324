"""What runs inside a Ray actor: it hosts one worker, and knows nothing of models. Imports torch only when started."""

from __future__ import annotations

import os
import threading
from typing import Any

from twinkle_core.infra.group import load_class


class WorkerHost:
    """Hosts the worker of one rank. The actor's constructor does nothing that can fail, so that errors keep their type."""

    def __init__(self, worker_class: str | type, rank: int, world_size: int, threads: int) -> None:
        self._worker_class = worker_class
        self._rank = rank
        self._world_size = world_size
        self._threads = threads
        self._store: Any = None
        self._worker: Any = None

    def process_id(self) -> int:
        return os.getpid()

    def open_rendezvous(self) -> tuple[str, int]:
        """Host and port where the others find rank 0."""
        import ray

        from twinkle_core.infra.process_group import open_rendezvous

        host = ray.util.get_node_ip_address()
        self._store = open_rendezvous(host, self._world_size)
        return host, self._store.port

    def start(self, host: str | None, port: int | None) -> None:
        """Joins the process group, when there is one to join, and builds the worker."""
        import torch

        torch.set_num_threads(self._threads)
        if host is not None and port is not None:
            from twinkle_core.infra.process_group import find_rendezvous, join

            store = self._store or find_rendezvous(host, port, self._world_size)
            join(self._rank, self._world_size, store=store)
        self._worker = load_class(self._worker_class)(rank=self._rank, world_size=self._world_size)

    def call(self, method: str, args: tuple[Any, ...]) -> Any:
        return getattr(self._worker, method)(*args)

    def live(self) -> None:
        """Never returns. Its reference fails the moment this process dies, even between calls."""
        threading.Event().wait()
