"""Which items share a row."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True, eq=False)
class PackingPlan:
    """Rows of item numbers, without a Python object for each.

    Example: items `[0, 1, 2, 3, 4]` with offsets `[0, 1, 3, 5]` are the rows `[0]`, `[1, 2]` and `[3, 4]`.
    """

    items: np.ndarray
    """[N] int64 item numbers; those of a row ascend."""
    offsets: np.ndarray
    """[R + 1] int64: row r holds `items[offsets[r]:offsets[r + 1]]`, at least one."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        """Item numbers of a row (a view). Raises `IndexError` outside [0, len)."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        return self.items[self.offsets[row] : self.offsets[row + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self.items[start:end] for start, end in zip(self.offsets[:-1].tolist(), self.offsets[1:].tolist(), strict=True))


def join(plans: Iterable[PackingPlan]) -> PackingPlan:
    """The rows of all plans, one after the other."""
    parts = list(plans)
    empty = np.empty(0, dtype=np.int64)
    sizes = np.concatenate([empty, *(np.diff(part.offsets) for part in parts)])
    return PackingPlan(
        items=np.concatenate([empty, *(part.items for part in parts)]),
        offsets=np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64),
    )
