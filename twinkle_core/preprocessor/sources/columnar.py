"""Parquet and Arrow IPC (file and stream), in record batches of about `BATCH_BYTES`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, BinaryIO

from twinkle_core.errors import DataError, StorageError
from twinkle_core.preprocessor.sources.data_file import BLOCK_BYTES, DataFile, UnreadableFileError
from twinkle_core.preprocessor.sources.place import OnBadRow, Place, Row

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_BYTES = 16 << 20
MAX_BATCH_ROWS = 4096


def parquet_rows(file: DataFile, refuse: OnBadRow) -> Iterator[tuple[Place, Row]]:
    """Rows in order, numbered from 1. Raises `UnreadableFileError` for a damaged file."""
    return _rows(_batches(file, _parquet_batches), file.name, refuse)


def arrow_rows(file: DataFile, refuse: OnBadRow) -> Iterator[tuple[Place, Row]]:
    """As `parquet_rows`. Whether the bytes are an Arrow file or stream is seen by their start."""
    return _rows(_batches(file, _ipc_batches), file.name, refuse)


def _batches(file: DataFile, read: Callable[[BinaryIO], Iterator[pa.RecordBatch]]) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    with file.seeking() as stream:
        try:
            for batch in read(stream):
                yield from _slices(batch)
        except StorageError:
            raise
        except (pa.ArrowException, OSError) as error:
            raise UnreadableFileError(f"{file.name} cannot be read as {file.type.format}: {error}") from error


def _parquet_batches(stream: BinaryIO) -> Iterator[pa.RecordBatch]:
    from pyarrow.parquet import ParquetFile

    table = ParquetFile(stream, buffer_size=BLOCK_BYTES, pre_buffer=False, arrow_extensions_enabled=True)
    for index in range(table.num_row_groups):
        group = table.metadata.row_group(index)
        rows = _rows_at_once(group.num_rows, group.total_byte_size)
        yield from table.iter_batches(batch_size=rows, row_groups=[index])


def _ipc_batches(stream: BinaryIO) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    start = stream.read(6)
    stream.seek(0)
    if not start:
        return
    source = pa.PythonFile(stream, mode="r")
    if start == b"ARROW1":
        reader = pa.ipc.open_file(source)
        yield from (reader.get_batch(index) for index in range(reader.num_record_batches))
    else:
        yield from pa.ipc.open_stream(source)


def _slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Parts that are small as Python objects too; a slice copies nothing."""
    rows = _rows_at_once(batch.num_rows, batch.nbytes)
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)


def _rows_at_once(num_rows: int, num_bytes: int) -> int:
    return max(1, min(MAX_BATCH_ROWS, num_rows * BATCH_BYTES // max(1, num_bytes)))


def _rows(batches: Iterator[pa.RecordBatch], name: str, refuse: OnBadRow) -> Iterator[tuple[Place, Row]]:
    number = 0
    for batch in batches:
        names = batch.schema.names
        if twice := sorted({column for column in names if names.count(column) > 1}):
            raise UnreadableFileError(f"{name}: the schema names the column {twice[0]!r} twice")
        for row in _plain(batch):
            number += 1
            place = Place(name, "row", number)
            if isinstance(row, str):
                refuse(place, row)
            else:
                yield place, row


def _plain(batch: pa.RecordBatch) -> list[Row | str]:
    """The rows, or for each that has no plain form the reason."""
    import pyarrow as pa

    from twinkle_core.preprocessor.sources.arrow_values import plain_rows

    try:
        batch.validate(full=True)  # UTF-8 too
        return list(plain_rows(batch))
    except (pa.ArrowInvalid, DataError) as error:
        if batch.num_rows == 1:
            return [str(error)]
        return [row for index in range(batch.num_rows) for row in _plain(batch.slice(index, 1))]
