"""Rows of several sources as one stream, whose position is a few numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

from twinkle_core.dataset.encoding import LocatedRow
from twinkle_core.dataset.meta import SourceRows
from twinkle_core.dataset.operations import Operation, apply_all
from twinkle_core.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Cursor:
    """A place between two rows of the stream."""

    rows: tuple[int, ...]
    """Rows taken so far, of each source; those that a filter left out count too."""
    turn: int = 0
    """Number of the source whose row comes next."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """One row of a source."""

    located: LocatedRow
    """As read."""
    row: dict[str, Any] | None
    """After all operations; None where one left it out."""
    number: int
    """Of the row in its source, from 0."""
    after: Cursor


@dataclass(frozen=True, kw_only=True)
class RowStream:
    """Reads sources row by row, in turns or one after the other, with operations applied on the way. Holds one row at a time."""

    names: Sequence[str]
    sources: Sequence[SourceRows]
    operations: Sequence[Operation]
    mix: Literal["interleave", "concatenate"]

    def start(self) -> Cursor:
        return Cursor(rows=(0,) * len(self.sources))

    def steps(self, cursor: Cursor) -> Iterator[Step]:
        """Every row from there on. Rows before are read and passed over, nothing is applied to them.

        A source that is used up loses its turn. A row that is left out before the sources are mixed does not count as its turn.
        Raises `DataError` where a source has fewer rows than were taken from it.
        """
        rows = [self._from(number, taken) for number, taken in enumerate(cursor.rows)]
        taken, turn, left = list(cursor.rows), cursor.turn, set(range(len(rows)))
        before_mix = [operation for operation in self.operations if not operation.after_mix]
        after_mix = [operation for operation in self.operations if operation.after_mix]
        while left:
            located = next(rows[turn], None) if turn in left else None
            if located is None:
                left.discard(turn)
                turn = (turn + 1) % len(rows)
                continue
            source, number = turn, taken[turn]
            taken[source] += 1
            row = apply_all(before_mix, *located)
            if row is not None:
                turn = (turn + 1) % len(rows) if self.mix == "interleave" else turn
                row = apply_all(after_mix, source, located.where, row)
            yield Step(located=located, row=row, number=number, after=Cursor(rows=tuple(taken), turn=turn))

    def rows_at(self, wanted: set[tuple[int, int]]) -> dict[tuple[int, int], LocatedRow]:
        """(source, number) -> the row with that number in its source, after all operations."""
        found = {}
        for source in {source for source, _ in wanted}:
            end = 1 + max(number for other, number in wanted if other == source)
            for number, located in enumerate(islice(self._from(source, 0), end)):
                if (source, number) in wanted:
                    found[source, number] = located
        for place, located in found.items():
            row = apply_all(self.operations, *located)
            if row is not None:
                found[place] = located._replace(row=row)
        return found

    def _from(self, source: int, taken: int) -> Iterator[LocatedRow]:
        rows = self.sources[source].stream()
        passed = sum(1 for _ in islice(rows, taken))
        if passed < taken:
            raise DataError(f"{self.names[source]} has {passed} rows, but {taken} were read from it before: it has changed")
        return (LocatedRow(source, f"{self.names[source]}, {place}", row) for place, row in rows)
