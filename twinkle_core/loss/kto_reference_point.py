"""KTO's reference point: how far the policy is from its reference on answers that do not belong to their prompts. Imports no torch.

https://arxiv.org/abs/2402.01306, section 4.1: z_ref = max(0, mean over the batch of log pi(y' | x) - log ref(y' | x)), y' the answer of
another example.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from twinkle_core.errors import DataError
from twinkle_core.types import IGNORE, DocumentKind, PackedRow


def mismatched(rows: Sequence[PackedRow]) -> list[PackedRow]:
    """For each judged document, in order, a row of its prompt and the answer of the document before it (of the first: the last).

    https://arxiv.org/abs/2402.01306, section 4.1. The prompt is what comes before the first supervised token; the answer, the rest,
    keeps its labels.
    Example: documents `a b | c d` and `e | f` ('|' before the answer) give `a b | f` and `e | c d`.
    Raises `DataError` unless there are two documents with an answer.
    """
    documents = [document for row in rows for document in _split(row)]
    if len(documents) < 2:
        raise DataError(f"{len(documents)} documents of the batch have a supervised token: answers for others' prompts need two at least")
    made = []
    for number, (prompt, _, _) in enumerate(documents):
        _, answer, labels = documents[number - 1]
        ids = np.concatenate([prompt, answer])
        made.append(
            PackedRow(
                input_ids=ids,
                labels=np.concatenate([np.full(len(prompt) - 1, IGNORE, labels.dtype), labels]),
                seq_lens=np.array([len(ids)], dtype=np.int32),
                sample_ids=np.zeros(1, dtype=np.int64),
                kinds=np.array([int(DocumentKind.PLAIN)], dtype=np.int8),
            )
        )
    return made


def reference_point(policy: Sequence[np.ndarray], reference: Sequence[np.ndarray]) -> float:
    """max(0, mean over documents of the summed difference), nats; `kl` of `KTOLoss`. Each [S] log-probabilities of one document's labels.

    https://arxiv.org/abs/2402.01306, section 4.1. Over several ranks or batches: it is that of the documents given.
    Raises `DataError` where the two do not fit or are not finite.
    """
    if not policy or [len(part) for part in policy] != [len(part) for part in reference]:
        raise DataError(f"log-probabilities of {len(policy)} and {len(reference)} documents, of the same labels each, are needed")
    gaps = [
        math.fsum((ours.astype(np.float64) - theirs.astype(np.float64)).tolist()) for ours, theirs in zip(policy, reference, strict=True)
    ]
    point = math.fsum(gaps) / len(gaps)
    if not math.isfinite(point):
        raise DataError(f"the reference point is {point}: look at the log-probabilities")
    return max(0.0, point)


def _split(row: PackedRow) -> list[tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """(prompt, answer, labels from the prompt's last token on) of each document that has a supervised token."""
    found = []
    ends = np.cumsum(row.seq_lens)
    for start, end in zip(ends - row.seq_lens, ends, strict=True):
        ids, labels = row.input_ids[start:end], row.labels[start:end]
        learnt = np.flatnonzero(labels != IGNORE)
        if len(learnt):
            first = int(learnt[0])
            found.append((ids[: first + 1], ids[first + 1 :], labels[first:]))
    return found
