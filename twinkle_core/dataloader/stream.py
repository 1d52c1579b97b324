"""Steps over a data set that can only be read from its start on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice, repeat
from typing import Any, Protocol, runtime_checkable

from twinkle_core.dataloader.order import rank_slice
from twinkle_core.dataloader.steps import Place, Shape, Step
from twinkle_core.errors import ConfigError, DataError


@runtime_checkable
class Resumable(Protocol):
    """A stream that knows where it stands: `iter` goes on from the state loaded last, and begins anew after the end."""

    def __iter__(self) -> Iterator[Any]: ...

    def state_dict(self) -> dict[str, Any]:
        """After a row: the state from which the row after it comes first. Plain JSON."""
        ...

    def load_state_dict(self, state: Mapping[str, Any], /) -> None: ...


class StreamSteps:
    """Rows come in the stream's own order: `shuffle` and `seed` say nothing here.

    A stream without `state_dict` is gone back to by reading it again from its start. Each data rank reads all rows and keeps its own.
    """

    def __init__(self, dataset: Iterable[Any], shape: Shape) -> None:
        if shape.batch_size is None:
            raise ConfigError("max_tokens needs a data set with numbered rows, whose lengths are known; set batch_size for a stream")
        if isinstance(dataset, Iterator) and not isinstance(dataset, Resumable):
            raise ConfigError(
                f"the data set is a {type(dataset).__name__}, which can be read only once; pass something that `iter` begins anew"
            )
        self._dataset, self._shape, self._batch_size = dataset, shape, shape.batch_size
        self._start = Place(data=self._state())

    def start(self) -> Place:
        return self._start

    def count(self, place: Place) -> int:
        raise TypeError("a stream has no known number of steps")

    def epoch(self, place: Place) -> int:
        return place.number

    def next_pass(self, place: Place) -> Place:
        return place

    def steps(self, place: Place) -> Iterator[Callable[[], Step]]:
        batches = self._batches(place)

        def read() -> Step:
            after, rows = next(batches, (place, None))
            return after, rows if rows is None else rows[rank_slice(len(rows), self._shape.data_rank, self._shape.data_world_size)]

        return repeat(read)

    def reading(self, place: Place) -> AbstractContextManager[None]:
        return nullcontext()

    def at(self, consumed: int) -> Place:
        """Reads that many rows and drops them."""
        place, batches = self._start, self._batches(self._start)
        while place.consumed < consumed:
            place, rows = next(batches)
            if rows is None and self._shape.num_epochs:
                break
            if rows is None:
                batches = self._batches(place)
        if place.consumed != consumed:
            raise ConfigError(
                f"consumed_train_samples is {consumed}, but no batch of {self._batch_size} rows ends there (the stream was read "
                f"to {place.consumed}); resume with the batch size, data and epochs of the checkpoint"
            )
        return place

    def dump(self, place: Place) -> dict[str, Any]:
        return {"epoch": place.number, "rows": place.rows, "dataset": place.data}

    def load(self, consumed: int, state: Mapping[str, Any]) -> Place:
        if not state:
            return self.at(consumed)
        return Place(consumed=consumed, number=state["epoch"], rows=state["rows"], data=state["dataset"])

    def _batches(self, place: Place) -> Iterator[Step]:
        """The batches of the pass from `place` on; then, with None, the place where the next one starts."""
        num_epochs, rows = self._shape.num_epochs, self._rows_from(place)
        batch: list[Any] = []
        idle = not place.rows
        while not num_epochs or place.number < num_epochs:
            more = list(islice(rows, self._batch_size - len(batch)))
            batch += more
            place = Place(consumed=place.consumed, number=place.number, rows=place.rows + len(more), data=self._state())
            if len(batch) == self._batch_size:
                place = replace(place, consumed=place.consumed + len(batch))
                yield place, batch
                batch, idle = [], False
                continue
            if not place.rows:
                raise DataError("the stream has no rows, so there is nothing to train on")
            place = Place(consumed=place.consumed, number=place.number + 1, data=self._state())
            if not num_epochs:
                break
            rows = iter(self._dataset)
        if len(batch) >= self._shape.min_batch_size:
            place = replace(place, consumed=place.consumed + len(batch))
            yield place, batch
        elif batch and idle:
            raise ConfigError(f"no step would be taken: {len(batch)} rows are fewer than min_batch_size {self._shape.min_batch_size}")
        yield place, None

    def _rows_from(self, place: Place) -> Iterator[Any]:
        if isinstance(self._dataset, Resumable):
            if place.data is None:
                raise ConfigError("the state to resume from has no state of the data set; was it saved with another data set?")
            self._dataset.load_state_dict(place.data)
            return iter(self._dataset)
        return islice(self._dataset, place.rows, None)

    def _state(self) -> dict[str, Any] | None:
        return self._dataset.state_dict() if isinstance(self._dataset, Resumable) else None
