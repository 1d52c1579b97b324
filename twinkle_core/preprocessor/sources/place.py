"""What a source is: rows in a fixed order, each with its place, and a digest of the content."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple, Protocol

from twinkle_core.errors import DataError

Row = dict[str, Any]


class Place(NamedTuple):
    """Where a row stands. `str(Place(file='data.jsonl', kind='line', number=4)) == 'data.jsonl, line 4'`."""

    file: str | None
    """Name for people: of one file its own, below a folder the relative one; None where there is no file. No path of this machine."""
    kind: Literal["line", "row"]
    """What `number` counts: physical lines of a text file, or rows of anything else."""
    number: int
    """From 1, within the file."""

    def __str__(self) -> str:
        where = f"{self.kind} {self.number}"
        return f"{self.file}, {where}" if self.file else where


OnBadRow = Callable[[Place, str], None]
"""Called with the place and the reason; it raises, or counts and returns."""


class Source(Protocol):
    """Rows of one source, in a fixed order."""

    def digest(self) -> str:
        """sha256 hex of the content: the same rows have the same digest wherever they lie."""
        ...

    def rows(self, on_bad_row: OnBadRow | None = None) -> Iterator[tuple[Place, Row]]:
        """(place, row) pairs. A bad row goes to `on_bad_row`; without one it raises `DataError` with source, place and reason."""
        ...


def raising(source: str) -> OnBadRow:
    """What stands in for `on_bad_row` where the caller gives none."""

    def refuse(place: Place, reason: str) -> None:
        raise DataError(f"source '{source}', {place}: {reason}")

    return refuse
