"""Folders as the encode stage writes them, of samples of given lengths."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa

from twinkle_core.types import IGNORE

IDS = pa.large_list(pa.int32())
SCHEMA = pa.schema(
    {
        "input_ids": IDS,
        "labels": IDS,
        "seq_lens": pa.list_(pa.int32()),
        "kinds": pa.list_(pa.int8()),
        "loss_weights": pa.large_list(pa.float32()),
        "row": pa.int64(),
    }
)


def write_encoded(folder: Path, parts: Sequence[Sequence[int]], *, documents: int = 1, batch_rows: int = 7) -> Path:
    """`train-00000.arrow` … with a sample of each length, cut into up to so many documents; the first token of sample i is i."""
    folder.mkdir(parents=True, exist_ok=True)
    row = 0
    for number, lengths in enumerate(parts):
        ids = [np.arange(row + at, row + at + length, dtype=np.int32) for at, length in enumerate(lengths)]
        seq_lens = [_cut(length, documents) for length in lengths]
        columns = {
            "input_ids": ids,
            "labels": [_labels(sample, cut) for sample, cut in zip(ids, seq_lens, strict=True)],
            "seq_lens": seq_lens,
            "kinds": [[0] * len(cut) for cut in seq_lens],
            "loss_weights": [None] * len(ids),
            "row": list(range(row, row + len(ids))),
        }
        with pa.ipc.new_file(str(folder / f"train-{number:05d}.arrow"), SCHEMA) as writer:
            writer.write_table(pa.table(columns, schema=SCHEMA), max_chunksize=batch_rows)
        row += len(ids)
    return folder


def _cut(length: int, documents: int) -> list[int]:
    documents = min(documents, length)
    return [length - documents + 1, *[1] * (documents - 1)]


def _labels(ids: np.ndarray, seq_lens: list[int]) -> np.ndarray:
    labels = np.append(ids[1:], np.int32(IGNORE))
    labels[np.cumsum(seq_lens) - 1] = IGNORE
    return labels
