"""The shard stage: encoded documents and a plan -> packed rows in Arrow files, with an index."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from twinkle_core.config import ShardConfig
from twinkle_core.errors import DataError
from twinkle_core.sharding.reader import EncodedDataset, ListColumns
from twinkle_core.types import IGNORE, Progress

VERSION = 1
"""Raised when the same documents, plan and settings would give other files."""

ROWS_PER_BATCH = 256
"""Rows gathered in memory at a time."""


def write_shards(encode_folder: Path, plan_folder: Path, shard: ShardConfig, out: Path, progress: Progress) -> dict[str, Any]:
    """Writes shard-00000.arrow …, rows.arrow and index.json into `out`; returns the index.

    Shards: input_ids, labels (large_list<int32>), seq_lens (list<int32>), sample_ids (list<int64>). rows.arrow: num_tokens,
    num_loss_tokens, num_documents (int32) of each row. Raises `DataError` when the plan does not hold each document once.
    """
    import pyarrow as pa

    documents = EncodedDataset(encode_folder / "train.arrow")
    rows = ListColumns([plan_folder / "plan.arrow"], ("rows",))
    _check_each_document_once(rows, len(documents))
    progress.start("shard", len(rows), "rows")
    counts: list[np.ndarray] = []
    shards: list[dict[str, Any]] = []
    for start in range(0, len(rows), shard.rows_per_shard):
        end = min(start + shard.rows_per_shard, len(rows))
        name = f"shard-{len(shards):05d}.arrow"
        with pa.OSFile(str(out / name), "wb") as sink, pa.ipc.new_file(sink, _schema()) as writer:
            for at in range(start, end, ROWS_PER_BATCH):
                part = [rows.row(index)[0] for index in range(at, min(at + ROWS_PER_BATCH, end))]
                batch, part_counts = _gather(documents, part)
                writer.write_batch(batch)
                counts.append(part_counts)
                progress.advance(len(part))
        shards.append({"file": name, "rows": end - start})
    columns = np.concatenate(counts, axis=1)
    _write_counts(columns, out / "rows.arrow")
    num_tokens, num_loss_tokens, num_documents = (int(column.sum(dtype=np.int64)) for column in columns)
    index = {
        "num_rows": len(rows),
        "num_tokens": num_tokens,
        "num_loss_tokens": num_loss_tokens,
        "num_documents": num_documents,
        "longest_row_tokens": int(columns[0].max()),
        "shards": shards,
    }
    (out / "index.json").write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
    return index


def _check_each_document_once(rows: ListColumns, num_documents: int) -> None:
    planned = np.concatenate([rows.row(index)[0] for index in range(len(rows))]) if len(rows) else np.empty(0, dtype=np.int64)
    if len(planned) and (planned.min() < 0 or planned.max() >= num_documents):
        raise DataError(f"the plan names documents outside 0..{num_documents - 1}; it was made for other documents, pack again")
    seen = np.bincount(planned, minlength=num_documents)
    if not num_documents or (seen != 1).any():
        wrong = np.flatnonzero(seen != 1)
        what = f"document {wrong[0]} is there {seen[wrong[0]]} times" if len(wrong) else "there are no documents"
        raise DataError(f"a plan holds each document once, but {what} ({len(wrong)} such); pack again")


def _gather(documents: EncodedDataset, rows: list[np.ndarray]) -> tuple[Any, np.ndarray]:
    """A record batch of these rows, and int32 [3, rows]: tokens, supervised tokens, documents of each."""
    import pyarrow as pa

    samples = [[documents[int(position)] for position in row] for row in rows]
    flat = [sample for row in samples for sample in row]
    seq_lens = np.array([len(sample.input_ids) for sample in flat], dtype=np.int32)
    labels = np.concatenate([sample.labels for sample in flat])
    per_row = np.array([len(row) for row in rows], dtype=np.int64)
    doc_offsets = np.concatenate([[0], np.cumsum(per_row)])
    token_offsets = np.concatenate([[0], np.cumsum(seq_lens, dtype=np.int64)])[doc_offsets]
    columns = [
        pa.LargeListArray.from_arrays(pa.array(token_offsets), pa.array(np.concatenate([sample.input_ids for sample in flat]))),
        pa.LargeListArray.from_arrays(pa.array(token_offsets), pa.array(labels)),
        pa.ListArray.from_arrays(pa.array(doc_offsets.astype(np.int32)), pa.array(seq_lens)),
        pa.ListArray.from_arrays(pa.array(doc_offsets.astype(np.int32)), pa.array(np.concatenate(rows).astype(np.int64))),
    ]
    supervised = np.concatenate([[0], np.cumsum(labels != IGNORE)])[token_offsets]
    counts = np.stack([np.diff(token_offsets), np.diff(supervised), per_row]).astype(np.int32)
    return pa.record_batch(columns, schema=_schema()), counts


def _write_counts(columns: np.ndarray, path: Path) -> None:
    import pyarrow as pa

    table = pa.table(dict(zip(("num_tokens", "num_loss_tokens", "num_documents"), columns, strict=True)))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


def _schema() -> Any:
    import pyarrow as pa

    tokens = pa.large_list(pa.int32())
    return pa.schema([("input_ids", tokens), ("labels", tokens), ("seq_lens", pa.list_(pa.int32())), ("sample_ids", pa.list_(pa.int64()))])
