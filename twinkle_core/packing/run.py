"""The pack stage: lengths of the encoded documents -> plan.arrow, which documents share a row, and report.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from twinkle_core.config import PackingConfig
from twinkle_core.errors import DataError
from twinkle_core.packing.best_fit_decreasing import check_lengths, pack
from twinkle_core.types import Progress

VERSION = 1
"""Raised when the same lengths and settings would give another plan."""

ROWS_PER_BATCH = 65536


def plan(in_folder: Path, packing: PackingConfig, out: Path, progress: Progress) -> dict[str, Any]:
    """Writes plan.arrow (column rows: list<int64>, positions in train.arrow) and report.json into `out`; returns the report.

    Raises `DataError` where a document is longer than a row, or there is none.
    """
    lengths = document_lengths(in_folder / "train.arrow")
    progress.start("pack", len(lengths), "documents")
    if packing.algorithm == "none":
        check_lengths(lengths, packing.row_length)
        rows = list(np.arange(len(lengths), dtype=np.int64)[:, None])
    else:
        rows = pack(lengths, packing.row_length)
    _write(rows, out / "plan.arrow")
    progress.advance(len(lengths))
    tokens = int(lengths.sum())
    report = {
        "rows": len(rows),
        "documents": len(lengths),
        "tokens": tokens,
        "fill": round(tokens / (len(rows) * packing.row_length), 6),
        "fewest_rows_possible": -(-tokens // packing.row_length),
    }
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def document_lengths(path: Path) -> np.ndarray:
    """[N] int64 lengths of the documents in an encoded Arrow file. Raises `DataError` when there is none."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
        parts = [np.diff(np.asarray(reader.get_batch(i).column("input_ids").offsets)) for i in range(reader.num_record_batches)]
    if not sum(map(len, parts)):
        raise DataError(f"no documents in {path.name}: nothing to pack")
    return np.concatenate(parts).astype(np.int64)


def _write(rows: list[np.ndarray], path: Path) -> None:
    import pyarrow as pa

    schema = pa.schema([("rows", pa.list_(pa.int64()))])
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for start in range(0, len(rows), ROWS_PER_BATCH):
            part = rows[start : start + ROWS_PER_BATCH]
            offsets = np.concatenate([[0], np.cumsum([len(row) for row in part])]).astype(np.int32)
            column = pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(part)))
            writer.write_batch(pa.record_batch([column], schema=schema))
