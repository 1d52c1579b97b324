"""Reading token lists from Arrow files: encoded documents, and packed rows. Memory-mapped; values are not copied."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from twinkle_core.errors import DataError
from twinkle_core.types import EncodedSample, PackedRow


class ListColumns:
    """Some list columns of one or more Arrow files, read as numpy arrays row by row."""

    def __init__(self, paths: list[Path], names: tuple[str, ...]) -> None:
        import pyarrow as pa

        self._columns: list[list[tuple[np.ndarray, np.ndarray]]] = []  # per batch, per column: offsets [n + 1], values
        sizes = []
        for path in paths:
            try:
                reader = pa.ipc.open_file(pa.memory_map(str(path)))
            except (OSError, pa.ArrowInvalid) as error:
                raise DataError(f"{path.name} is not a whole Arrow file: {error}") from error
            for number in range(reader.num_record_batches):
                batch = reader.get_batch(number)
                sizes.append(batch.num_rows)
                columns = [batch.column(name) for name in names]
                self._columns.append([(np.asarray(column.offsets), column.values.to_numpy(zero_copy_only=True)) for column in columns])
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)

    def __len__(self) -> int:
        return int(self._starts[-1])

    def row(self, index: int) -> list[np.ndarray]:
        """The row's arrays, in the order of the column names. Raises `IndexError` outside [0, len)."""
        if not 0 <= index < len(self):
            raise IndexError(f"row {index} of {len(self)}")
        batch = int(np.searchsorted(self._starts, index, side="right")) - 1
        at = index - int(self._starts[batch])
        return [values[offsets[at] : offsets[at + 1]] for offsets, values in self._columns[batch]]


class EncodedDataset:
    """Documents of the encode stage: `EncodedDataset(folder / 'held_out.arrow')[i]` is an `EncodedSample`."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)
        self._rows = ListColumns([self.path], ("input_ids", "labels"))

    def __len__(self) -> int:
        return len(self._rows)

    def rows(self) -> list[int]:
        """[N] which line of the trajectories' file each document was, from 0."""
        import pyarrow as pa

        with pa.memory_map(str(self.path)) as source, pa.ipc.open_file(source) as reader:
            return [int(row) for row in reader.read_all().column("row").to_pylist()]

    def __getitem__(self, index: int) -> EncodedSample:
        input_ids, labels = self._rows.row(index)
        return EncodedSample(input_ids=input_ids, labels=labels)

    def __reduce__(self) -> tuple[Any, ...]:
        return EncodedDataset, (self.path,)


class PackedDataset:
    """Rows of a shard folder: `len`, `[i]` -> `PackedRow`, and what is known of each row before it is read.

    Raises `DataError` when the index and the files do not agree.
    """

    num_tokens: np.ndarray
    """[N] int32 tokens of each row."""
    num_loss_tokens: np.ndarray
    """[N] int32 supervised tokens of each row."""
    num_documents: np.ndarray
    """[N] int32 documents of each row."""

    def __init__(self, folder: Path) -> None:
        import pyarrow as pa

        self.folder = Path(folder)
        try:
            self.index: dict[str, Any] = json.loads((self.folder / "index.json").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"cannot read index.json of the shards: {error}") from error
        files = [self.folder / shard["file"] for shard in self.index["shards"]]
        self._rows = ListColumns(files, ("input_ids", "labels", "seq_lens", "sample_ids"))
        with pa.OSFile(str(self.folder / "rows.arrow")) as source, pa.ipc.open_file(source) as reader:
            table = reader.read_all()
        self.num_tokens, self.num_loss_tokens, self.num_documents = (
            table.column(name).to_numpy() for name in ("num_tokens", "num_loss_tokens", "num_documents")
        )
        counts = {"index.json": self.index["num_rows"], "rows.arrow": table.num_rows, "shards": len(self._rows)}
        if len(set(counts.values())) != 1:
            raise DataError(f"the shard folder is not whole: numbers of rows differ: {counts}")

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PackedRow:
        input_ids, labels, seq_lens, sample_ids = self._rows.row(index)
        return PackedRow(input_ids=input_ids, labels=labels, seq_lens=seq_lens, sample_ids=sample_ids)

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedDataset, (self.folder,)
