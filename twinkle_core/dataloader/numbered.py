"""Steps over a data set whose rows can be read by number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, runtime_checkable

import numpy as np

from twinkle_core.dataloader.batches import Batches, FixedBatches, Recent, TokenBatches
from twinkle_core.dataloader.order import permutation, rank_rows, rank_slice, token_batches, windowed_permutation
from twinkle_core.dataloader.steps import Place, Shape, Step
from twinkle_core.errors import ConfigError, DataError


class Rows(Protocol):
    """A data set: a number of rows, read by position."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@runtime_checkable
class ReadsAhead(Protocol):
    """A data set that wants to know which rows come next (`PackedDataset`)."""

    def reading(self, ahead: Iterable[np.ndarray]) -> AbstractContextManager[None]: ...


class NumberedSteps:
    """The order is arithmetic, so any place can be gone to at once."""

    def __init__(self, dataset: Rows, shape: Shape) -> None:
        if not len(dataset):
            raise DataError("the data set has no rows, so there is nothing to train on")
        self._dataset, self._shape = dataset, shape
        self._num_rows = len(dataset)
        self._shard_rows = getattr(dataset, "shard_rows", None) if shape.shuffle_shards else None
        self._order = Recent(self._order_of)
        if shape.max_tokens is not None:
            self._lengths = _lengths(dataset)
            self._token_batches = Recent(self._token_batches_of)
        self._passes = Recent(self._pass_of)
        if not len(self._passes(0)):
            raise ConfigError(f"no step would be taken: {self._num_rows} rows are fewer than min_batch_size {shape.min_batch_size}")

    def start(self) -> Place:
        return Place()

    def batches(self, place: Place) -> Batches:
        """All steps of the pass in which `place` is."""
        return self._passes(place.number)

    def count(self, place: Place) -> int:
        return len(self.batches(place))

    def epoch(self, place: Place) -> int:
        return place.consumed // (self._num_rows if self._shape.num_epochs else self.batches(place).num_samples)

    def next_pass(self, place: Place) -> Place:
        """The start of the next epoch where `place` is the end of one."""
        if self._shape.num_epochs is None and place.steps == self.count(place):
            return Place(consumed=place.consumed, number=place.number + 1)
        return place

    def steps(self, place: Place) -> Iterator[Callable[[], Step]]:
        batches = self.batches(place)
        before = place.number * batches.num_samples

        def read(step: int) -> Step:
            rows = batches.rows(step, step + 1)
            mine = rows[rank_slice(len(rows), self._shape.data_rank, self._shape.data_world_size)]
            after = Place(consumed=before + batches.consumed_after(step), number=place.number, steps=step + 1)
            return after, [self._dataset[row] for row in mine.tolist()]

        for step in range(place.steps, len(batches)):
            yield partial(read, step)
        end = Place(consumed=before + batches.num_samples, number=place.number, steps=len(batches))
        yield lambda: (self.next_pass(end), None)

    def reading(self, place: Place) -> AbstractContextManager[None]:
        """Tells the data set which rows this data rank reads from `place` to the end of the pass."""
        if not isinstance(self._dataset, ReadsAhead):
            return nullcontext()
        rank, world_size = self._shape.data_rank, self._shape.data_world_size
        return self._dataset.reading(rank_rows(rows, sizes, rank, world_size) for rows, sizes in self.batches(place).chunks(place.steps))

    def at(self, consumed: int) -> Place:
        size = self._passes(0).num_samples
        number, rest = divmod(consumed, size)
        if self._shape.num_epochs and consumed == size:
            number, rest = 0, size
        done = None if consumed < 0 or (self._shape.num_epochs and number) else self._passes(number).steps_done(rest)
        if done is None:
            raise ConfigError(
                f"consumed_train_samples is {consumed}, but this run of {size} rows {'' if self._shape.num_epochs else 'an epoch '}"
                f"in batches of {self._shape.batch_text} has no step that ends there; "
                f"resume with the batch size, data, seed and epochs of the checkpoint"
            )
        return Place(consumed=consumed, number=number, steps=done)

    def dump(self, place: Place) -> dict[str, Any]:
        return {}

    def load(self, consumed: int, state: Mapping[str, Any]) -> Place:
        return self.at(consumed)

    def _pass_of(self, number: int) -> Batches:
        shape = self._shape
        epochs = range(shape.num_epochs) if shape.num_epochs else range(number, number + 1)
        if shape.max_tokens is not None:
            return TokenBatches(self._token_batches, self._num_rows, epochs)
        assert shape.batch_size is not None
        return FixedBatches(self._order, self._num_rows, epochs, shape.batch_size, shape.min_batch_size)

    def _order_of(self, epoch: int) -> np.ndarray:
        if not self._shape.shuffle:
            return np.arange(self._num_rows, dtype=np.int64)
        if self._shard_rows is None or self._shape.shuffle_shards is None:
            return permutation(self._num_rows, self._shape.seed, epoch)
        return windowed_permutation(self._shard_rows, self._shape.seed, epoch, self._shape.shuffle_shards)

    def _token_batches_of(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        assert self._shape.max_tokens is not None
        return token_batches(self._lengths, self._shape.max_tokens, self._shape.seed, epoch, shuffle=self._shape.shuffle)


def _lengths(dataset: Rows) -> np.ndarray:
    """[N] int64 tokens of each row: as the data set tells (`num_tokens`), else by reading all rows."""
    known = getattr(dataset, "num_tokens", None)
    if known is not None:
        return np.asarray(known, dtype=np.int64)
    rows = (dataset[number] for number in range(len(dataset)))
    return np.array([len(row["input_ids"] if isinstance(row, Mapping) else row.input_ids) for row in rows], dtype=np.int64)
