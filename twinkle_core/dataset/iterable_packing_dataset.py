"""The stream whose items are packed rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from twinkle_core.dataset.columns import packed_row
from twinkle_core.dataset.input_feature import InputFeature, input_feature
from twinkle_core.dataset.iterable_dataset import IterableDataset, Position
from twinkle_core.dataset.meta import DatasetMeta, Row
from twinkle_core.errors import ConfigError, DataError

Sample = tuple[tuple[int, int, int], Any]
"""Origin of a sample, as `StreamItem` has it, and the sample."""


class IterablePackingDataset(IterableDataset):
    """Packs the samples of an `IterableDataset` as they come, a window of `packing_interval` at a time, into rows of `max_length` tokens.

    What would leave a row too empty is carried into the next window, but not past the end of a pass: each pass holds each sample
    once. `cyclic` lays passes end to end without end. `packing_num_proc` is Twinkle's: packing takes no process of its own.
    Memory holds a window and what was carried into it.
    """

    def __init__(
        self,
        dataset_meta: DatasetMeta | None = None,
        packing_interval: int = 128,
        packing_num_proc: int = 1,
        cyclic: bool = False,
        *,
        cache_dir: Path | str | None = None,
    ) -> None:
        for name, value in (("packing_interval", packing_interval), ("packing_num_proc", packing_num_proc)):
            if value < 1:
                raise ConfigError(f"{name} is {value}, but must be at least 1")
        self.packing_interval, self.cyclic = packing_interval, cyclic
        self._packs = False
        self._window: dict[str, Any] = {}
        self._rows_done = 0
        super().__init__(dataset_meta, cache_dir=cache_dir)

    def pack_dataset(self) -> None:
        """Items are packed rows from here on. Call it after `encode`."""
        if self._encoder is None:
            raise ConfigError("pack_dataset comes after encode")
        if self._encoder.prompts:
            raise ConfigError("prompts are to be answered one by one and are not packed: use IterableDataset")
        self._packs = True

    def __iter__(self) -> Iterator[Row | InputFeature]:
        if self._encoder is not None and not self._packs:
            raise ConfigError("call pack_dataset after encode; IterableDataset gives the samples one by one")
        return super().__iter__()

    def _state(self) -> dict[str, Any]:
        """The start of the window in hand, with the samples carried into it, and how many of its rows were handed out."""
        return {**self._window, "rows_done": self._rows_done} if self._packs else self._window_at(self._position, [])

    def _beginning(self) -> dict[str, Any]:
        return {**super()._beginning(), "carried": [], "rows_done": 0}

    def _window_at(self, position: Position, carried: list[Sample]) -> dict[str, Any]:
        return {**self._plain(position, self._reports), "carried": [list(origin) for origin, _ in carried], "rows_done": 0}

    def _restore(self, state: Mapping[str, Any]) -> None:
        super()._restore(state)
        self._window, self._rows_done = dict(state), state["rows_done"]

    def _pass(self, iteration: object) -> Iterator[Row | InputFeature]:
        if not self._packs:
            yield from super()._pass(iteration)
            return
        while True:
            yield from self._packed_rows(iteration)
            self._next = self._beginning()
            if not self.cyclic:
                return
            if not any(report.samples for report in self._reports):
                raise DataError(f"a pass over the rows gave no sample, so cyclic passes would never give one: {self.report}")
            self._restore(self._next)
            self._next = None

    def _packed_rows(self, iteration: object) -> Iterator[InputFeature]:
        """The rows from the place in hand to the end of the pass."""
        window = self._reload(self._window["carried"])
        items = self._items(self._position)
        position, is_last = self._position, False
        while not is_last:
            num_new = 0
            for item in items:
                position = item.after
                if item.content is not None:
                    window.append((item.origin, item.content))
                    num_new += 1
                if num_new == self.packing_interval:
                    break
            is_last = num_new < self.packing_interval
            rows, carried = self._pack([len(sample.input_ids) for _, sample in window], is_last)
            after = self._window_at(position, [window[number] for number in carried])
            for number, row in enumerate(rows[self._rows_done :], start=self._rows_done + 1):
                self._check_latest(iteration)
                self._window, self._rows_done = (self._window, number) if number < len(rows) else (after, 0)
                yield input_feature(packed_row([window[at][1] for at in row], row))
            self._window, self._rows_done = after, 0
            window = [window[number] for number in carried]

    def _pack(self, lengths: list[int], is_last: bool) -> tuple[Sequence[np.ndarray], Sequence[int]]:
        """Rows of a window as numbers of its samples, and the samples that are carried into the next."""
        from twinkle_core.packing import pack_window

        plan, carried = pack_window(np.array(lengths, dtype=np.int64), self.template.config.max_length, is_last=is_last)  # type: ignore[union-attr]
        return list(plan), carried.tolist()

    def _reload(self, origins: list[list[int]]) -> list[Sample]:
        """The samples that were carried, encoded again."""
        encoder = self._encoder
        assert encoder is not None
        found = self._stream().rows_at({(source, row) for source, row, _ in origins})
        encoded = {place: next(encoder.encode([row])).samples for place, row in found.items()}
        window = []
        for source, row, number in origins:
            samples = encoded[source, row]
            if number >= len(samples):
                raise DataError(
                    f"{found[source, row].where} gives {len(samples)} samples and gave more before: data or template have changed"
                )
            window.append(((source, row, number), samples[number]))
        return window
