"""Rows with documents for every loss, and a model so small that its outputs are looked up: token -> logits, hidden state, score."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from twinkle_core.loss import LOSSES, build_loss
from twinkle_core.loss.base import Loss, LossInputs, LossOutput, ModelOutputs
from twinkle_core.loss.log_probs import token_entropies, token_log_probs
from twinkle_core.types import IGNORE, DocumentKind, PackedRow

VOCABULARY, WIDTH = 7, 3
PAIR = (DocumentKind.CHOSEN, DocumentKind.REJECTED)
KINDS: dict[str, tuple[DocumentKind, ...]] = {
    **dict.fromkeys(("DPOLoss", "SimPOLoss", "CPOLoss", "ORPOLoss", "RewardModelLoss"), PAIR),
    "KTOLoss": (DocumentKind.DESIRABLE, DocumentKind.UNDESIRABLE),
    "InfonceLoss": (DocumentKind.ANCHOR, DocumentKind.POSITIVE, DocumentKind.NEGATIVE),
}
"""Kinds of the documents that lie together; of the others one PLAIN document."""
ARGUMENTS: dict[str, dict[str, Any]] = {
    "CrossEntropyLoss": {"dft": True},
    "ChunkedCrossEntropyLoss": {"chunk_size": 2, "label_smoothing": 0.1},
    "FusedLinearCrossEntropyLoss": {"chunk_size": 2, "label_smoothing": 0.1, "softcap": 3.0},
    "GKDLoss": {"chunk_size": 2, "beta": 0.3, "temperature": 2.0},
    "GRPOLoss": {"beta": 0.2, "entropy_coef": 0.1, "epsilon_high": 0.3},
    "GSPOLoss": {"epsilon": 0.1},
    "CISPOLoss": {"epsilon_low": 0.3},
    "DRGRPOLoss": {"max_completion_length": 5},
    "DPOLoss": {"label_smoothing": 0.1, "sft_weight": 0.5},
    "RewardModelLoss": {"center": 0.1},
    "InfonceLoss": {"use_batch": False},
}
NAMES = tuple(LOSSES)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Documents that belong together."""

    documents: tuple[tuple[int, ...], ...]
    """Token ids of each."""
    kinds: tuple[DocumentKind, ...]
    num_prompt_tokens: int = 1
    """Tokens at the start of each document that are not learnt."""
    weight: float | None = None
    """Weight of each of its tokens; None where rows have none."""


def make(name: str) -> Loss:
    loss = build_loss(name, ARGUMENTS.get(name))
    assert isinstance(loss, Loss)
    return loss


def random_part(name: str, seed: int, weight: float | None = None) -> Part:
    generator = np.random.default_rng(seed)
    kinds = KINDS.get(name, (DocumentKind.PLAIN,))
    if name == "KTOLoss":
        kinds = (kinds[seed % 2],)
    lengths = generator.integers(2, 7, len(kinds))
    documents = tuple(tuple(int(token) for token in generator.integers(0, VOCABULARY, length)) for length in lengths)
    return Part(documents=documents, kinds=kinds, num_prompt_tokens=int(generator.integers(0, min(lengths))), weight=weight)


def row(parts: Sequence[Part]) -> PackedRow:
    """The parts in one row."""
    documents = [(document, part) for part in parts for document in part.documents]
    labels = []
    for document, part in documents:
        learnt = [*document[1:], IGNORE]
        masked = min(max(0, part.num_prompt_tokens - 1), len(learnt))
        labels += [IGNORE] * masked + learnt[masked:]
    weights = [np.full(len(document), 1.0 if part.weight is None else part.weight, np.float32) for document, part in documents]
    return PackedRow(
        input_ids=np.array([token for document, _ in documents for token in document], dtype=np.int32),
        labels=np.array(labels, dtype=np.int32),
        seq_lens=np.array([len(document) for document, _ in documents], dtype=np.int32),
        sample_ids=np.arange(len(documents), dtype=np.int64),
        kinds=np.array([kind for part in parts for kind in part.kinds], dtype=np.int8),
        loss_weights=None if all(part.weight is None for part in parts) else np.concatenate(weights),
    )


class World:
    """Tables of a policy that is learnt, and of the old, reference and teacher ones."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)

        def table(width: int) -> torch.Tensor:
            return torch.randn(VOCABULARY, width, generator=generator, dtype=torch.float64)

        self.hidden, self.head = table(WIDTH).requires_grad_(), table(WIDTH).requires_grad_()
        self.old, self.reference, self.teacher = (0.3 * table(VOCABULARY) for _ in range(3))

    def inputs(self, rows: Sequence[PackedRow]) -> tuple[LossInputs, ModelOutputs]:
        """What each loss could ask for: every value depends on the tokens of its own document alone."""
        inputs = LossInputs.from_rows(rows)
        ids = torch.from_numpy(np.concatenate([one.input_ids for one in rows] or [np.empty(0, np.int32)]).astype(np.int64))
        learnt = torch.from_numpy(np.concatenate([one.labels != IGNORE for one in rows] or [np.empty(0, bool)]))
        seen = ids[learnt]
        documents = ids.split([int(length) for one in rows for length in one.seq_lens])
        hidden = self.hidden[seen]
        logits = hidden @ self.head.T
        means = [self.hidden[document].mean(dim=0) for document in documents if len(document)]
        embeddings = torch.stack(means) if means else self.hidden[:0]
        advantages = torch.tensor([float(document.sum() % 5) - 2.5 for document in documents if len(document)], dtype=torch.float64)
        known = replace(
            inputs,
            advantages=advantages,
            old_log_probs=token_log_probs(self.old[seen], inputs.labels),
            ref_log_probs=token_log_probs(self.reference[seen], inputs.labels),
            kl=0.2,
            teacher_logits=self.teacher[seen],
            targets=advantages + 0.5,
        )
        return known, ModelOutputs(
            log_probs=token_log_probs(logits, inputs.labels),
            logits=logits,
            entropies=token_entropies(logits),
            hidden=hidden,
            head_weight=self.head,
            embeddings=embeddings,
            scores=embeddings.sum(dim=1),
        )


Gradient = tuple[torch.Tensor, torch.Tensor]


def learn(loss: Callable[[LossInputs, ModelOutputs], LossOutput], micro_batches: Sequence[Sequence[PackedRow]]) -> tuple[float, Gradient]:
    """Mean loss and gradient of a step over the micro-batches: sums divided by the sum of weights."""
    world, total, weight = World(), 0.0, 0.0
    for rows in micro_batches:
        output = loss(*world.inputs(rows))
        output.loss_sum.backward()
        total, weight = total + output.loss_sum.item(), weight + output.weight
    gradients = [torch.zeros_like(table) if table.grad is None else table.grad / weight for table in (world.hidden, world.head)]
    return total / weight, (gradients[0], gradients[1])
