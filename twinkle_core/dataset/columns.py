"""Encoded samples in memory: one buffer a column, not an object a sample."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twinkle_core.errors import DataError
from twinkle_core.template.multimodal import MultimodalSample
from twinkle_core.types import EncodedSample, PackedRow

_CHUNK = 1024


class SampleColumns:
    """Grows by samples, and gives each back by number as views of the buffers: 8 bytes a token, and 4 more once one has weights.

    Samples with images are kept as they are.
    """

    def __init__(self) -> None:
        self._waiting: list[EncodedSample] = []
        self._chunks: list[_Chunk] = []
        self.with_images: dict[int, MultimodalSample] = {}
        """Those that have images, by number."""

    def append(self, sample: EncodedSample | MultimodalSample) -> None:
        """Adds one sample at the end."""
        if isinstance(sample, MultimodalSample):
            self.with_images[len(self)] = sample
            sample = EncodedSample(input_ids=sample.input_ids, labels=sample.labels, seq_lens=sample.seq_lens, kinds=sample.kinds)
        self._waiting.append(sample)
        if len(self._waiting) == _CHUNK:
            self._chunks.append(_Chunk(self._waiting))
            self._waiting = []

    def __len__(self) -> int:
        return len(self._chunks) * _CHUNK + len(self._waiting)

    def __getitem__(self, index: int) -> EncodedSample | MultimodalSample:
        if not 0 <= index < len(self):
            raise IndexError(f"sample {index} of {len(self)}")
        if index in self.with_images:
            return self.with_images[index]
        number, at = divmod(index, _CHUNK)
        return self._chunks[number].sample(at) if number < len(self._chunks) else self._waiting[at]

    def lengths(self) -> np.ndarray:
        """[N] int64 number of tokens of each sample."""
        parts = [np.diff(chunk.tokens) for chunk in self._chunks]
        return np.concatenate([*parts, np.array([len(sample.input_ids) for sample in self._waiting], dtype=np.int64)])


class _Chunk:
    def __init__(self, samples: list[EncodedSample]) -> None:
        self.tokens = _offsets([len(sample.input_ids) for sample in samples])
        self.documents = _offsets([len(sample.seq_lens) for sample in samples])
        self.input_ids = np.concatenate([sample.input_ids for sample in samples])
        self.labels = np.concatenate([sample.labels for sample in samples])
        self.seq_lens = np.concatenate([sample.seq_lens for sample in samples])
        self.kinds = np.concatenate([sample.kinds for sample in samples])
        self.weighted = np.array([sample.loss_weights is not None for sample in samples])
        self.loss_weights = _weights(samples) if self.weighted.any() else None

    def sample(self, at: int) -> EncodedSample:
        tokens = slice(self.tokens[at], self.tokens[at + 1])
        documents = slice(self.documents[at], self.documents[at + 1])
        return EncodedSample(
            input_ids=self.input_ids[tokens],
            labels=self.labels[tokens],
            seq_lens=self.seq_lens[documents],
            kinds=self.kinds[documents],
            loss_weights=self.loss_weights[tokens] if self.loss_weights is not None and self.weighted[at] else None,
        )


def _offsets(lengths: list[int]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def packed_row(samples: Sequence[EncodedSample | MultimodalSample], sample_ids: Sequence[int] | np.ndarray) -> PackedRow:
    """The samples laid end to end as one row; `sample_ids` are their numbers, one a sample. Raises `DataError` for one with images."""
    if any(isinstance(sample, MultimodalSample) for sample in samples):
        raise DataError("samples with images are not packed: use Dataset, LazyDataset or IterableDataset for them")
    documents = [len(sample.seq_lens) for sample in samples]
    return PackedRow(
        input_ids=np.concatenate([sample.input_ids for sample in samples]),
        labels=np.concatenate([sample.labels for sample in samples]),
        seq_lens=np.concatenate([sample.seq_lens for sample in samples]),
        sample_ids=np.repeat(np.asarray(sample_ids, dtype=np.int64), documents),
        kinds=np.concatenate([sample.kinds for sample in samples]),
        loss_weights=_weights(samples) if any(sample.loss_weights is not None for sample in samples) else None,
    )


def _weights(samples: Sequence[EncodedSample | MultimodalSample]) -> np.ndarray:
    """[T] float32; 1 for the tokens of samples without weights."""
    return np.concatenate(
        [np.ones(len(sample.input_ids), dtype=np.float32) if sample.loss_weights is None else sample.loss_weights for sample in samples]
    )
