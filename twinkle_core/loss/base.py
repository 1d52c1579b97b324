"""What a loss takes and gives. A loss is a sum and the weight to divide it by; whoever knows the whole batch divides, once.

The gradient of a step is d(sum of `loss_sum`) / (sum of `weight`) over all micro-batches of all ranks, so that any split
gives the same. `Loss.row_weight` tells the weight of a row before its forward pass, from its labels alone.
Imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

import numpy as np
import torch

from twinkle_core.errors import ConfigError, DataError
from twinkle_core.types import IGNORE, DocumentKind, EncodedSample, PackedRow

Unit = Literal["token", "sequence", "pair", "document", "anchor"]
"""What a loss is a mean over.

token: supervised tokens, each counting as its weight. sequence: documents with a supervised token of weight above 0.
pair: chosen documents (each with its rejected one) with such a token. document: all documents. anchor: documents of kind ANCHOR.
"""
Need = Literal["log_probs", "logits", "entropies", "hidden", "embeddings", "scores"]
"""A field of `ModelOutputs`; `hidden` means `hidden` and `head_weight`."""


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What is known of a micro-batch besides the model's outputs: S supervised tokens of D documents, in the rows' order.

    Example: documents with the labels `[IGNORE, 7, 8, IGNORE]` and `[9, IGNORE]` have `labels == [7, 8, 9]`,
    `num_loss_tokens == (2, 1)` and `documents == [0, 0, 1]`.
    """

    labels: torch.Tensor
    """[S] int64 tokens to predict."""
    num_loss_tokens: tuple[int, ...]
    """[D] supervised tokens of each document, sum S; 0 where a document has none."""
    kinds: tuple[int, ...] = ()
    """[D] `DocumentKind`s; all PLAIN when not given. A REJECTED document follows its CHOSEN one, POSITIVE and NEGATIVEs their ANCHOR."""
    weights: torch.Tensor | None = None
    """[S] float32 weight of each token; None weighs all 1."""
    document_weights: tuple[float, ...] = ()
    """[D] sum of the token weights of each document; found from `weights` when not given (which waits for the device)."""
    advantages: torch.Tensor | None = None
    """[D] advantage of each document."""
    token_advantages: torch.Tensor | None = None
    """[S] advantage of each token; used in place of `advantages`."""
    old_log_probs: torch.Tensor | None = None
    """[S] log-probability in nats of each label under the policy that sampled it."""
    ref_log_probs: torch.Tensor | None = None
    """[S] the same under the reference model."""
    kl: float | torch.Tensor | None = None
    """Scalar, nats: KTO's reference point, an estimate of KL(policy || reference) over the whole batch."""
    teacher_logits: torch.Tensor | None = None
    """[S, V] teacher's logits."""
    teacher_top_log_probs: torch.Tensor | None = None
    """[S, K] teacher's K largest log-probabilities."""
    teacher_top_ids: torch.Tensor | None = None
    """[S, K] int64, the tokens they belong to."""
    targets: torch.Tensor | None = None
    """[D] or [D, C] values to predict (regression)."""
    margins: torch.Tensor | None = None
    """[P] by how much a pair's chosen score should exceed the rejected one."""

    def __post_init__(self) -> None:
        if not self.kinds:
            object.__setattr__(self, "kinds", (int(DocumentKind.PLAIN),) * len(self.num_loss_tokens))
        if not self.document_weights:
            parts = [float(n) for n in self.num_loss_tokens]
            if self.weights is not None:
                parts = [math.fsum(part.tolist()) for part in self.weights.split(list(self.num_loss_tokens))]
            object.__setattr__(self, "document_weights", tuple(parts))
        tokens, documents = len(self.labels), len(self.num_loss_tokens)
        if sum(self.num_loss_tokens) != tokens or {len(self.kinds), len(self.document_weights)} != {documents}:
            raise DataError(f"{tokens} labels for documents of {self.num_loss_tokens} supervised tokens and {len(self.kinds)} kinds")
        for names, length in ((_PER_TOKEN, tokens), (_PER_DOCUMENT, documents)):
            for name in names:
                value = getattr(self, name)
                if value is not None and len(value) != length:
                    raise DataError(f"{name} has {len(value)} entries for {length} {'tokens' if names is _PER_TOKEN else 'documents'}")
        for name in ("advantages", "token_advantages"):
            value = getattr(self, name)
            if value is not None and value.device.type == "cpu" and not bool(value.isfinite().all()):
                raise DataError(f"{name} are not all finite: {value.tolist()[:8]}; look at the rewards they come from")

    @classmethod
    def from_rows(cls, rows: Sequence[EncodedSample | PackedRow], device: torch.device | str = "cpu") -> LossInputs:
        """What the rows themselves tell; `dataclasses.replace` adds the rest."""
        labels = np.concatenate([row.labels for row in rows] or [np.empty(0, dtype=np.int32)])
        taken = labels != IGNORE
        weights = None
        if any(row.loss_weights is not None for row in rows):
            given = [np.ones(len(row.labels), np.float32) if row.loss_weights is None else row.loss_weights for row in rows]
            weights = torch.from_numpy(np.concatenate(given)[taken].astype(np.float32)).to(device, non_blocking=True)
        documents = [document for row in rows for document in _documents(row)]
        return cls(
            labels=torch.from_numpy(labels[taken].astype(np.int64)).to(device, non_blocking=True),
            num_loss_tokens=tuple(count for count, _, _ in documents),
            document_weights=tuple(weight for _, weight, _ in documents),
            kinds=tuple(kind for _, _, kind in documents),
            weights=weights,
        )

    @property
    def num_documents(self) -> int:
        return len(self.num_loss_tokens)

    @cached_property
    def documents(self) -> torch.Tensor:
        """[S] int64, the document of each token."""
        counts = torch.tensor(self.num_loss_tokens, dtype=torch.int64)
        return torch.repeat_interleave(torch.arange(len(counts)), counts).to(self.labels.device, non_blocking=True)

    def weighted(self, values: torch.Tensor) -> torch.Tensor:
        """[S] the values times the token weights."""
        return values if self.weights is None else values * self.weights.to(values.dtype)

    def document_sums(self, values: torch.Tensor) -> torch.Tensor:
        """[D] weighted sum of [S] `values` in each document; 0, with a graph, where it has no token."""
        return values.new_zeros(self.num_documents).index_add(0, self.documents, self.weighted(values))

    def document_means(self, values: torch.Tensor) -> torch.Tensor:
        """[D] weighted mean of [S] `values` in each document; 0 where its tokens weigh nothing."""
        return self.document_sums(values) / self.per_document([weight or 1.0 for weight in self.document_weights], values)

    def per_document(self, values: Sequence[float], like: torch.Tensor) -> torch.Tensor:
        """The values as a tensor of the type and on the device of `like`."""
        return torch.tensor(values, dtype=like.dtype).to(like.device, non_blocking=True)

    def supervised(self) -> list[int]:
        """Numbers of the documents with a supervised token of weight above 0."""
        return [number for number, weight in enumerate(self.document_weights) if weight > 0]


_PER_TOKEN = ("weights", "token_advantages", "old_log_probs", "ref_log_probs", "teacher_logits", "teacher_top_log_probs", "teacher_top_ids")
_PER_DOCUMENT = ("advantages", "targets")


@dataclass(frozen=True, kw_only=True)
class ModelOutputs:
    """What the model gave for a micro-batch; a worker fills in what `Loss.needs` names. S, D as in `LossInputs`."""

    log_probs: torch.Tensor | None = None
    """[S] float32 log-probability in nats of each label."""
    logits: torch.Tensor | None = None
    """[S, V] logits at the supervised positions."""
    entropies: torch.Tensor | None = None
    """[S] entropy in nats of each prediction."""
    hidden: torch.Tensor | None = None
    """[S, H] hidden states that go into the output head."""
    head_weight: torch.Tensor | None = None
    """[V, H] weight of the output head."""
    embeddings: torch.Tensor | None = None
    """[D, E] embedding of each document."""
    scores: torch.Tensor | None = None
    """[D] or [D, C] value(s) of each document, of a regression or reward head."""


@dataclass(frozen=True, kw_only=True)
class LossOutput:
    """A loss of a micro-batch. Example: two tokens with losses 0.5 and 2 have `loss_sum` 2.5 and `weight` 2."""

    loss_sum: torch.Tensor
    """Scalar with a graph; 0 with a graph where nothing is learnt, so that every rank can go backwards."""
    weight: float
    """What the sum is to be divided by, once summed over the global batch."""


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A loss; a subclass is one algorithm, its fields the settings."""

    unit: ClassVar[Unit] = "token"

    ignore_index: int = IGNORE
    """Label of what is not learnt. The whole data path has one, so only that is taken."""

    def __post_init__(self) -> None:
        if self.ignore_index != IGNORE:
            raise ConfigError(f"{type(self).__name__}: ignore_index is {self.ignore_index}; labels that are not learnt are {IGNORE} here")

    @property
    def needs(self) -> frozenset[Need]:
        """The fields of `ModelOutputs` that it reads."""
        return frozenset({"log_probs"})

    def __call__(self, inputs: LossInputs, outputs: ModelOutputs) -> LossOutput:
        """Raises `DataError` where an input that the loss needs is missing or does not fit."""
        raise NotImplementedError(f"{type(self).__name__} has no __call__")

    def weight_of(self, document_weights: Sequence[float], kinds: Sequence[int]) -> float:
        """The weight of documents, each with the sum of its supervised tokens' weights and its kind, by `unit`."""
        if self.unit == "token":
            return math.fsum(document_weights)
        if self.unit == "sequence":
            return float(sum(weight > 0 for weight in document_weights))
        if self.unit == "pair":
            pairs = zip(document_weights, kinds, strict=True)
            return float(sum(weight > 0 and kind == DocumentKind.CHOSEN for weight, kind in pairs))
        if self.unit == "document":
            return float(len(kinds))
        return float(sum(kind == DocumentKind.ANCHOR for kind in kinds))

    def row_weight(self, row: EncodedSample | PackedRow) -> float:
        """What the row adds to `LossOutput.weight`, known without a forward pass."""
        documents = _documents(row)
        return self.weight_of([weight for _, weight, _ in documents], [kind for _, _, kind in documents])

    def given(self, value: torch.Tensor | None, name: str, why: str = "") -> torch.Tensor:
        """The value; raises `DataError` where it is missing, since the loss would learn nothing or something else."""
        if value is None:
            raise DataError(f"{type(self).__name__} needs {name}{why}, and none were given")
        return value

    def log_probs(self, inputs: LossInputs, outputs: ModelOutputs) -> torch.Tensor:
        """[S] the outputs' log-probabilities; raises `DataError` where they are missing or not one a label."""
        found = self.given(outputs.log_probs, "log_probs")
        if found.shape != inputs.labels.shape:
            raise DataError(f"{type(self).__name__}: log_probs have the shape {tuple(found.shape)} for {len(inputs.labels)} labels")
        return found

    def output(self, inputs: LossInputs, loss_sum: torch.Tensor) -> LossOutput:
        return LossOutput(loss_sum=loss_sum, weight=self.weight_of(inputs.document_weights, inputs.kinds))

    def pairs(self, inputs: LossInputs) -> tuple[list[int], list[int]]:
        """Numbers of the chosen and of the rejected documents of all pairs with a supervised token.

        Raises `DataError` for a supervised document outside a pair, and a pair of which only one side is supervised.
        """
        chosen, rejected = [], []
        weights, kinds = inputs.document_weights, inputs.kinds
        for number, (weight, kind) in enumerate(zip(weights, kinds, strict=True)):
            if kind == DocumentKind.CHOSEN:
                if kinds[number + 1 : number + 2] != (DocumentKind.REJECTED,):
                    raise DataError(f"{type(self).__name__}: chosen document {number} is not followed by its rejected one")
                if (weight > 0) != (weights[number + 1] > 0):
                    raise DataError(f"{type(self).__name__}: only one side of the pair at document {number} has a supervised token")
                if weight > 0:
                    chosen.append(number)
                    rejected.append(number + 1)
            elif kind == DocumentKind.REJECTED:
                if number == 0 or kinds[number - 1] != DocumentKind.CHOSEN:
                    raise DataError(f"{type(self).__name__}: rejected document {number} does not follow a chosen one")
            elif weight > 0:
                what = DocumentKind(kind).name
                raise DataError(f"{type(self).__name__} learns from pairs, but document {number} is {what}")
        return chosen, rejected


def _documents(row: EncodedSample | PackedRow) -> list[tuple[int, float, int]]:
    """Number of supervised tokens, sum of their weights, and kind of each document of a row."""
    taken = row.labels != IGNORE
    weights = taken if row.loss_weights is None else taken * row.loss_weights.astype(np.float64)
    starts = np.cumsum(row.seq_lens) - row.seq_lens
    bounds = [(int(start), int(start + length)) for start, length in zip(starts, row.seq_lens, strict=True)]
    return [
        (int(taken[start:end].sum()), math.fsum(weights[start:end].tolist()), int(kind))
        for (start, end), kind in zip(bounds, row.kinds, strict=True)
    ]
