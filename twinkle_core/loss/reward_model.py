"""Scores that rank a chosen answer above a rejected one. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from twinkle_core.errors import ConfigError, DataError
from twinkle_core.loss.base import Loss, LossInputs, LossOutput, ModelOutputs, Need
from twinkle_core.types import DocumentKind


@dataclass(frozen=True, kw_only=True)
class RewardModelLoss(Loss):
    """-log sigmoid(s_c - s_r - margin) + center (s_c + s_r)^2, a mean over pairs: the Bradley-Terry model.

    https://arxiv.org/abs/2203.02155, eq. 1; the margin as https://arxiv.org/abs/2307.09288, eq. 2; the centring as
    https://arxiv.org/abs/2312.09244, section 3. All pairs count, whatever their labels: the score is of the whole document.
    """

    unit = "pair"

    center: float = 0.0
    """Weight of the term that keeps the scores of a pair around 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (self.center >= 0 and math.isfinite(self.center)):
            raise ConfigError(f"center is {self.center}; it is 0 or more")

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"scores"})

    def weight_of(self, document_weights: Sequence[float], kinds: Sequence[int]) -> float:
        return float(sum(kind == DocumentKind.CHOSEN for kind in kinds))

    def __call__(self, inputs: LossInputs, outputs: ModelOutputs) -> LossOutput:
        scores = self.given(outputs.scores, "scores")
        if scores.shape != (inputs.num_documents,):
            raise DataError(f"RewardModelLoss: scores have the shape {tuple(scores.shape)} for {inputs.num_documents} documents; one each")
        kinds = [DocumentKind(kind) for kind in inputs.kinds]
        if kinds != [DocumentKind.CHOSEN, DocumentKind.REJECTED] * (len(kinds) // 2):
            raise DataError(f"RewardModelLoss learns from pairs, chosen then rejected; the documents are {[kind.name for kind in kinds]}")
        chosen, rejected = scores[0::2], scores[1::2]
        gap = chosen - rejected
        if inputs.margins is not None:
            if inputs.margins.shape != gap.shape:
                raise DataError(f"RewardModelLoss: {len(inputs.margins)} margins for {len(gap)} pairs")
            gap = gap - inputs.margins
        losses = -torch.nn.functional.logsigmoid(gap)
        if self.center:
            losses = losses + self.center * (chosen + rejected) ** 2
        return self.output(inputs, losses.sum())
