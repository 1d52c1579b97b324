"""Which rows each optimizer step takes, and where the cursor stands after it, for data sets whose rows can be numbered."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

import numpy as np

T = TypeVar("T")

Epoch = tuple[np.ndarray, np.ndarray]
"""Rows [N] of an epoch in order, and where in that order each batch ends [K]."""

_CHUNK_ROWS = 1 << 18


class Batches(ABC):
    """The steps of one pass: `epochs` (`range(3)`: three) laid end to end."""

    epochs: range
    num_samples: int
    """Rows handed out in the pass."""

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def rows(self, first: int, last: int) -> np.ndarray:
        """[R] int64 rows of the steps [first, last), end to end."""

    @abstractmethod
    def consumed_after(self, step: int) -> int:
        """Rows handed out in the pass once `step` is done."""

    @abstractmethod
    def steps_done(self, consumed: int) -> int | None:
        """How many steps hand out so many rows; None when no step ends there."""

    def sizes(self, first: int, last: int) -> np.ndarray:
        """[last - first] int64 rows of each step."""
        return np.diff([self.consumed_after(step) for step in range(first - 1, last)])

    def chunks(self, first: int) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(rows, sizes) of the steps from `first` on, many at a time."""
        steps = max(1, _CHUNK_ROWS * len(self) // self.num_samples)
        for at in range(first, len(self), steps):
            last = min(at + steps, len(self))
            yield self.rows(at, last), self.sizes(at, last)


class FixedBatches(Batches):
    """Step k takes positions [k*B, (k+1)*B) of the epochs laid end to end: a batch may reach over the end of an epoch.

    The last one of the pass may be short; with fewer rows than `min_batch_size` it is left out.
    """

    def __init__(self, order: Callable[[int], np.ndarray], num_rows: int, epochs: range, batch_size: int, min_batch_size: int) -> None:
        self._order, self._num_rows, self.epochs, self._batch_size = order, num_rows, epochs, batch_size
        total = num_rows * len(epochs)
        tail = total % batch_size
        self.num_samples = total - tail if tail < min_batch_size else total

    def __len__(self) -> int:
        return -(-self.num_samples // self._batch_size)

    def rows(self, first: int, last: int) -> np.ndarray:
        positions = np.arange(first * self._batch_size, self.consumed_after(last - 1))
        epochs, places = np.divmod(positions, self._num_rows)
        return np.concatenate([self._order(self.epochs[epoch])[places[epochs == epoch]] for epoch in np.unique(epochs)])

    def consumed_after(self, step: int) -> int:
        return min((step + 1) * self._batch_size, self.num_samples)

    def steps_done(self, consumed: int) -> int | None:
        return -(-consumed // self._batch_size) if consumed % self._batch_size == 0 or consumed == self.num_samples else None


class TokenBatches(Batches):
    """Batches that `batches_of` cuts each epoch into; none reaches over the end of one."""

    def __init__(self, batches_of: Callable[[int], Epoch], num_rows: int, epochs: range) -> None:
        self._batches_of, self._num_rows, self.epochs = batches_of, num_rows, epochs
        self.num_samples = num_rows * len(epochs)
        self._steps = [0, *np.cumsum([len(batches_of(epoch)[1]) for epoch in epochs]).tolist()]

    def __len__(self) -> int:
        return int(self._steps[-1])

    def rows(self, first: int, last: int) -> np.ndarray:
        start, end = self.consumed_after(first - 1), self.consumed_after(last - 1)
        parts = []
        for number in range(start // self._num_rows, -(-end // self._num_rows)):
            offset = number * self._num_rows
            parts.append(self._batches_of(self.epochs[number])[0][max(start - offset, 0) : end - offset])
        return np.concatenate(parts)

    def consumed_after(self, step: int) -> int:
        if step < 0:
            return 0
        number = int(np.searchsorted(self._steps, step, side="right")) - 1
        ends = self._batches_of(self.epochs[number])[1]
        return number * self._num_rows + int(ends[step - self._steps[number]])

    def steps_done(self, consumed: int) -> int | None:
        number, rest = divmod(consumed, self._num_rows)
        if not rest:
            return int(self._steps[number])
        ends = self._batches_of(self.epochs[number])[1]
        at = int(np.searchsorted(ends, rest))
        return int(self._steps[number]) + at + 1 if ends[at] == rest else None


class Recent(Generic[T]):
    """Keeps the results of a function of an epoch for the last two: a batch rarely spans more. Safe from several threads."""

    def __init__(self, function: Callable[[int], T]) -> None:
        self._function = function
        self._found: dict[int, T] = {}
        self._lock = threading.Lock()

    def __call__(self, epoch: int) -> T:
        with self._lock:
            if epoch not in self._found:
                found = self._function(epoch)
                while len(self._found) > 1:
                    del self._found[next(iter(self._found))]
                self._found[epoch] = found
            return self._found[epoch]
