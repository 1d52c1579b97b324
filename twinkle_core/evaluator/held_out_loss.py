"""Cross-entropy and token accuracy on held-out documents, as sums over tokens, so that batching cannot change them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from twinkle_core.errors import DataError
from twinkle_core.types import IGNORE, EncodedSample, Progress

CHUNK_POSITIONS = 256
"""Positions whose logits are turned into float32 log-probabilities at once: bounds memory for large vocabularies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DocumentLoss:
    """Sums over the supervised tokens of one document."""

    loss_sum: float
    """Sum of the token losses, in nats."""
    num_loss_tokens: int
    num_correct: int
    """Supervised tokens that are the model's first choice."""


def document_losses(
    model: nn.Module, documents: Sequence[EncodedSample], progress: Progress, *, batch_tokens: int = 1024
) -> list[DocumentLoss]:
    """One `DocumentLoss` a document, in the order given.

    Documents are sorted by length and padded on the right to batches of at most `batch_tokens` tokens (a longer document goes alone).
    Padding is masked from attention and from the sums, so `batch_tokens` changes speed and memory, never the values beyond
    float rounding. Logits are computed only at positions that some document of the batch learns at.
    Raises `DataError` naming a document without a supervised token: its mean loss would be 0 / 0.
    """
    for index, document in enumerate(documents):
        if document.num_loss_tokens == 0:
            raise DataError(f"held-out document {index} has no supervised token: nothing can be measured on it; drop it before evaluation")
    results: dict[int, DocumentLoss] = {}
    for indices in _batches([len(document.input_ids) for document in documents], batch_tokens):
        results.update(zip(indices, _batch_losses(model, [documents[index] for index in indices]), strict=True))
        progress.advance(len(indices))
    return [results[index] for index in range(len(documents))]


def _batches(lengths: Sequence[int], batch_tokens: int) -> Iterator[list[int]]:
    order = sorted(range(len(lengths)), key=lambda index: (-lengths[index], index))
    start = 0
    while start < len(order):
        size = max(1, batch_tokens // lengths[order[start]])  # the first is the longest, and pads the others
        yield order[start : start + size]
        start += size


@torch.inference_mode()
def _batch_losses(model: nn.Module, documents: Sequence[EncodedSample]) -> list[DocumentLoss]:
    device = next(model.parameters()).device
    longest = max(len(document.input_ids) for document in documents)
    input_ids_BT = np.zeros((len(documents), longest), dtype=np.int64)
    labels_BT = np.full((len(documents), longest), IGNORE, dtype=np.int64)
    mask_BT = np.zeros((len(documents), longest), dtype=np.int64)
    for row, document in enumerate(documents):
        length = len(document.input_ids)
        input_ids_BT[row, :length] = document.input_ids
        labels_BT[row, :length] = document.labels
        mask_BT[row, :length] = 1
    positions_P = np.flatnonzero((labels_BT != IGNORE).any(axis=0))
    logits_BPV = model(
        input_ids=torch.from_numpy(input_ids_BT).to(device),
        attention_mask=torch.from_numpy(mask_BT).to(device),
        logits_to_keep=torch.from_numpy(positions_P).to(device),
        use_cache=False,
    ).logits
    labels_BP = torch.from_numpy(labels_BT[:, positions_P]).to(device)
    return [_sums(logits_BPV[row], labels_BP[row]) for row in range(len(documents))]


def _sums(logits_PV: torch.Tensor, labels_P: torch.Tensor) -> DocumentLoss:
    loss_sum, num_correct, num_loss_tokens = 0.0, 0, 0
    for logits, labels in zip(*(torch.split(whole, CHUNK_POSITIONS) for whole in (logits_PV, labels_P)), strict=True):
        learnt = labels != IGNORE
        logits, labels = logits[learnt].float(), labels[learnt]
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        loss_sum += float(losses.double().sum())  # float64: the sum must not depend on how it was cut
        num_correct += int((logits.argmax(dim=-1) == labels).sum())
        num_loss_tokens += len(labels)
    return DocumentLoss(loss_sum=loss_sum, num_loss_tokens=num_loss_tokens, num_correct=num_correct)
