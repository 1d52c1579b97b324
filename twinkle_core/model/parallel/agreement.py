"""What all ranks tell each other before any of them goes on. Imports torch.

An error on one rank would leave the others waiting for it in their next exchange until that times out.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from twinkle_core.errors import TrainingError, TwinkleError


def from_all(value: Any, world_size: int) -> list[Any]:
    """Collective. The values of all ranks, by rank."""
    if world_size == 1:
        return [value]
    answers: list[Any] = [None] * world_size
    dist.all_gather_object(answers, value)
    return answers


@contextmanager
def together(world_size: int) -> Iterator[None]:
    """Collective. What is raised inside on any rank is raised on every rank at the end, once all are there: a rank's own error, or that
    of the lowest rank that has one.

    Nothing inside may wait for another rank.
    """
    error: Exception | None = None
    try:
        yield
    except Exception as caught:  # the edge of a rank: its peers must hear of it
        if world_size == 1:
            raise
        error = caught
    for rank, other in enumerate(from_all(portable(error), world_size)):
        if other is not None:
            if error is not None:
                raise error
            other.add_note(f"raised on rank {rank}")
            raise other


def portable(error: Exception | None) -> Exception | None:
    """An error that can be sent: itself, or its words where it may not survive being pickled."""
    if error is None or isinstance(error, (TwinkleError, OSError)):
        return error
    return TrainingError(f"{type(error).__name__}: {error}")
