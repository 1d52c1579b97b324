"""From a model's answer to a loss: what each loss needs is computed, nothing else. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from twinkle_core.errors import ConfigError
from twinkle_core.loss.base import LossInputs, LossOutput, ModelOutputs
from twinkle_core.loss.cross_entropy import CrossEntropyLoss, token_losses
from twinkle_core.loss.log_probs import token_entropies, token_log_probs
from twinkle_core.model.forward import Answer, Forward
from twinkle_core.model.micro_batch import SCALARS, MicroBatch

LossFunction = Callable[[LossInputs, ModelOutputs], LossOutput]
PROVIDED = {"log_probs", "logits", "entropies", "hidden", "embeddings", "scores"}


@dataclass(frozen=True, kw_only=True)
class Part:
    """The loss of one micro-batch."""

    loss: torch.Tensor | None
    """Scalar sum, with its graph until the backward pass; None where nothing was computed."""
    num_loss_tokens: int
    weight: float
    """What the sum is divided by, once those of the whole batch are added up."""


def needs_of(loss: LossFunction | None) -> frozenset[str]:
    """The fields of `ModelOutputs` that a loss reads; plain cross-entropy (None) takes log-probabilities."""
    needs = frozenset(getattr(loss, "needs", {"log_probs"}))
    if needs - PROVIDED:
        raise ConfigError(f"{type(loss).__name__} needs {', '.join(sorted(needs - PROVIDED))}; a model gives {', '.join(sorted(PROVIDED))}")
    return needs


def is_plain(loss: LossFunction | None) -> bool:
    """Whether the loss is the sum of the (weighted) token losses, over their weight."""
    return loss is None or (type(loss) is CrossEntropyLoss and loss == CrossEntropyLoss(reduction=loss.reduction))


def to_compute(loss: LossFunction | None, forward: Forward, metrics: Sequence[Any]) -> frozenset[str]:
    """What the model is asked for: the plain loss itself, where it can give that and nobody looks at its parts; else what it is made of."""
    return frozenset({"loss"}) if is_plain(loss) and not metrics and forward.can_fuse() else needs_of(loss)


def loss_of(loss: LossFunction | None, answer: Answer, micro_batch: MicroBatch, forward: Forward, metrics: Sequence[Any] = ()) -> Part:
    """The loss of rows whose answer was computed. Without a loss: the sum of the (weighted) token losses, over their weight.

    Each of `metrics` (of kind 'forward', see `twinkle_core.metric.base`) is shown what the loss was made of.
    """
    rows = micro_batch.rows
    num_loss_tokens = sum(row.num_loss_tokens for row in rows)
    if answer.loss is not None:
        return Part(loss=answer.loss, num_loss_tokens=num_loss_tokens, weight=math.fsum(row.loss_weight for row in rows))
    is_empty = answer.logits is None and answer.hidden is None and answer.of_documents is None
    makes_no_parts = loss is None or micro_batch.is_filler or (num_loss_tokens == 0 and answer.of_documents is None)
    if makes_no_parts and (not metrics or is_empty or num_loss_tokens == 0):
        token_loss = None if is_empty else _plain_loss(answer)
        return Part(loss=token_loss, num_loss_tokens=num_loss_tokens, weight=math.fsum(row.loss_weight for row in rows))
    if len(answer.labels) != num_loss_tokens:
        raise ConfigError("the mesh cuts rows over ranks: only the plain cross-entropy, without metrics of its parts, is computed so")
    inputs = _inputs(answer, micro_batch, forward.device)
    outputs = _outputs(needs_of(loss).union(*(metric.needs for metric in metrics)), answer, forward)
    if loss is None:
        output = LossOutput(loss_sum=_plain_loss(answer), weight=math.fsum(row.loss_weight for row in rows))
    else:
        output = loss(inputs, outputs)
    if not isinstance(output, LossOutput):
        raise ConfigError(f"the loss {loss!r} gave a {type(output).__name__}; a loss gives LossOutput(loss_sum=…, weight=…)")
    for metric in metrics:
        metric.accumulate(inputs, outputs, output)
    return Part(loss=output.loss_sum, num_loss_tokens=num_loss_tokens, weight=float(output.weight))


def _plain_loss(answer: Answer) -> torch.Tensor:
    if answer.logits is None:  # a filler, for a loss over hidden states, embeddings or scores
        some = answer.hidden if answer.hidden is not None else answer.of_documents
        return some.sum() * 0.0 if some is not None else torch.zeros(())
    token_loss = token_losses(answer.logits, answer.labels)
    return token_loss.sum() if answer.weights is None else (token_loss * answer.weights).sum()


def _inputs(answer: Answer, micro_batch: MicroBatch, device: torch.device) -> LossInputs:
    given: dict[str, Any] = {}
    for name, value in micro_batch.loss_inputs.items():
        given[name] = value if name in SCALARS else _joined(value).to(device)
    return replace(LossInputs.from_rows(micro_batch.rows, device), **given)


def _joined(values: Sequence[Any]) -> torch.Tensor:
    """The rows' numbers or arrays, one after the other."""
    joined = np.concatenate([np.atleast_1d(np.asarray(value)) for value in values])
    return torch.from_numpy(joined if joined.dtype.kind in "iu" else joined.astype(np.float32))


def _outputs(needs: Collection[str], answer: Answer, forward: Forward) -> ModelOutputs:
    if answer.hidden is not None:
        return ModelOutputs(hidden=answer.hidden, head_weight=forward.head_weight())
    if answer.logits is None:
        return ModelOutputs(embeddings=answer.embeddings, scores=answer.scores)
    return ModelOutputs(
        log_probs=token_log_probs(answer.logits, answer.labels) if "log_probs" in needs else None,
        logits=answer.logits if "logits" in needs else None,
        entropies=token_entropies(answer.logits) if "entropies" in needs else None,
    )
