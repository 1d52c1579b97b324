"""The law of every loader: stop anywhere, go on from the saved state, and nothing differs from a run that never stopped."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np

from twinkle_core.dataloader import DataLoader
from twinkle_core.types import EncodedSample

Taken = tuple[int, list[int]]
"""The cursor with a batch in hand, and the rows of the batch."""


class Rows:
    """Row i holds the token i; `lengths` says how often."""

    def __init__(self, size: int, lengths: list[int] | None = None, shard_rows: list[int] | None = None) -> None:
        self.lengths = np.array(lengths or [1] * size)
        if shard_rows is not None:
            self.shard_rows = shard_rows

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> EncodedSample:
        ids = np.full(self.lengths[index], index)
        return EncodedSample(input_ids=ids, labels=np.full(len(ids), -100))


class Stream:
    """The rows 0..N-1 in order, another order each time it is read; knows where it stands."""

    def __init__(self, size: int) -> None:
        self._size, self._epoch, self._at = size, 0, 0

    def __iter__(self) -> Iterator[EncodedSample]:
        while self._at < self._size:
            row = (self._at * (self._epoch + 1) + self._epoch) % self._size if self._size % (self._epoch + 1) else self._at
            self._at += 1
            yield Rows(self._size)[row]
        self._epoch, self._at = self._epoch + 1, 0

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "at": self._at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._epoch, self._at = state["epoch"], state["at"]


class Plain:
    """Can only be read from its start."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[EncodedSample]:
        return (Rows(self.size)[row] for row in range(self.size))


def numbers(batch: list[Any]) -> list[int]:
    """Something of each row by which it is known."""
    return [int(row["input_ids"].sum() if isinstance(row, dict) else row.input_ids[0]) for row in batch]


def taken(loader: DataLoader, epochs: int | None = None) -> Iterator[Taken]:
    """All that is left of the run; of `epochs` epochs, where the loader has no end of its own."""
    for _ in range(loader.epoch, epochs) if epochs else range(1):
        for batch in loader:
            yield loader.get_state()["consumed_train_samples"], numbers(batch)


def by_state(loader: DataLoader, resumed: DataLoader) -> None:
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))


def by_count(loader: DataLoader, resumed: DataLoader) -> None:
    resumed.resume_from_checkpoint(**loader.get_state())


def assert_stopping_anywhere_changes_nothing(make: Callable[[], DataLoader], epochs: int | None = None) -> list[Taken]:
    """What an uninterrupted run takes, after runs that stopped after each step, and then once more half-way through the rest."""
    threads = threading.active_count()
    whole = list(taken(make(), epochs))
    for resume in (by_state, by_count):
        for stop in range(len(whole) + 1):
            first, second, third = make(), make(), make()
            before = list(islice(taken(first, epochs), stop))
            resume(first, second)
            between = list(islice(taken(second, epochs), (len(whole) - stop) // 2))
            resume(second, third)
            assert before + between + list(taken(third, epochs)) == whole
    assert threading.active_count() == threads
    return whole
