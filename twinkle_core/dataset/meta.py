"""Which rows a dataset is made of: an address or rows in memory, and which of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import count, islice
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

from twinkle_core.config import SourceConfig
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.preprocessor.sources import Place, open_source

Row = dict[str, Any]
SELF_COGNITION = "builtin://self_cognition"
_HUBS = ("hf://", "ms://")


@dataclass(frozen=True, eq=False)
class DatasetMeta:
    """One source of rows. Raises `ConfigError` where the arguments do not fit together.

    Example: `DatasetMeta('hf://openai/gsm8k@main', subset_name='main', split='train', data_slice=range(1000))`.
    """

    dataset_id: str = ""
    """hf://org/name@revision, ms://org/name@revision, a file, folder or glob, s3://…, reasoning_gym://…, builtin://self_cognition."""
    subset_name: str = "default"
    """Of a hub's dataset."""
    split: str = "train"
    """Of a hub's dataset."""
    data_slice: Iterable[int] | slice | None = None
    """Numbers of the rows to take, from 0, in this order; None takes all. Each must exist."""
    data: Any = None
    """Rows in memory instead of an address: a list of dicts, a dict of equally long lists, a `datasets.Dataset` or another collection
    of dicts, or a function that returns an iterator over them."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dataset_id", str(self.dataset_id))
        if bool(self.dataset_id) == (self.data is not None):
            raise ConfigError(f"give either dataset_id or data, got dataset_id {self.dataset_id!r} and data of {type(self.data).__name__}")
        if isinstance(self.data, Iterator):
            raise ConfigError("data is an iterator, which can be read only once: give a list, or the function that returns the iterator")
        if not self.dataset_id.startswith(_HUBS) and (self.subset_name, self.split) != ("default", "train"):
            given = f"subset_name {self.subset_name!r} and split {self.split!r}"
            raise ConfigError(f"{self.get_id()}: {given} are for hf:// and ms:// datasets only")
        if self.dataset_id.startswith(_HUBS) and "?" in self.dataset_id:
            raise ConfigError(f"{self.dataset_id!r}: give the subset and split as subset_name and split")
        if not (self.data_slice is None or isinstance(self.data_slice, (slice, range))):
            if isinstance(self.data_slice, (str, bytes)) or not isinstance(self.data_slice, Iterable):
                raise ConfigError(f"{self.get_id()}: data_slice is a range, a slice or row numbers, got {self.data_slice!r}")
            object.__setattr__(self, "data_slice", tuple(int(number) for number in self.data_slice))

    def get_id(self) -> str:
        """Name of the source in messages and reports."""
        if self.data is not None:
            return "rows in memory"
        if not self.dataset_id.startswith(_HUBS):
            return self.dataset_id
        return f"{self.dataset_id}:{self.subset_name}:{self.split}"

    def short_name(self) -> str:
        """The last part of the address, as a name for `SourceConfig`."""
        return re.sub(r"[^A-Za-z0-9_.-]+", "-", self.dataset_id.rstrip("/").rpartition("/")[2]).strip("-._") or "dataset"

    def is_same(self, other: DatasetMeta) -> bool:
        """Whether both take the same rows of the same source."""
        return self is other or (
            self.data is other.data and self.get_id() == other.get_id() and repr(self.data_slice) == repr(other.data_slice)
        )

    def uri(self) -> str:
        """The address as `SourceConfig` takes it."""
        if not self.dataset_id.startswith(_HUBS):
            return self.dataset_id
        subset = {} if self.subset_name == "default" else {"subset": self.subset_name}
        return f"{self.dataset_id}?{urlencode({**subset, 'split': self.split})}"


class SourceRows:
    """The rows that a `DatasetMeta` stands for. Opened once; may be read again and again."""

    def __init__(self, meta: DatasetMeta, cache_dir: Path | None = None) -> None:
        self.meta = meta
        self._read: Callable[[], Iterator[tuple[Place, Row]]] = self._in_memory
        if meta.data is None:
            self._read = open_source(SourceConfig(name=meta.short_name(), uri=meta.uri()), cache=cache_dir).rows

    def read(self) -> list[tuple[Place, Row]]:
        """The chosen rows, in the order in which they were asked for. Raises `DataError` for a row number that does not exist."""
        chosen, rows = self.meta.data_slice, self._read()
        if chosen is None:
            return list(rows)
        if isinstance(chosen, slice):
            found = list(rows)
            for end in (chosen.start, chosen.stop):
                if end is not None and not -len(found) <= end <= len(found):
                    raise self._missing(end, len(found))
            return found[chosen]
        numbers = list(chosen)
        if min(numbers, default=0) < 0:
            raise DataError(f"{self.meta.get_id()}: data_slice has the row number {min(numbers)}; they count from 0")
        wanted, end = set(numbers), max(numbers, default=-1) + 1
        num_rows, kept = 0, {}
        for number, row in enumerate(islice(rows, end)):
            num_rows = number + 1
            if number in wanted:
                kept[number] = row
        if num_rows < end:
            raise self._missing(end - 1, num_rows)
        return [kept[number] for number in numbers]

    def stream(self) -> Iterator[tuple[Place, Row]]:
        """The chosen rows one by one. Raises `ConfigError` where they are not in ascending order, `DataError` as `read` does."""
        chosen, rows = self.meta.data_slice, self._read()
        if chosen is None:
            yield from rows
            return
        wanted = iter(self._ascending(chosen))
        next_one, num_rows = next(wanted, None), 0
        while next_one is not None:
            row = next(rows, None)
            if row is None:
                if isinstance(chosen, slice) and chosen.stop is None and num_rows >= (chosen.start or 0):
                    return
                raise self._missing(next_one, num_rows)
            if num_rows == next_one:
                yield row
                next_one = next(wanted, None)
            num_rows += 1

    def _ascending(self, chosen: Iterable[int] | slice) -> Iterable[int]:
        if isinstance(chosen, slice):
            start, step = chosen.start or 0, chosen.step or 1
            if start < 0 or step < 1 or (chosen.stop is not None and chosen.stop < 0):
                raise ConfigError(f"{self.meta.get_id()}: a stream is read forwards only, which {chosen} does not allow")
            return count(start, step) if chosen.stop is None else range(start, chosen.stop, step)
        numbers = chosen if isinstance(chosen, range) else tuple(chosen)
        if any(number < 0 for number in numbers[:1]) or any(one >= other for one, other in zip(numbers, numbers[1:], strict=False)):
            raise ConfigError(f"{self.meta.get_id()}: a stream is read forwards only; give data_slice in ascending order")
        return numbers

    def _missing(self, number: int, num_rows: int) -> DataError:
        return DataError(f"{self.meta.get_id()}: data_slice asks for row {number}, but there are only {num_rows} rows")

    def _in_memory(self) -> Iterator[tuple[Place, Row]]:
        for number, row in enumerate(self._collection(), start=1):
            if not isinstance(row, Mapping):
                raise DataError(f"{self.meta.get_id()}, row {number}: a row is a dict, got {type(row).__name__}")
            yield Place(file=None, kind="row", number=number), deepcopy(dict(row))  # the caller's own rows stay as they are

    def _collection(self) -> Iterable[Any]:
        data = self.meta.data
        if not isinstance(data, Mapping):
            rows: Iterator[Any] = iter(data() if callable(data) else data)
            return rows
        lengths = {name: len(column) for name, column in data.items()}
        if len(set(lengths.values())) > 1:
            raise DataError(f"{self.meta.get_id()}: the columns differ in length: {lengths}")
        return (dict(zip(data, values, strict=True)) for values in zip(*data.values(), strict=True))
