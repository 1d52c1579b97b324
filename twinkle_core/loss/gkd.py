"""Generalised knowledge distillation: a student near its teacher, token by token. Imports torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.utils.checkpoint import checkpoint

from twinkle_core.errors import ConfigError, DataError
from twinkle_core.loss.base import Loss, LossInputs, LossOutput, ModelOutputs, Need
from twinkle_core.loss.cross_entropy import _wide


@dataclass(frozen=True, kw_only=True)
class GKDLoss(Loss):
    """beta KL(T || M) + (1 - beta) KL(S || M) with M = beta T + (1 - beta) S, a mean over tokens; https://arxiv.org/abs/2306.13649, eq. 1.

    T is the teacher's distribution, S the student's. beta = 0 is forward KL(T || S), beta = 1 reverse KL(S || T): the limits of the
    formula divided by beta and by 1 - beta. The teacher comes as full logits, or as the log-probabilities of its K likeliest tokens;
    with K tokens (or `topk`) both distributions are taken over these alone and made to sum to 1, as Twinkle does: what the student
    gives to other tokens is then not seen. A token without a label is not among the inputs; none at all gives 0 with a graph.
    """

    beta: float = 0.5
    temperature: float = 1.0
    """Divides the logits of both. The loss is not multiplied by its square."""
    chunk_size: int = 512
    """Tokens at a time; between the passes only the logits themselves are kept."""
    topk: int | None = None
    """Take the teacher's K largest logits only."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.beta <= 1:
            raise ConfigError(f"beta is {self.beta}; it lies in [0, 1]")
        if not self.temperature > 0 or self.chunk_size < 1 or (self.topk is not None and self.topk < 1):
            raise ConfigError(f"temperature {self.temperature}, chunk_size {self.chunk_size}, topk {self.topk}: each is above 0")

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"logits"})

    def __call__(self, inputs: LossInputs, outputs: ModelOutputs) -> LossOutput:
        logits = self.given(outputs.logits, "logits")
        teacher, ids = self._teacher(inputs, logits)
        weights = logits.new_ones(len(logits), dtype=_wide(logits[:0]).dtype) if inputs.weights is None else inputs.weights
        total = _wide(logits[:0]).sum()
        for start in range(0, len(logits), self.chunk_size):
            part = slice(start, start + self.chunk_size)
            args = logits[part], teacher[part], None if ids is None else ids[part], weights[part]
            total = total + checkpoint(self._chunk, *args, use_reentrant=False)
        return self.output(inputs, total)

    def _teacher(self, inputs: LossInputs, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Teacher's logits and, where they are of some tokens only, which."""
        if inputs.teacher_top_log_probs is not None:
            if inputs.teacher_logits is not None:
                raise DataError("GKDLoss: teacher_logits and teacher_top_log_probs are both given; give one")
            ids = self.given(inputs.teacher_top_ids, "teacher_top_ids")
            found = inputs.teacher_top_log_probs
            if ids.shape != found.shape or (self.topk or found.shape[1]) > found.shape[1]:
                raise DataError(f"GKDLoss: {tuple(found.shape)} log-probabilities for ids {tuple(ids.shape)} and topk {self.topk}")
            return found[:, : self.topk].detach(), ids[:, : self.topk]
        found = self.given(inputs.teacher_logits, "teacher_logits", " or teacher_top_log_probs").detach()
        if found.shape != logits.shape:
            raise DataError(
                f"GKDLoss: teacher_logits are {tuple(found.shape)}, the student's {tuple(logits.shape)}: they need one vocabulary"
            )
        return (found, None) if self.topk is None else found.topk(min(self.topk, found.shape[1]), dim=-1)

    def _chunk(self, logits: torch.Tensor, teacher: torch.Tensor, ids: torch.Tensor | None, weights: torch.Tensor) -> torch.Tensor:
        seen = _wide(logits if ids is None else logits.gather(1, ids))
        student_lp = (seen / self.temperature).log_softmax(dim=-1)
        teacher_lp = (teacher.to(seen.dtype) / self.temperature).log_softmax(dim=-1)
        return (_divergence(student_lp, teacher_lp, self.beta) * weights).sum()


def _divergence(student: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """[C] divergences of log-probabilities [C, K]."""
    if beta == 0:
        return _kl(teacher, student)
    if beta == 1:
        return _kl(student, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), student + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)


def _kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    return (p.exp() * (p - q)).sum(dim=-1)
