"""A worker in this very process: alone, or one of several that each run the same script (torchrun).

Under torchrun every process makes the same calls; each takes its own share and gets everybody's answers.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from twinkle_core.device_mesh import DeviceMesh
from twinkle_core.errors import TrainingError
from twinkle_core.infra.dispatch import Collect, Dispatch, collect_results, split_arguments
from twinkle_core.infra.group import build_worker


class LocalGroup:
    """The worker of rank `rank` of `world_size`, in this process.

    `init_method` is torch's ('env://', 'tcp://host:port', 'file:///…') and is used when `world_size` > 1. `threads`
    sets torch's thread count for this whole process; None leaves it as it is.
    """

    def __init__(
        self,
        worker_class: str | type,
        *,
        rank: int = 0,
        world_size: int = 1,
        init_method: str = "env://",
        threads: int | None = None,
        device_mesh: DeviceMesh | None = None,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        if threads is not None:
            import torch

            torch.set_num_threads(threads)
        if world_size > 1:
            from twinkle_core.infra.process_group import join

            join(rank, world_size, init_method=init_method)
        self._mesh = device_mesh
        self._worker: Any = build_worker(worker_class, rank, world_size, device_mesh)

    def call(self, method: str, *args: Any, dispatch: Dispatch = "all", collect: Collect = "none") -> Any:
        share = split_arguments(args, dispatch, self.world_size, self._mesh)[self.rank]
        if self.world_size == 1:
            return collect_results([getattr(self._worker, method)(*share)], collect, self._mesh)
        return collect_results(self._call_and_gather(method, share), collect, self._mesh)

    def call_one(self, method: str, *args: Any) -> Any:
        return getattr(self._worker, method)(*args)

    def _call_and_gather(self, method: str, share: tuple[Any, ...]) -> Sequence[Any]:
        import torch.distributed as dist

        result, error = None, None
        try:
            result = getattr(self._worker, method)(*share)
        except Exception as caught:  # the edge of the worker: peers wait for this rank's answer and must hear of its error
            error = caught
        answers: list[Any] = [None] * self.world_size
        dist.all_gather_object(answers, (result, None if error is None else _sendable(error)))
        if error is not None:
            raise error
        for rank, (_, other) in enumerate(answers):
            if other is not None:
                other.add_note(f"raised by worker {rank} in {method}")
                raise other
        return [answer for answer, _ in answers]

    def shutdown(self) -> None:
        """Drops the worker. The process group stays: it belongs to the process."""
        self._worker = None


def _sendable(error: Exception) -> Exception:
    """The error, or its words where it cannot be sent: the other ranks would fail on it, or wait. What can be copied can be sent."""
    words = TrainingError(f"{type(error).__name__}: {error}")
    try:
        copy.deepcopy(error)
    except Exception:  # whatever a user's class raises there
        return words
    return words if "<locals>" in type(error).__qualname__ else error
