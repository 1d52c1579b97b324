"""Batches of rows whose order is arithmetic: optimizer step k takes positions [k*B, (k+1)*B) of all epochs laid end to end."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import closing
from operator import index as as_index
from typing import Any

import numpy as np

from twinkle_core.dataloader.numbered import NumberedSteps, Rows
from twinkle_core.dataloader.read_ahead import read_ahead
from twinkle_core.dataloader.steps import Place, Shape, Step
from twinkle_core.dataloader.stream import StreamSteps
from twinkle_core.errors import ConfigError

Dataset = Rows | Iterable[Any]


class DataLoader:
    """Iterates over lists of rows, one list per optimizer step, from its cursor on.

    The cursor, `consumed_train_samples`, counts the batch in hand and none that was read ahead: what `get_state` gives in the
    loop body after the optimizer step is what a resumed run has to start from. It counts rows of all epochs and data ranks.

    With `num_epochs` one loop is the whole run, its epochs laid end to end: a batch of `batch_size` may reach over the end of an
    epoch. Without, each loop is one epoch, or what is left of the one that the cursor is in:
    `for epoch in range(loader.epoch, 3): for batch in loader: ...` goes on where a resumed run stopped.

    Example: 10 rows, batch_size 4 and num_epochs 2 are 5 steps; step 2 takes the last 2 rows of epoch 0 and the first 2 of epoch 1.

    Args:
        dataset: rows with `len` and `[i]`, a stream with `iter` (and `state_dict`, `load_state_dict`, to resume without reading it
            again), or a function that returns one of these.
        batch_size: rows of a batch, over all data ranks.
        max_tokens: instead of `batch_size`, the most tokens of a batch, over all data ranks: rows of like length are put together
            (see `token_batches`), and no batch reaches over the end of an epoch.
        shuffle, seed: a new order for each epoch, drawn from (seed, epoch); a stream comes in its own order.
        shuffle_shards: shuffle among so many shards at a time, where the data set has shards (see `windowed_permutation`).
        num_epochs: see above.
        num_workers: threads that read ahead and apply the processor; a stream is read by one. Never changes what comes.
        prefetch_factor: batches read ahead by each thread.
        data_rank, data_world_size: this rank gets its slice of every batch (see `rank_slice`), [] where a short batch has too few rows.
        min_batch_size: a last batch (of the run, or of each epoch) with fewer rows is left out; None keeps it.
        drop_last: the same as `min_batch_size=batch_size`.
    """

    def __init__(
        self,
        dataset: Dataset | Callable[[], Dataset],
        *,
        batch_size: int | None = None,
        max_tokens: int | None = None,
        shuffle: bool = True,
        seed: int = 42,
        shuffle_shards: int | None = None,
        num_epochs: int | None = None,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        data_rank: int = 0,
        data_world_size: int = 1,
        min_batch_size: int | None = None,
        drop_last: bool = False,
    ) -> None:
        for name, value, least in (("num_workers", num_workers, 0), ("prefetch_factor", prefetch_factor, 1)):
            if value < least:
                raise ConfigError(f"{name} is {value}, but must be at least {least}")
        if drop_last and min_batch_size is not None:
            raise ConfigError(f"drop_last means min_batch_size = batch_size; set one of them, not both (min_batch_size={min_batch_size})")
        shape = Shape(
            batch_size=batch_size,
            max_tokens=max_tokens,
            min_batch_size=(batch_size or 2) if drop_last else 1 if min_batch_size is None else min_batch_size,
            shuffle=shuffle,
            shuffle_shards=shuffle_shards,
            seed=seed,
            num_epochs=num_epochs,
            data_rank=data_rank,
            data_world_size=data_world_size,
        )
        self.dataset: Any = _made(dataset)
        self.batch_size, self.num_epochs = batch_size, num_epochs
        has_numbers = hasattr(self.dataset, "__len__") and hasattr(self.dataset, "__getitem__")
        self._steps = NumberedSteps(self.dataset, shape) if has_numbers else StreamSteps(self.dataset, shape)
        self._num_threads = num_workers if has_numbers else min(num_workers, 1)
        self._depth = num_workers * prefetch_factor
        self._process: Callable[[list[Any]], Any] | None = None
        self._place = self._steps.start()
        self._loop: object = None
        self._ended = False

    def __len__(self) -> int:
        """Steps of the whole run, or of the epoch that the cursor is in; wherever the cursor is. `TypeError` for a stream."""
        return self._steps.count(self._place)

    @property
    def remaining(self) -> int:
        """Steps of the run, or of the epoch, that are still to come. `TypeError` for a stream."""
        return len(self) - self._place.steps

    @property
    def epoch(self) -> int:
        """Epochs that are over, from 0. A stream's counts once its end was seen."""
        return self._steps.epoch(self._place)

    def set_processor(self, processor: Any) -> None:
        """What makes a batch of the list of rows: a function, or an object or class with `collate`, not applied to []."""
        if isinstance(processor, type):
            processor = processor()
        self._process = getattr(processor, "collate", processor)
        if not callable(self._process):
            raise ConfigError(f"a processor is a function or has a method collate, but {processor!r} is and has none")

    def rows_at(self, step: int) -> np.ndarray:
        """[B] int64 row numbers of a step of the run, or of the epoch that the cursor is in, over all data ranks."""
        batches = self._numbered().batches(self._place)
        if not 0 <= step < len(batches):
            raise IndexError(f"step {step} of {len(batches)}")
        return batches.rows(step, step + 1)

    def consumed_after(self, step: int) -> int:
        """Rows that the run, or the epoch that the cursor is in, has handed out once that step is done."""
        return self._numbered().batches(self._place).consumed_after(step)

    def __iter__(self) -> Generator[Any, None, None]:
        if self._ended:
            raise ConfigError(
                f"all {self._place.consumed} rows of this loader were handed out; set num_epochs for more passes, "
                f"or call resume_from_checkpoint(0)"
            )
        self._loop = loop = object()
        return self._batches(loop)

    def _batches(self, loop: object) -> Generator[Any, None, None]:
        self._check(loop)
        start = self._steps.next_pass(self._place)
        tasks = (self._processed(read) for read in self._steps.steps(start))
        with self._steps.reading(start), closing(read_ahead(tasks, self._num_threads, self._depth)) as results:
            for place, batch in results:
                self._check(loop)
                self._place = place
                if batch is None:
                    break
                yield batch
        self._ended = self.num_epochs is not None

    def _processed(self, read: Callable[[], Step]) -> Callable[[], tuple[Place, Any]]:
        def task() -> tuple[Place, Any]:
            place, rows = read()
            return place, self._process(rows) if self._process is not None and rows else rows

        return task

    def _check(self, loop: object) -> None:
        if self._loop is not loop:
            raise ConfigError("this loop over the loader has ended: another one was begun, or the cursor was set, since")

    def get_state(self) -> dict[str, int]:
        """`{'consumed_train_samples': rows handed out, the batch in hand included}`: what `resume_from_checkpoint` takes."""
        return {"consumed_train_samples": self._place.consumed}

    def state_dict(self) -> dict[str, Any]:
        """`get_state`, and of a stream also where it stands. Plain JSON if the stream's own state is."""
        return {**self.get_state(), **self._steps.dump(self._place)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Puts the cursor where `state_dict` was called. Raises `ConfigError` for a state that is not one of such a loader."""
        known = {"consumed_train_samples", *self._steps.dump(self._place)}
        if set(state) not in (known, {"consumed_train_samples"}):
            raise ConfigError(f"the state of this loader has the keys {sorted(known)}, not {sorted(state)}")
        rest = {name: value for name, value in state.items() if name != "consumed_train_samples"}
        self._move(self._steps.load(_whole(state["consumed_train_samples"]), rest))

    def resume_from_checkpoint(self, consumed_train_samples: int) -> None:
        """Puts the cursor there; at the end of the run the next loop has no steps. A stream is read up to there.

        Raises `ConfigError` for a number that no step of this loader ends at (another batch size, more than there is).
        """
        self._move(self._steps.at(_whole(consumed_train_samples)))

    def skip_consumed_samples(self, consumed_train_samples: int) -> None:
        """Twinkle's other name for `resume_from_checkpoint`: counts from the start of the run, not from the cursor."""
        self.resume_from_checkpoint(consumed_train_samples)

    def _move(self, place: Place) -> None:
        self._place, self._ended, self._loop = place, False, None

    def _numbered(self) -> NumberedSteps:
        if not isinstance(self._steps, NumberedSteps):
            raise TypeError("the rows of a stream have no numbers")
        return self._steps


def _whole(consumed: Any) -> int:
    try:
        return as_index(consumed)
    except TypeError:
        raise ConfigError(f"consumed_train_samples is a whole number, got {consumed!r}") from None


def _made(dataset: Any) -> Any:
    """The data set, made by the function if it is one."""
    if callable(dataset) and (isinstance(dataset, type) or not hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__")):
        dataset = dataset()
    if not hasattr(dataset, "__iter__") and not hasattr(dataset, "__getitem__"):
        raise ConfigError(f"a data set has rows by number or can be iterated over, but {type(dataset).__name__} is neither")
    return dataset
