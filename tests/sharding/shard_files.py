"""Shard folders as the shard stage writes them, of random rows."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from twinkle_core.types import IGNORE, PackedRow

IDS = pa.large_list(pa.int32())
ROW_SCHEMA = pa.schema(
    {
        "input_ids": IDS,
        "labels": IDS,
        "seq_lens": pa.list_(pa.int32()),
        "sample_ids": pa.list_(pa.int64()),
        "kinds": pa.list_(pa.int8()),
        "loss_weights": pa.large_list(pa.float32()),
    }
)


def random_rows(num_rows: int, seed: int = 0, tokens: int = 20) -> list[PackedRow]:
    """Row i starts with the token i; every third one has loss weights."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(num_rows):
        lengths = rng.integers(2, tokens, size=rng.integers(1, 4)).astype(np.int32)
        ids = rng.integers(0, 1000, size=lengths.sum()).astype(np.int32)
        ids[0] = number
        labels = np.where(rng.random(len(ids)) < 0.5, IGNORE, np.roll(ids, -1)).astype(np.int32)
        labels[np.cumsum(lengths) - 1] = IGNORE
        weights = rng.random(len(ids)).astype(np.float32) if number % 3 == 0 else None
        rows.append(
            PackedRow(input_ids=ids, labels=labels, seq_lens=lengths, sample_ids=np.arange(len(lengths)) + number, loss_weights=weights)
        )
    return rows


def write_folder(
    folder: Path, rows: list[PackedRow], rows_per_shard: int, *, compression: str | None = None, rows_per_batch: int = 3
) -> Path:
    """`shard-00000.arrow` …, `rows.arrow` and `index.json`."""
    folder.mkdir(parents=True, exist_ok=True)
    shards = []
    for start in range(0, len(rows), rows_per_shard):
        part = rows[start : start + rows_per_shard]
        path = folder / f"shard-{len(shards):05d}.arrow"
        columns = {name: [getattr(row, name) for row in part] for name in ROW_SCHEMA.names}
        _write(path, pa.table(columns, schema=ROW_SCHEMA), compression, rows_per_batch)
        shards.append(facts(path) | {"rows": len(part)})
    counts = {
        "num_tokens": np.array([len(row.input_ids) for row in rows], dtype=np.int32),
        "num_loss_tokens": np.array([row.num_loss_tokens for row in rows], dtype=np.int32),
        "num_documents": np.array([len(row.seq_lens) for row in rows], dtype=np.int32),
        "loss_weight": np.array([row.loss_weight for row in rows]),
    }
    _write(folder / "rows.arrow", pa.table(counts), None, 1 << 20)
    index = {
        "num_rows": len(rows),
        **{name: int(counts[name].sum()) for name in ("num_tokens", "num_loss_tokens", "num_documents")},
        "longest_row_tokens": int(counts["num_tokens"].max()),
        "kinds": ["PLAIN"],
        "shards": shards,
        "rows": facts(folder / "rows.arrow"),
    }
    (folder / "index.json").write_text(json.dumps(index))
    return folder


def facts(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    return {"file": path.name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def assert_same(found: PackedRow, row: PackedRow) -> None:
    for name in ("input_ids", "labels", "seq_lens", "sample_ids", "kinds"):
        one, other = getattr(found, name), getattr(row, name)
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    assert (found.loss_weights is None) == (row.loss_weights is None)
    if row.loss_weights is not None:
        np.testing.assert_array_equal(found.loss_weights, row.loss_weights)


def _write(path: Path, table: pa.Table, compression: str | None, rows_per_batch: int) -> None:
    with pa.ipc.new_file(str(path), table.schema, options=pa.ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=rows_per_batch)
