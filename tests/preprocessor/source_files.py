"""Writes rows as files of each known type and compression, without the code under test."""

from __future__ import annotations

import csv
import gzip
import io
import json
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import zstandard

Rows = list[dict[str, Any]]

PACK: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.compress, ".zst": zstandard.compress}


def as_jsonl(rows: Rows) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=False).encode() + b"\n" for row in rows)


def as_json(rows: Rows) -> bytes:
    return json.dumps(rows, indent=1, ensure_ascii=False).encode()


def as_columns(rows: Rows) -> bytes:
    """One object of arrays, for rows with the same keys."""
    return json.dumps({key: [row[key] for row in rows] for key in rows[0]}).encode()


def as_csv(rows: Rows) -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n", quoting=csv.QUOTE_ALL)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def as_text(rows: Rows) -> bytes:
    return "\n".join(row["text"] for row in rows).encode()


def as_parquet(table: pa.Table, row_group_size: int = 2) -> bytes:
    sink = io.BytesIO()
    pa.parquet.write_table(table, sink, row_group_size=row_group_size)
    return sink.getvalue()


def as_arrow_file(table: pa.Table, batch_rows: int = 2) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return sink.getvalue()


def as_arrow_stream(table: pa.Table, batch_rows: int = 2) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return sink.getvalue()


COLUMNAR: dict[str, tuple[str, Callable[[pa.Table], bytes]]] = {
    "parquet": (".parquet", as_parquet),
    "arrow file": (".arrow", as_arrow_file),
    "arrow stream": (".arrow", as_arrow_stream),
}
