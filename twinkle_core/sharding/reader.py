"""Reading what the stages encode and shard wrote: samples, and packed rows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Literal

import numpy as np

from storage.artifact import FileEntry
from storage.errors import NotFoundError
from storage.store import Store
from storage.transfer import local_folder
from storage.uri import join
from twinkle_core.errors import ConfigError, DamagedError, DataError
from twinkle_core.sharding.cache import ShardCache
from twinkle_core.sharding.columns import ListColumns
from twinkle_core.sharding.stored import StoredShards
from twinkle_core.types import DocumentKind, EncodedSample, PackedRow

SAMPLE_COLUMNS = ("input_ids", "labels", "loss_weights", "kinds", "seq_lens")
ROW_COLUMNS = ("input_ids", "labels", "loss_weights", "kinds", "sample_ids", "seq_lens")


class EncodedDataset:
    """Samples of the encode stage, of all parts of a side in order: `EncodedDataset(folder, 'held_out')[i]` is an `EncodedSample`.

    Raises `DataError` where a part is missing, damaged, or there is none.
    """

    def __init__(self, folder: Path, side: Literal["train", "held_out"] = "train") -> None:
        self.folder, self.side = Path(folder), side
        self._paths = sorted(self.folder.glob(f"{side}-*.arrow"))
        expected = [f"{side}-{number:05d}.arrow" for number in range(max(len(self._paths), 1))]
        if missing := sorted(set(expected) - {path.name for path in self._paths}):
            raise DataError(f"the encoded samples are not whole: there is no {missing[0]} in {self.folder.name}")
        self._rows = ListColumns(self._paths, SAMPLE_COLUMNS)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def num_tokens(self) -> np.ndarray:
        """[N] int64 tokens of each sample."""
        return self._rows.lengths("input_ids")

    def rows(self) -> list[int]:
        """[N] which line of the trajectories' file each sample came from, from 0."""
        import pyarrow as pa

        found: list[int] = []
        for path in self._paths:
            with pa.memory_map(str(path)) as source, pa.ipc.open_file(source) as reader:
                found += reader.read_all().column("row").to_pylist()
        return found

    def __getitem__(self, index: int) -> EncodedSample:
        input_ids, labels, loss_weights, kinds, seq_lens = self._rows.row(index)
        return EncodedSample(input_ids=input_ids, labels=labels, seq_lens=seq_lens, kinds=kinds, loss_weights=loss_weights)

    def __reduce__(self) -> tuple[Any, ...]:
        return EncodedDataset, (self.folder, self.side)


class PackedDataset:
    """Packed rows of the shard stage: `len`, `[i]` -> `PackedRow`, and what is known of each row before it is read.

    `PackedDataset(folder)` reads a local folder in place; `PackedDataset.open` reads a store, through a cache where it is
    remote. Raises `DataError` when the index and the files do not agree.
    """

    num_tokens: np.ndarray
    """[N] int32 tokens of each row."""
    num_loss_tokens: np.ndarray
    """[N] int32 supervised tokens of each row."""
    num_documents: np.ndarray
    """[N] int32 documents of each row."""
    loss_weight: np.ndarray
    """[N] float64 sum of the weights of each row's supervised tokens."""

    def __init__(self, folder: Path) -> None:
        folder = Path(folder)
        self._made_from: tuple[Any, ...] = (folder,)
        try:
            index, rows = (folder / "index.json").read_bytes(), (folder / "rows.arrow").read_bytes()
        except OSError as error:
            raise DataError(f"the shard folder is not whole: {error}") from error
        self._describe(index, rows)
        for shard in self.index["shards"]:
            path = folder / shard["file"]
            size = path.stat().st_size if path.is_file() else None
            if size != shard["bytes"]:
                found = "is missing" if size is None else f"has {size} bytes, not the {shard['bytes']} of the index"
                raise DataError(f"the shard folder is not whole: {shard['file']} {found}")
        self._rows: ListColumns | StoredShards = ListColumns([folder / shard["file"] for shard in self.index["shards"]], ROW_COLUMNS)
        if self._rows.rows_per_file != self.shard_rows:
            raise DataError(f"the shard folder is not whole: its files have {self._rows.rows_per_file} rows, the index {self.shard_rows}")

    @classmethod
    def open(cls, store: Store, prefix: str, files: Sequence[FileEntry], cache: ShardCache) -> PackedDataset:
        """The shards below `prefix`, of which an artifact's record lists `files`.

        A local store is verified and read in place. Of a remote one only the index is fetched here; shards come when their rows do.
        Raises `DamagedError` naming what is missing in the store or is not what the record says.
        """
        if store.local_path(prefix) is not None:
            return cls(local_folder(store, prefix, files, cache.folder))
        self = cls.__new__(cls)
        self._made_from = (store, prefix, tuple(files), cache)
        entries = {entry.path: entry for entry in files}
        self._describe(*(_fetch(store, prefix, entries, name) for name in ("index.json", "rows.arrow")))
        shards = []
        for shard in self.index["shards"]:
            entry = entries.get(shard["file"])
            if entry is None or (entry.size, entry.sha256) != (shard["bytes"], shard["sha256"]):
                raise DamagedError(
                    f"the index in {join(prefix, 'index.json')!r} of {store.url} and the record differ about {shard['file']}"
                )
            shards.append(entry)
        self._rows = StoredShards(store, prefix, shards, self.shard_rows, cache, ROW_COLUMNS)
        return self

    @property
    def shard_rows(self) -> list[int]:
        """Number of rows of each shard; rows are numbered through them."""
        return [shard["rows"] for shard in self.index["shards"]]

    @property
    def kinds(self) -> set[DocumentKind]:
        """What the documents are for."""
        return {DocumentKind[name] for name in self.index["kinds"]}

    def check_cache(self, num_shards: int) -> None:
        """Raises `ConfigError` where rows are to be shuffled among so many remote shards, and the cache may not hold these at once."""
        needed = sum(sorted((shard["bytes"] for shard in self.index["shards"]), reverse=True)[:num_shards])
        if isinstance(self._rows, StoredShards) and needed > self._rows.cache.max_bytes:
            raise ConfigError(
                f"rows are shuffled among {num_shards} shards at a time, which may have {needed} bytes, more than the shard cache "
                f"of {self._rows.cache.max_bytes}; raise resources.shard_cache_bytes, or lower train.shuffle_shards"
            )

    def reading(self, ahead: Iterable[np.ndarray]) -> AbstractContextManager[None]:
        """While the block runs, remote shards are fetched ahead, in the order in which the row numbers in `ahead` need them."""
        return self._rows.reading(ahead) if isinstance(self._rows, StoredShards) else nullcontext()

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> PackedRow:
        input_ids, labels, loss_weights, kinds, sample_ids, seq_lens = self._rows.row(index)
        return PackedRow(
            input_ids=input_ids, labels=labels, seq_lens=seq_lens, sample_ids=sample_ids, kinds=kinds, loss_weights=loss_weights
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return (PackedDataset if len(self._made_from) == 1 else PackedDataset.open), self._made_from

    def _describe(self, index: bytes, rows: bytes) -> None:
        import pyarrow as pa

        try:
            self.index: dict[str, Any] = json.loads(index)
            table = pa.ipc.open_file(pa.BufferReader(rows)).read_all()
        except ValueError as error:  # pyarrow's ArrowInvalid is one
            raise DataError(f"index.json or rows.arrow of the shards cannot be read: {error}") from error
        if missing := {"num_rows", "kinds", "shards"} - self.index.keys():
            raise DataError(f"index.json of the shards lacks {sorted(missing)}: it was made by another version; run the shard stage again")
        self.num_tokens, self.num_loss_tokens, self.num_documents, self.loss_weight = (
            table.column(name).to_numpy() for name in ("num_tokens", "num_loss_tokens", "num_documents", "loss_weight")
        )
        counts = {"index.json": self.index["num_rows"], "rows.arrow": table.num_rows, "shards": sum(self.shard_rows)}
        if len(set(counts.values())) != 1:
            raise DataError(f"the shard folder is not whole: numbers of rows differ: {counts}")


def _fetch(store: Store, prefix: str, entries: dict[str, FileEntry], name: str) -> bytes:
    """A small file of an artifact, verified."""
    if name not in entries:
        raise DamagedError(f"the record of {prefix!r} in {store.url} lists no {name}: these are no shards")
    try:
        data = store.get(join(prefix, name))
    except NotFoundError as error:
        raise DamagedError(f"{join(prefix, name)!r} is missing from {store.url}") from error
    if hashlib.sha256(data).hexdigest() != entries[name].sha256:
        raise DamagedError(f"{join(prefix, name)!r} in {store.url} is changed: it has another digest than its record")
    return data
