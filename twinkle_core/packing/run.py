"""The pack stage: lengths of the encoded samples -> plan.arrow, which samples share a row, and report.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from twinkle_core.config import PackingConfig
from twinkle_core.errors import DataError
from twinkle_core.packing.best_fit_decreasing import check_lengths, pack
from twinkle_core.packing.packing_plan import PackingPlan, join
from twinkle_core.packing.windows import pack_windows
from twinkle_core.types import Progress

VERSION = 2
"""Raised when the same lengths and settings would give another plan."""


def plan(in_folder: Path, packing: PackingConfig, out: Path, progress: Progress) -> dict[str, Any]:
    """Writes plan.arrow and report.json into `out`; returns the report.

    plan.arrow has the column rows (large_list<int64>): positions of samples over train-00000.arrow, train-00001.arrow … of
    `in_folder`, of which only the offsets of the lists are read. Memory: about 60 bytes a sample.

    Raises `DataError` where a sample is longer than a row, there is none, or a file is missing or cut off.
    """
    files = _train_files(in_folder)
    lengths, num_documents = _lengths(files)
    if not len(lengths):
        raise DataError(f"no samples in {files[0].name}: nothing to pack")
    progress.start("pack", len(lengths), "samples")
    packed = _packed(lengths, packing)
    _write(packed, out / "plan.arrow")
    progress.advance(len(lengths))
    tokens = int(lengths.sum())
    report = {
        "rows": len(packed),
        "samples": len(lengths),
        "documents": num_documents,
        "tokens": tokens,
        "fill": round(tokens / (len(packed) * packing.row_length), 6),
        "fewest_rows_possible": -(-tokens // packing.row_length),
        "longest": int(lengths.max()),
    }
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def _packed(lengths: np.ndarray, packing: PackingConfig) -> PackingPlan:
    if packing.algorithm == "none":
        check_lengths(lengths, packing.row_length)
        return PackingPlan(items=np.arange(len(lengths)), offsets=np.arange(len(lengths) + 1))
    if packing.window_samples is None:
        return pack(lengths, packing.row_length)
    return join(pack_windows(lengths, packing.row_length, packing.window_samples))


def _train_files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("train-*.arrow"))
    for number, path in enumerate(found or [folder / "nothing"]):
        if path.name != f"train-{number:05d}.arrow":
            raise DataError(
                f"the encoded samples are not whole: there is no train-{number:05d}.arrow in {folder}; run the encode stage again"
            )
    return found


def _lengths(files: list[Path]) -> tuple[np.ndarray, int]:
    """Tokens of each sample [N] int64, and the number of documents of all."""
    import pyarrow as pa

    tokens, num_documents = [np.empty(0, dtype=np.int64)], 0
    for path in files:
        try:
            with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
                for batch in map(reader.get_batch, range(reader.num_record_batches)):
                    tokens.append(np.diff(np.asarray(batch.column("input_ids").offsets)))
                    num_documents += len(batch.column("seq_lens").flatten())
        except (pa.ArrowInvalid, KeyError) as error:
            raise DataError(f"{path.name} is not a whole file of encoded samples: {error}; run the encode stage again") from error
    return np.concatenate(tokens, dtype=np.int64), num_documents


def _write(packed: PackingPlan, path: Path) -> None:
    import pyarrow as pa

    rows = pa.LargeListArray.from_arrays(pa.array(packed.offsets), pa.array(packed.items))
    batch = pa.record_batch([rows], schema=pa.schema([("rows", rows.type)]))
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, batch.schema) as writer:
        writer.write_batch(batch)
