"""The shards of a remote store, fetched whole into a `ShardCache` as they are needed, and ahead of that where the order is known."""

from __future__ import annotations

import errno
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, BinaryIO

import numpy as np

from storage.artifact import FileEntry
from storage.store import Store
from twinkle_core.errors import TwinkleError
from twinkle_core.sharding.cache import ShardCache
from twinkle_core.sharding.columns import ListColumns

FETCHES = 4
"""Shards fetched at a time."""

WAITS_FOR_ROOM = (0.0, 0.05, 0.2, 1.0)
"""Seconds after which a full disk is tried again, each time with all that is open here closed."""

AHEAD_ROWS = 1 << 20
"""Rows announced and not yet read from which on no more are announced: bounds the memory of looking ahead."""


class StoredShards:
    """Shard files of one table, opened when one of their rows is asked for; those open take at most the cache's `max_bytes`.

    `rows` tells how many rows each file has. Safe to read from several threads.
    """

    def __init__(
        self, store: Store, prefix: str, files: Sequence[FileEntry], rows: Sequence[int], cache: ShardCache, names: tuple[str, ...]
    ) -> None:
        self._store, self._prefix, self._files, self.cache, self._names = store, prefix, files, cache, names
        self._starts = np.concatenate([[0], np.cumsum(rows, dtype=np.int64)]).astype(np.int64)
        self._open: OrderedDict[int, tuple[ListColumns, BinaryIO]] = OrderedDict()
        self._ahead: _Ahead | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._starts[-1])

    def row(self, index: int) -> list[Any]:
        """As `ListColumns.row`. Raises `DamagedError` where the store does not have the shard as the index says."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        row = self._shard_or_room(number).row(index - int(self._starts[number]))
        ahead = self._ahead
        if ahead is not None and ahead.was_last(number):
            with self._lock:
                self._close(number)
        return row

    @contextmanager
    def reading(self, ahead: Iterable[np.ndarray]) -> Iterator[None]:
        """While the block runs, shards are fetched in the order in which the rows of `ahead`, array by array, come to be read.

        So many are fetched ahead as fit into the cache beside those that still have rows to be read.
        """
        mine = self._ahead = _Ahead(self._shards_of(ahead), [entry.size for entry in self._files], self.cache.max_bytes)
        threads = [threading.Thread(target=self._fetch_ahead, args=(mine,), name="shards", daemon=True) for _ in range(FETCHES)]
        try:
            for thread in threads:
                thread.start()
            yield
        finally:
            mine.stop()
            for thread in threads:
                thread.join()
            if self._ahead is mine:
                self._ahead = None

    def _shards_of(self, ahead: Iterable[np.ndarray]) -> Iterator[tuple[list[int], list[int]]]:
        """Of each array: the shards in order of first use, and how many of its rows each has."""
        for rows in ahead:
            numbers, first, counts = np.unique(np.searchsorted(self._starts, rows, side="right") - 1, return_index=True, return_counts=True)
            order = np.argsort(first)
            yield numbers[order].tolist(), counts[order].tolist()

    def _fetch_ahead(self, ahead: _Ahead) -> None:
        while (number := ahead.take()) is not None:
            try:
                self._shard(number)
            except (TwinkleError, OSError) as error:
                if not _disk_is_full(error) or not ahead.wait_for_room(number):
                    return  # whoever reads a row of this shard meets the error again, where it can be told

    def _shard_or_room(self, number: int) -> ListColumns:
        """The shard; where the disk is full, those that are open here make room for it, and those that come meanwhile."""
        for seconds in WAITS_FOR_ROOM:
            try:
                return self._shard(number)
            except OSError as error:
                if not _disk_is_full(error):
                    raise
            with self._lock:
                for one in list(self._open):
                    self._close(one)
            time.sleep(seconds)
        return self._shard(number)

    def _shard(self, number: int) -> ListColumns:
        with self._lock:
            if number in self._open:
                self._open.move_to_end(number)
                return self._open[number][0]
        file = self.cache.open(self._store, self._prefix, self._files[number])
        columns = ListColumns([file], self._names)
        with self._lock:
            self._close(number)
            self._open[number] = columns, file
            while len(self._open) > 1 and sum(self._files[one].size for one in self._open) > self.cache.max_bytes:
                self._close(next(iter(self._open)))
        return columns

    def _close(self, number: int) -> None:
        """Rows that were read keep their memory; the file may make room from here on."""
        if number in self._open:
            self._open.pop(number)[1].close()


class _Ahead:
    """Which shard to fetch next: the first in the order of use that fits beside those fetched and not read to their end."""

    def __init__(self, order: Iterator[tuple[list[int], list[int]]], sizes: Sequence[int], max_bytes: int) -> None:
        self._order, self._sizes, self._max_bytes = order, sizes, max_bytes
        self._next: list[int] = []  # to fetch, the first one last
        self._unread: Counter[int] = Counter()  # rows announced and not read, of each shard
        self._held: set[int] = set()  # shards fetched or being fetched that have such rows
        self._ended = self._stopped = False
        self._changed = threading.Condition()

    def take(self) -> int | None:
        """Waits for room, and returns the shard to fetch; None when there is no more."""
        with self._changed:
            while not self._stopped:
                while self._next and (self._next[-1] in self._held or not self._unread[self._next[-1]]):
                    self._next.pop()
                if self._next and self._fits(self._next[-1]):
                    self._held.add(self._next[-1])
                    return self._next.pop()
                if not self._next and self._ended:
                    return None
                if self._next or not self._announce():
                    self._changed.wait()
        return None

    def was_last(self, number: int) -> bool:
        """Notes that a row of the shard was read; whether it was the last of those announced."""
        with self._changed:
            if self._unread[number] != 1:
                self._unread[number] = max(self._unread[number] - 1, 0)
                return False
            del self._unread[number]
            self._held.discard(number)
            self._changed.notify_all()
            return True

    def wait_for_room(self, number: int) -> bool:
        """The shard did not fit on the disk: it is taken again once no more is held than now. False where nothing is held."""
        with self._changed:
            self._held.discard(number)
            self._max_bytes = sum(self._sizes[one] for one in self._held)
            self._next.append(number)
            self._changed.notify_all()
            return bool(self._held)

    def stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _announce(self) -> bool:
        """Takes the next array, unless much is announced already."""
        if self._unread.total() > AHEAD_ROWS:
            return False
        numbers, counts = next(self._order, ([], []))
        self._ended = not numbers
        self._next = numbers[::-1]
        self._unread.update(dict(zip(numbers, counts, strict=True)))
        return True

    def _fits(self, number: int) -> bool:
        held_bytes = sum(self._sizes[one] for one in self._held)
        return not self._held or held_bytes + self._sizes[number] <= self._max_bytes


def _disk_is_full(error: Exception) -> bool:
    return isinstance(error, OSError) and error.errno == errno.ENOSPC
