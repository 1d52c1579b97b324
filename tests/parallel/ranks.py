"""Several processes over gloo for a test: forked from one server that has torch loaded, with a time limit that kills them."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

PRELOAD = ["torch", "torch.distributed.tensor", "torch.distributed.fsdp", "transformers", "peft", "tests.parallel.models"]
_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(PRELOAD)


class RankError(AssertionError):
    """A rank raised, died, or did not answer in time."""


def run_ranks(world_size: int, body: Callable[..., Any], folder: Path, *args: Any, limit_seconds: float = 60) -> list[Any]:
    """`body(rank, *args)` on each rank of a gloo group; the answers by rank. A rank that hangs fails the test at the limit."""
    meeting = folder / f"meeting-{time.monotonic_ns()}"
    pipes, processes = [], []
    for rank in range(world_size):
        ours, theirs = _CONTEXT.Pipe(duplex=False)
        process = _CONTEXT.Process(target=_rank, args=(rank, world_size, str(meeting), theirs, body, args), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    answers: dict[int, Any] = {}
    end = time.monotonic() + limit_seconds
    try:
        while len(answers) < world_size:
            open_pipes = [pipe for rank, pipe in enumerate(pipes) if rank not in answers]
            ready = wait(open_pipes, timeout=max(0.0, end - time.monotonic()))
            if not ready:
                raise RankError(f"ranks {sorted(set(range(world_size)) - answers.keys())} did not answer within {limit_seconds} s")
            for pipe in ready:
                rank = pipes.index(pipe)  # type: ignore[arg-type]
                try:
                    failed, answer = pipe.recv()  # type: ignore[union-attr]
                except EOFError:
                    raise RankError(f"rank {rank} died, exit code {processes[rank].exitcode}") from None
                if failed:
                    raise RankError(f"rank {rank} raised:\n{answer}")
                answers[rank] = answer
    finally:
        for process in processes:
            process.join(0 if len(answers) < world_size else 10)
            if process.is_alive():
                process.kill()
    return [answers[rank] for rank in range(world_size)]


def _rank(rank: int, world_size: int, meeting: str, answer: Any, body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    try:
        dist.init_process_group("gloo", init_method=f"file://{meeting}", rank=rank, world_size=world_size, timeout=timedelta(seconds=50))
        answer.send((False, body(rank, *args)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answer.send((True, traceback.format_exc()))
