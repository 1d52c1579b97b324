"""Batches of rows whose order is arithmetic: optimizer step k takes positions [k*B, (k+1)*B) of all epochs laid end to end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol

import numpy as np

from twinkle_core.dataloader.order import permutation
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.types import EncodedSample, PackedRow

Row = PackedRow | EncodedSample


class Rows(Protocol):
    """A data set: a number of rows, read by position."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Row: ...


class DataLoader:
    """Iterates over lists of rows, one list per optimizer step, from its cursor on.

    A batch may reach over the end of an epoch; only the very last one may be short, and it is kept. `batch_size` is that
    of the whole job, whatever the number of workers. The cursor, `consumed_train_samples`, counts the batch in hand: what
    `get_state` gives in the loop body after the optimizer step is what a resumed run has to start from.

    Example: 10 rows, batch_size 4 and 2 epochs are 5 steps; step 2 takes the last 2 rows of epoch 0 and the first 2 of epoch 1.
    """

    def __init__(self, dataset: Rows, *, batch_size: int, shuffle: bool = True, seed: int = 42, num_epochs: int = 1) -> None:
        if not len(dataset):
            raise DataError("the data set has no rows, so there is nothing to train on")
        for name, value, least in (("batch_size", batch_size, 1), ("num_epochs", num_epochs, 1), ("seed", seed, 0)):
            if value < least:
                raise ConfigError(f"{name} is {value}, but must be at least {least}")
        self.dataset, self.batch_size, self.shuffle, self.seed, self.num_epochs = dataset, batch_size, shuffle, seed, num_epochs
        self.num_samples = len(dataset) * num_epochs
        """Rows of all epochs together."""
        self._consumed = 0
        self._ended = False
        self._orders: dict[int, np.ndarray] = {}

    def __len__(self) -> int:
        """Optimizer steps of the whole run, wherever the cursor is."""
        return -(-self.num_samples // self.batch_size)

    def rows_at(self, step: int) -> np.ndarray:
        """[B] int64 row numbers of optimizer step `step` (fewer in the last). Depends on nothing but the arguments."""
        if not 0 <= step < len(self):
            raise IndexError(f"step {step} of {len(self)}")
        positions = np.arange(step * self.batch_size, self.consumed_after(step))
        epochs, places = np.divmod(positions, len(self.dataset))
        return np.concatenate([self._order(int(epoch))[places[epochs == epoch]] for epoch in np.unique(epochs)])

    def consumed_after(self, step: int) -> int:
        """The cursor once optimizer step `step` is done."""
        return min((step + 1) * self.batch_size, self.num_samples)

    def __iter__(self) -> Iterator[list[Row]]:
        if self._ended:
            raise ConfigError(
                f"all {len(self)} steps of this loader were handed out; set num_epochs for more passes, or call resume_from_checkpoint(0)"
            )
        return self._batches()

    def _batches(self) -> Iterator[list[Row]]:
        for step in range(-(-self._consumed // self.batch_size), len(self)):
            self._consumed = self.consumed_after(step)
            yield [self.dataset[int(row)] for row in self.rows_at(step)]
        self._ended = True

    def get_state(self) -> dict[str, int]:
        """`{'consumed_train_samples': rows handed out, the batch in hand included}`: what `resume_from_checkpoint` takes."""
        return {"consumed_train_samples": self._consumed}

    def resume_from_checkpoint(self, consumed_train_samples: int) -> None:
        """Puts the cursor there; at the end of the run the next loop has no steps.

        Raises `ConfigError` for a number that no step of this loader ends at (another batch size, more than there is).
        """
        consumed = consumed_train_samples
        if not 0 <= consumed <= self.num_samples or (consumed % self.batch_size and consumed != self.num_samples):
            raise ConfigError(
                f"consumed_train_samples is {consumed}, but this run of {self.num_samples} rows in batches of {self.batch_size} stops "
                f"only at multiples of {self.batch_size} and at its end; resume with the batch size, data and epochs of the checkpoint"
            )
        self._consumed, self._ended = consumed, False

    def skip_consumed_samples(self, consumed_train_samples: int) -> None:
        """Twinkle's other name for `resume_from_checkpoint`: counts from the start of the run, not from the cursor."""
        self.resume_from_checkpoint(consumed_train_samples)

    def _order(self, epoch: int) -> np.ndarray:
        if epoch not in self._orders:
            if len(self._orders) > 1:  # a batch rarely spans more than two epochs
                del self._orders[next(iter(self._orders))]
            n = len(self.dataset)
            self._orders[epoch] = permutation(n, self.seed, epoch) if self.shuffle else np.arange(n, dtype=np.int64)
        return self._orders[epoch]
