"""Rows -> one file of a common format, written beside its name first: a file under the name is whole."""

from __future__ import annotations

import csv
import json
import os
import uuid
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from twinkle_core.errors import ConfigError, DataError

FORMATS = ("jsonl", "json", "csv", "parquet")
_BATCH = 1000
"""Rows that a parquet row group holds, and that are in memory at a time."""

ReadRows = Callable[[], Iterator[Mapping[str, Any]]]
"""Gives the rows from the first on, as often as it is called."""


def save_rows(rows: ReadRows, path: Path, format: str | None) -> None:
    """Writes all rows to `path`. Raises `ConfigError` for an unknown format, `DataError` naming a row that it cannot hold.

    jsonl and json keep every row as it is. csv has a column for each key of any row, empty where a row lacks it, and JSON in cells
    that are neither text nor number. parquet keeps nested values only where Arrow merges nothing into them.
    """
    name = format or path.suffix.removeprefix(".").lower()
    if name not in _WRITERS:
        raise ConfigError(f"cannot save {path.name}: format {name!r} is not one of {', '.join(FORMATS)}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}-{uuid.uuid4().hex}")
    try:
        _WRITERS[name](lambda: _plain_rows(rows()), temporary)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _plain_rows(rows: Iterator[Mapping[str, Any]]) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number from 0, row of plain JSON values)."""
    for number, row in enumerate(rows):
        try:
            yield number, json.loads(json.dumps(row, default=_array, allow_nan=False))
        except (TypeError, ValueError) as error:
            raise DataError(f"row {number} cannot be saved: {error}") from error


def _array(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)):
        return value.tolist()
    raise TypeError(f"{type(value).__name__} is no JSON value (cast_column(column, decode=False) makes bytes of images)")


def _write_jsonl(rows: Callable[[], Iterator[tuple[int, dict[str, Any]]]], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for _, row in rows():
            file.write(json.dumps(row, ensure_ascii=False) + "\n")


def _write_json(rows: Callable[[], Iterator[tuple[int, dict[str, Any]]]], path: Path) -> None:
    with path.open("w", encoding="utf-8", newline="\n") as file:
        for number, row in rows():
            file.write((",\n" if number else "[\n") + json.dumps(row, ensure_ascii=False))
        file.write("\n]\n" if file.tell() else "[]\n")


def _write_csv(rows: Callable[[], Iterator[tuple[int, dict[str, Any]]]], path: Path) -> None:
    columns = list(dict.fromkeys(key for _, row in rows() for key in row))
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        writer.writerows([_cell(row.get(column)) for column in columns] for _, row in rows())


def _cell(value: Any) -> str | int | float:
    if value is None:
        return ""
    return value if isinstance(value, (str, int, float)) and not isinstance(value, bool) else json.dumps(value, ensure_ascii=False)


def _write_parquet(rows: Callable[[], Iterator[tuple[int, dict[str, Any]]]], path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    try:
        schemas = [_table([row for _, row in batch]).schema for batch in _batches(rows())]
        schema = pa.unify_schemas(schemas, promote_options="permissive") if schemas else pa.schema([])
        with parquet.ParquetWriter(path, schema) as writer:
            for batch in _batches(rows()):
                table = pa.Table.from_pylist([row for _, row in batch], schema=schema)
                for (number, row), read in zip(batch, table.to_pylist(), strict=True):
                    _check_same(number, row, read)
                writer.write_table(table)
    except pa.ArrowException as error:
        raise DataError(f"parquet cannot hold these rows: {error}; save them as jsonl") from error


def _table(rows: list[dict[str, Any]]) -> Any:
    """With a column for each key of any row (`Table.from_pylist` takes the keys of the first row alone)."""
    import pyarrow as pa

    return pa.table({key: [row.get(key) for row in rows] for key in dict.fromkeys(key for row in rows for key in row)})


def _check_same(number: int, row: dict[str, Any], read: dict[str, Any]) -> None:
    """Arrow gives all values of a column one type: objects gain the keys of others as null, numbers may lose digits."""
    for column in {**row, **read}:
        if row.get(column) != read.get(column):
            raise DataError(f"row {number}: Arrow would change {column!r} to fit the other rows; save them as jsonl")


def _batches(rows: Iterator[tuple[int, dict[str, Any]]]) -> Iterator[list[tuple[int, dict[str, Any]]]]:
    while batch := list(islice(rows, _BATCH)):
        yield batch


_WRITERS = {"jsonl": _write_jsonl, "json": _write_json, "csv": _write_csv, "parquet": _write_parquet}
