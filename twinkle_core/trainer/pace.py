"""How fast a loop goes, measured from one reading of its numbers to the next: a reading waits for the device, a step does not."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")

READ_SECONDS = 1.0
"""A loop reads its numbers about so often: each step of a slow run is shown as it is done, and a fast one is not held up."""


class Pace:
    """A clock beside a loop."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._read_at = clock()
        self._waited = 0.0

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Those of the loader; the time that it keeps the loop waiting is counted."""
        source = iter(loader)
        while True:
            began = self._clock()
            try:
                batch = next(source)
            except StopIteration:
                return
            finally:
                self._waited += self._clock() - began
            yield batch

    @property
    def is_time(self) -> bool:
        """The last reading is `READ_SECONDS` ago."""
        return self._clock() - self._read_at >= READ_SECONDS

    def read(self, num_tokens: int) -> dict[str, float]:
        """Once the numbers of steps over `num_tokens` tokens were read: tokens per second since the last reading, all of the
        loop's work counted, and the share of that time that it waited for the loader."""
        now = self._clock()
        seconds = now - self._read_at
        speed = {"tokens_per_second": num_tokens / seconds, "loader_wait": self._waited / seconds}
        self._read_at, self._waited = now, 0.0
        return speed
