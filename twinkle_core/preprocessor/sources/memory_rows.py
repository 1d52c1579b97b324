"""Rows that the caller holds in memory."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from twinkle_core.errors import DataError
from twinkle_core.preprocessor.sources.json_values import row_problem
from twinkle_core.preprocessor.sources.place import OnBadRow, Place, Row, raising


@dataclass(frozen=True)
class RowsSource:
    """A list of rows, e.g. `RowsSource('mine', [{'prompt': '2+2?', 'completion': '4'}])`."""

    name: str
    values: Sequence[Row]

    def digest(self) -> str:
        """sha256 hex over the rows as JSON, keys in their order. Raises `DataError` for a row that JSON cannot hold."""
        digest = hashlib.sha256()
        for number, row in enumerate(self.values, 1):
            try:
                line = json.dumps(row, ensure_ascii=False, allow_nan=False).encode("utf-8")
            except (TypeError, ValueError) as error:
                raise DataError(f"source '{self.name}', row {number}: it has no digest, since it is no JSON: {error}") from None
            digest.update(line + b"\n")
        return digest.hexdigest()

    def rows(self, on_bad_row: OnBadRow | None = None) -> Iterator[tuple[Place, Row]]:
        """Rows as `Source` says. Raises `DataError` when there are none."""
        refuse = on_bad_row or raising(self.name)
        if not self.values:
            raise DataError(f"source '{self.name}': no rows in the list")
        for number, row in enumerate(self.values, 1):
            place = Place(None, "row", number)
            if (problem := row_problem(row)) is None:
                yield place, row
            else:
                refuse(place, problem)
