"""List columns of Arrow files, read row by row as numpy arrays: memory-mapped, and not copied where the file is not compressed."""

from __future__ import annotations

import mmap
import threading
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from twinkle_core.errors import DataError

DECODED_BYTES = 64 << 20
"""Most memory that decoded batches of compressed files take, per `ListColumns`; the batch in use is always kept."""

Lists = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""A list column of a batch: offsets [n + 1], values, and which rows are there [n] bool (None: all)."""


class ListColumns:
    """Some list columns of one or more Arrow files, as one table. Reading is safe from several threads.

    Raises `DataError` naming a file that is not a whole Arrow file or lacks a column.
    """

    def __init__(self, files: Sequence[Path | BinaryIO], names: tuple[str, ...]) -> None:
        self._files = [_ArrowFile(file, names) for file in files]
        self._starts = _starts([file.num_rows for file in self._files])
        self._decoded: OrderedDict[tuple[int, int], tuple[list[Lists], int]] = OrderedDict()
        self._decoded_bytes = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def rows_per_file(self) -> list[int]:
        return [file.num_rows for file in self._files]

    def row(self, index: int) -> list[Any]:
        """The row's arrays, in the order of the column names; None where the list is null. Raises `IndexError` outside [0, len)."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        number = int(np.searchsorted(self._starts, index, side="right")) - 1
        batch, at = self._files[number].locate(index - int(self._starts[number]))
        return [
            None if there is not None and not there[at] else values[offsets[at] : offsets[at + 1]]
            for offsets, values, there in self._lists(number, batch)
        ]

    def lengths(self, name: str) -> np.ndarray:
        """[N] int64 length of each row's list in this column; 0 where it is null. Other columns are not read."""
        parts = [file.lengths(batch, name) for file in self._files for batch in range(file.num_batches)]
        return np.concatenate(parts).astype(np.int64) if parts else np.empty(0, dtype=np.int64)

    def _lists(self, number: int, batch: int) -> list[Lists]:
        file = self._files[number]
        if (mapped := file.mapped.get(batch)) is not None:
            return mapped
        with self._lock:
            if (number, batch) in self._decoded:
                self._decoded.move_to_end((number, batch))
                return self._decoded[number, batch][0]
            lists, decoded_bytes = file.read(batch)
            if decoded_bytes == 0:
                file.mapped[batch] = lists
                return lists
            self._decoded[number, batch] = lists, decoded_bytes
            self._decoded_bytes += decoded_bytes
            while self._decoded_bytes > DECODED_BYTES and len(self._decoded) > 1:
                self._decoded_bytes -= self._decoded.popitem(last=False)[1][1]
            return lists


class _ArrowFile:
    """One file in the Arrow IPC file format, mapped into memory: the file may be unlinked meanwhile."""

    def __init__(self, file: Path | BinaryIO, names: tuple[str, ...]) -> None:
        import pyarrow as pa

        self._name = Path(file.name).name
        self._names = names
        self.mapped: dict[int, list[Lists]] = {}
        try:
            self._buffer = pa.py_buffer(_map(file))
            schema = pa.ipc.open_file(pa.BufferReader(self._buffer)).schema
            if missing := [name for name in names if name not in schema.names]:
                raise DataError(f"{self._name} has the columns {schema.names}, but not {missing}: it was made by another version")
            self._reader = self._open([schema.get_field_index(name) for name in names])
            self._indices = {name: schema.get_field_index(name) for name in names}
            # Of a compressed file only the one column is decoded to learn how many rows a batch has: the last named is a short one.
            one = self._open([self._indices[names[-1]]])
            sizes = [one.get_batch(number).num_rows for number in range(one.num_record_batches)]
        except (OSError, ValueError) as error:  # pyarrow's ArrowInvalid is a ValueError, and so is mapping an empty file
            if isinstance(error, DataError):
                raise
            raise DataError(f"{self._name} is not a whole Arrow file: {error}") from error
        self._starts = _starts(sizes)
        self.num_batches, self.num_rows = len(sizes), int(self._starts[-1])

    def locate(self, index: int) -> tuple[int, int]:
        """(batch, row in it) of a row of the file."""
        batch = int(np.searchsorted(self._starts, index, side="right")) - 1
        return batch, index - int(self._starts[batch])

    def read(self, batch: int) -> tuple[list[Lists], int]:
        """The columns of a batch, and the bytes of memory that they take: 0 where they lie in the mapped file."""
        import pyarrow as pa

        try:
            record = self._reader.get_batch(batch)
        except (OSError, pa.ArrowInvalid) as error:
            raise DataError(f"batch {batch} of {self._name} cannot be read: {error}") from error
        lists = [_lists(record.column(name)) for name in self._names]
        start, end = self._buffer.address, self._buffer.address + self._buffer.size
        decoded = any(values.size and not start <= values.__array_interface__["data"][0] < end for _, values, _ in lists)
        return lists, record.nbytes if decoded else 0

    def lengths(self, batch: int, name: str) -> np.ndarray:
        """[n] length of each list of the batch in this column."""
        offsets, _, there = _lists(self._open([self._indices[name]]).get_batch(batch).column(name))
        return np.diff(offsets) if there is None else np.diff(offsets) * there

    def _open(self, fields: list[int]) -> Any:
        import pyarrow as pa

        return pa.ipc.open_file(pa.BufferReader(self._buffer), options=pa.ipc.IpcReadOptions(included_fields=sorted(fields)))


def _map(file: Path | BinaryIO) -> mmap.mmap:
    if isinstance(file, Path):
        with file.open("rb") as opened:
            return mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ)
    return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)


def _lists(column: Any) -> Lists:
    there = column.is_valid().to_numpy(zero_copy_only=False) if column.null_count else None
    return np.asarray(column.offsets), column.values.to_numpy(zero_copy_only=True), there


def _starts(sizes: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)]).astype(np.int64)
