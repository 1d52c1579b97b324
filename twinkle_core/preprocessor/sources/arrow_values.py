"""Arrow arrays as plain Python values, column by column.

A file of columns has one schema for all rows, so its writer had to put null where a row lacked a key. A null column or struct
field is therefore a key that the row lacks; nulls in lists and maps stay. What a writer wants kept to the letter (a tool's
parameters with a null default, objects of mixed types) belongs into a column of type arrow.json, which is read as JSON.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import types

from twinkle_core.errors import DataError
from twinkle_core.preprocessor.sources.json_values import parse_json
from twinkle_core.preprocessor.sources.place import Row


def plain_rows(batch: pa.RecordBatch) -> list[Row]:
    """One dict a row. Raises `DataError` for a value that has no plain form: NaN, an infinity, broken JSON, an unknown type."""
    columns = [_column(name, column) for name, column in zip(batch.schema.names, batch.columns, strict=True)]
    return _objects(batch.schema.names, columns)


def plain_values(array: pa.Array) -> list[Any]:
    """One value for each item: dict for structs and maps, list, text, bytes, int, float, bool or None.

    Dates, times and decimals become the text that Arrow prints for them.
    """
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        values = plain_values(array.storage)
        return [value if value is None else parse_json(value.encode()) for value in values] if isinstance(kind, pa.JsonType) else values
    if types.is_dictionary(kind):
        return plain_values(array.dictionary_decode())
    if types.is_struct(kind):
        fields = [kind.field(index).name for index in range(kind.num_fields)]
        objects = _objects(fields, [plain_values(column) for column in array.flatten()]) if fields else [{} for _ in range(len(array))]
        return _with_nulls(array, objects)
    if types.is_map(kind):
        keys, items = plain_values(array.keys), plain_values(array.items)
        return _with_nulls(array, [dict(zip(keys[start:stop], items[start:stop], strict=True)) for start, stop in _bounds(array)])
    if types.is_list(kind) or types.is_large_list(kind):
        start = array.offsets[0].as_py()
        values = plain_values(array.values.slice(start, array.offsets[-1].as_py() - start))
        return _with_nulls(array, [values[begin - start : end - start] for begin, end in _bounds(array)])
    if types.is_fixed_size_list(kind) or types.is_list_view(kind) or types.is_large_list_view(kind):
        return [None if item.values is None else plain_values(item.values) for item in array]
    return _leaves(array)


def _leaves(array: pa.Array) -> list[Any]:
    kind = array.type
    if types.is_floating(kind) and pc.any(pc.invert(pc.is_finite(array))).as_py():
        raise DataError("a number that is NaN or infinite; JSON has none")
    if types.is_temporal(kind) or types.is_decimal(kind):
        try:
            array = array.cast(pa.string())
        except pa.ArrowException as error:
            raise DataError(f"values of type {kind} have no text form: {error}; write the column as text") from None
    values: list[Any] = array.to_pylist()
    return values


def _column(name: str, array: pa.Array) -> list[Any]:
    try:
        return plain_values(array)
    except DataError as error:
        raise DataError(f"column {name!r}: {error}") from None


def _objects(names: list[str], columns: list[list[Any]]) -> list[Row]:
    return [{name: value for name, value in zip(names, values, strict=True) if value is not None} for values in zip(*columns, strict=True)]


def _bounds(array: pa.Array) -> Iterator[tuple[int, int]]:
    return pairwise(array.offsets.to_pylist())


def _with_nulls(array: pa.Array, values: list[Any]) -> list[Any]:
    if not array.null_count:
        return values
    return [value if valid else None for value, valid in zip(values, array.is_valid().to_pylist(), strict=True)]
