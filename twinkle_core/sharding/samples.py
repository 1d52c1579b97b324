"""The encoded training samples as the shard stage sees them: what is known of each, and its tokens at the speed of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from twinkle_core.errors import DataError
from twinkle_core.types import IGNORE, DocumentKind


@dataclass(frozen=True, kw_only=True)
class _Batch:
    """Values of one record batch, in the mapped file."""

    input_ids: np.ndarray
    labels: np.ndarray
    loss_weights: np.ndarray
    seq_lens: np.ndarray
    kinds: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """Samples one after the other: T tokens in D documents."""

    input_ids: np.ndarray
    """[T] int32."""
    labels: np.ndarray
    """[T] int32."""
    seq_lens: np.ndarray
    """[D] int32."""
    kinds: np.ndarray
    """[D] int8."""
    loss_weights: np.ndarray | None
    """[T] float32, 1 for samples without weights; None where no sample has any."""


class Samples:
    """All samples of the files of a side, which stay mapped. About 70 bytes of memory a sample.

    Raises `DataError` naming a file that is no whole Arrow file.
    """

    num_tokens: np.ndarray
    """[N] int64."""
    num_documents: np.ndarray
    """[N] int64."""
    num_loss_tokens: np.ndarray
    """[N] int64 supervised tokens."""
    loss_weight: np.ndarray
    """[N] float64 sum of their weights."""
    weighted: np.ndarray
    """[N] bool: has weights of its own."""
    kinds: set[DocumentKind]
    """What the documents are for, all together."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._batches: list[_Batch] = []
        self.kinds = set()
        columns = [self._read(batch) for file in files for batch in _record_batches(file)]
        sizes = [len(column[0]) for column in columns]
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        types = (np.int64, np.int64, np.int64, np.int64, np.int64, np.int64, np.float64, np.bool_)
        joined: list[np.ndarray] = [
            np.concatenate([np.empty(0, kind), *(column[i] for column in columns)], dtype=kind) for i, kind in enumerate(types)
        ]
        self._first_token, self.num_tokens, self._first_document, self.num_documents = joined[:4]
        self._first_weight, self.num_loss_tokens, self.loss_weight, self.weighted = joined[4:]

    def __len__(self) -> int:
        return int(self._starts[-1])

    def gather(self, positions: np.ndarray) -> Gathered:
        """The samples at these positions [n] int64, in this order."""
        places = np.searchsorted(self._starts, positions, side="right") - 1
        batches = [self._batches[place] for place in places.tolist()]
        tokens = _slices(self._first_token, self.num_tokens, positions)
        documents = _slices(self._first_document, self.num_documents, positions)
        return Gathered(
            input_ids=np.concatenate([batch.input_ids[at] for batch, at in zip(batches, tokens, strict=True)]),
            labels=np.concatenate([batch.labels[at] for batch, at in zip(batches, tokens, strict=True)]),
            seq_lens=np.concatenate([batch.seq_lens[at] for batch, at in zip(batches, documents, strict=True)]),
            kinds=np.concatenate([batch.kinds[at] for batch, at in zip(batches, documents, strict=True)]),
            loss_weights=self._weights(batches, positions) if self.weighted[positions].any() else None,
        )

    def _weights(self, batches: list[_Batch], positions: np.ndarray) -> np.ndarray:
        parts = [
            batch.loss_weights[at] if weighted else np.ones(at.stop - at.start, dtype=np.float32)
            for batch, at, weighted in zip(
                batches, _slices(self._first_weight, self.num_tokens, positions), self.weighted[positions].tolist(), strict=True
            )
        ]
        return np.concatenate(parts)

    def _read(self, batch: Any) -> tuple[np.ndarray, ...]:
        """Keeps the values of a record batch; what is known of each of its samples, in the order of the constructor."""
        ids, labels, weights, seq_lens, kinds = (
            batch.column(name) for name in ("input_ids", "labels", "loss_weights", "seq_lens", "kinds")
        )
        values = [column.values.to_numpy(zero_copy_only=True) for column in (ids, labels, weights, seq_lens, kinds)]
        kept = _Batch(**dict(zip(("input_ids", "labels", "loss_weights", "seq_lens", "kinds"), values, strict=True)))
        self._batches.append(kept)
        self.kinds |= {DocumentKind(int(kind)) for kind in np.unique(kept.kinds)}
        tokens, documents, first_weight = (np.asarray(column.offsets, dtype=np.int64) for column in (ids, seq_lens, weights))
        weighted = weights.is_valid().to_numpy(zero_copy_only=False)
        supervised = np.concatenate([[0], np.cumsum(kept.labels != IGNORE, dtype=np.int64)])
        num_loss_tokens = np.diff(supervised[tokens])
        loss_weight = num_loss_tokens.astype(np.float64)
        for sample in np.flatnonzero(weighted):
            learnt = kept.labels[tokens[sample] : tokens[sample + 1]] != IGNORE
            loss_weight[sample] = kept.loss_weights[first_weight[sample] : first_weight[sample + 1]][learnt].sum(dtype=np.float64)
        return (
            tokens[:-1], np.diff(tokens), documents[:-1], np.diff(documents), first_weight[:-1], num_loss_tokens, loss_weight, weighted,
        )  # fmt: skip


def _slices(first: np.ndarray, lengths: np.ndarray, positions: np.ndarray) -> list[slice]:
    starts = first[positions]
    return list(map(slice, starts.tolist(), (starts + lengths[positions]).tolist()))


def _record_batches(path: Path) -> list[Any]:
    import pyarrow as pa

    try:
        reader = pa.ipc.open_file(pa.memory_map(str(path)))
        return [reader.get_batch(number) for number in range(reader.num_record_batches)]
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path.name} is not a whole Arrow file: {error}") from error
