"""Reading ahead in threads, processors, and errors in their places."""

from __future__ import annotations

import threading
import time

import pytest

from tests.dataloader.resuming import Rows, Stream, numbers
from twinkle_core.dataloader import DataLoader
from twinkle_core.errors import ConfigError
from twinkle_core.types import EncodedSample


class Noted(Rows):
    """Notes which rows were read, and fails at one."""

    def __init__(self, size: int, bad: int | None = None) -> None:
        super().__init__(size)
        self.bad, self.read, self.at_a_time, self.most = bad, [], 0, 0
        self._lock = threading.Lock()

    def __getitem__(self, index: int) -> EncodedSample:
        with self._lock:
            self.at_a_time += 1
            self.most = max(self.most, self.at_a_time)
        time.sleep(0.002)
        with self._lock:
            self.at_a_time -= 1
            self.read.append(index)
        if index == self.bad:
            raise ValueError(f"row {index} is bad")
        return super().__getitem__(index)


@pytest.mark.parametrize("workers", [0, 1, 3])
def test_an_error_comes_in_the_place_of_its_batch(workers: int) -> None:
    loader = DataLoader(Noted(20, bad=13), batch_size=2, shuffle=False, num_workers=workers)
    batches = iter(loader)
    assert [row for _ in range(6) for row in numbers(next(batches))] == list(range(12))
    with pytest.raises(ValueError, match="row 13 is bad"):
        next(batches)
    assert loader.get_state() == {"consumed_train_samples": 12}
    with pytest.raises(ValueError, match="row 13 is bad"):
        next(iter(loader))


def test_so_many_threads_read_and_so_many_batches_ahead() -> None:
    rows = Noted(60)
    batches = iter(DataLoader(rows, batch_size=2, num_workers=3, prefetch_factor=2))
    next(batches)
    end = time.monotonic() + 5
    while len(rows.read) < 14 and time.monotonic() < end:
        time.sleep(0.001)
    time.sleep(0.05)
    assert len(rows.read) == 14  # the batch in hand and 3 * 2 more
    assert rows.most == 3


@pytest.mark.parametrize("dataset", [Rows(30), Stream(30)])
def test_a_loop_that_is_left_leaves_no_thread(dataset: Rows | Stream) -> None:
    before = threading.active_count()
    loader = DataLoader(dataset, batch_size=2, num_workers=3)
    for _ in loader:
        assert threading.active_count() > before
        break
    assert threading.active_count() == before
    batches = iter(loader)
    next(batches)
    del batches
    assert threading.active_count() == before


class Sum:
    def collate(self, rows: list[EncodedSample]) -> int:
        return sum(numbers(rows))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_processor_makes_the_batch(workers: int) -> None:
    loader = DataLoader(Rows(5), batch_size=2, shuffle=False, num_epochs=1, num_workers=workers, data_rank=1, data_world_size=2)
    loader.set_processor(numbers)
    assert list(loader) == [[1], [3], []]
    for processor in (Sum, Sum()):
        loader = DataLoader(Rows(5), batch_size=2, shuffle=False, num_epochs=1, num_workers=workers)
        loader.set_processor(processor)
        assert list(loader) == [1, 5, 4]
    with pytest.raises(ConfigError, match="'InputProcessor' is and has none"):
        loader.set_processor("InputProcessor")
