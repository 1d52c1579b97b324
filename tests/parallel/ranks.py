"""Several processes over gloo for a test: kept between tests, with a process group of its own for each call and a limit in time."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PRELOAD = ["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "transformers", "peft", "tests.model.tiny_models"]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(PRELOAD)


class RankError(AssertionError):
    """A rank raised, died, or did not answer in time."""


class _Ranks:
    """Processes that wait for calls. After an error they are not used again: some may still wait for others."""

    def __init__(self, world_size: int) -> None:
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(world_size):
            ours, theirs = _CONTEXT.Pipe()
            process = _CONTEXT.Process(target=_serve, args=(rank, world_size, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)
        self.started = [pipe.recv() for pipe in self.pipes]
        """Nothing is timed before all are up: that takes long on a busy machine."""

    def call(self, call: tuple[Any, ...], limit_seconds: float) -> list[Any]:
        for pipe in self.pipes:
            pipe.send(call)
        answers: dict[int, Any] = {}
        end = time.monotonic() + limit_seconds
        while len(answers) < len(self.pipes):
            waited_for = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            ready = wait(waited_for, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                late = sorted(set(range(len(self.pipes))) - answers.keys())
                raise RankError(f"ranks {late} did not answer within {limit_seconds} s")
            for pipe in ready:
                rank = self.pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    failed, answer = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    self.processes[rank].join(5)
                    raise RankError(f"rank {rank} died, exit code {self.processes[rank].exitcode}") from None
                if failed:
                    raise RankError(f"rank {rank} raised:\n{answer}")
                answers[rank] = answer
        return [answers[rank] for rank in range(len(self.pipes))]

    def kill(self) -> None:
        for process, pipe in zip(self.processes, self.pipes, strict=True):
            process.kill()
            process.join(5)
            pipe.close()


_KEPT: dict[int, _Ranks] = {}


@atexit.register
def end_ranks() -> None:
    while _KEPT:
        _KEPT.popitem()[1].kill()


def run_ranks(world_size: int, body: Callable[..., Any], folder: Path, *args: Any, limit_seconds: float = 60) -> list[Any]:
    """`body(rank, *args)` on each rank of a gloo group; the answers by rank. A rank that hangs fails the test at the limit."""
    ranks = _KEPT.pop(world_size, None) or _Ranks(world_size)
    meeting = str(folder / f"meeting-{time.monotonic_ns()}")
    try:
        answers = ranks.call((meeting, body, args), limit_seconds)
    except BaseException:
        ranks.kill()
        raise
    _KEPT[world_size] = ranks
    return answers


def _serve(rank: int, world_size: int, calls: Connection) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    calls.send(rank)
    while True:
        try:
            meeting, body, args = calls.recv()
            torch.manual_seed(0)
            dist.init_process_group(
                "gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size, timeout=timedelta(seconds=50)
            )
            answer = body(rank, *args)
            gc.collect()
            dist.barrier()
            dist.destroy_process_group()
        except EOFError:
            return
        except BaseException:
            calls.send((True, traceback.format_exc()))
        else:
            calls.send((False, answer))
