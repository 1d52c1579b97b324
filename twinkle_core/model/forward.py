"""The forward pass over packed rows: what is computed of the model, at which positions. Imports torch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from twinkle_core.errors import ConfigError
from twinkle_core.kernel import packed_attention
from twinkle_core.kernel.fused_head import changed_by, has_plain_head, supervised_loss
from twinkle_core.kernel.varlen_attention import Kernel
from twinkle_core.loss.cross_entropy import token_losses
from twinkle_core.model.heads import check_needs, check_whole_rows, last_hidden_states, sequence_scores
from twinkle_core.model.placement import Placement
from twinkle_core.processor.base import Row
from twinkle_core.types import IGNORE

COMPUTE_TYPES = {"no": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The model's answer at the S supervised positions of some rows, in their order, and of their D documents."""

    labels: torch.Tensor
    """[S] int64."""
    weights: torch.Tensor | None = None
    """[S] float32 loss weights, where some row has them."""
    logits: torch.Tensor | None = None
    """[S, V] of the compute type."""
    hidden: torch.Tensor | None = None
    """[S, H] what goes into the head, where it was asked for."""
    embeddings: torch.Tensor | None = None
    """[D, H] float32: the last token's hidden state of each document, scaled to length 1, where it was asked for."""
    scores: torch.Tensor | None = None
    """[D] or [D, C] float32: what the head of a model for sequences gives each document, where it was asked for."""

    @property
    def of_documents(self) -> torch.Tensor | None:
        """What was asked for of each document, labels or not."""
        return self.embeddings if self.scores is None else self.scores

    loss: torch.Tensor | None = None
    """float32 scalar, with its graph: the weighted sum of the token losses, where it was asked for."""


class Forward:
    """Runs a placed model on rows laid end to end. A processor is what collates them (see `InputProcessor.collate`)."""

    def __init__(
        self, model: PreTrainedModel, placement: Placement, device: torch.device, mixed_precision: str, kernel: Kernel = "flash2"
    ) -> None:
        self.model = model
        self.device = device
        self._placement = placement
        self._type = COMPUTE_TYPES[mixed_precision]
        self._kernel = kernel
        self.is_half = False
        """All parameters that take part are of the compute type: no operation has to cast."""
        self.is_patched = False
        """Somebody changed how the model computes, perhaps what becomes of its logits."""

    def can_fuse(self) -> bool:
        """Whether `answer` gives 'loss', made without logits (`kernel/fused_head.py`)."""
        return not self.is_patched and has_plain_head(self.model)

    def answer(self, rows: Sequence[Row], processor: Any, needs: Collection[str] = (), temperature: float = 1.0) -> Answer:
        """Logits, or in their place `hidden`, `embeddings`, `scores` or `loss` (names of `needs`).

        Nothing is computed where no label would be predicted, unless all ranks have to join: then one position, without a label.
        """
        if not temperature > 0:
            raise ConfigError(f"temperature is {temperature}; it must be above 0")
        check_needs(self.model, needs or ("log_probs",))
        check_whole_rows(self.model, self._placement, needs)
        batch = self._placement.cut(processor.collate(rows))
        labels = batch["labels"][0]
        positions = (labels != IGNORE).nonzero()[:, 0]
        if "embeddings" in needs:
            return Answer(labels=self._sent(labels[positions]), embeddings=self._embeddings(batch))
        if "scores" in needs:
            return Answer(labels=self._sent(labels[positions]), scores=self._scores(batch))
        if not len(positions):
            if not self._placement.joins_all:
                return Answer(labels=labels[positions])
            positions = torch.zeros(1, dtype=torch.int64)
        weights = batch.get("loss_weights")
        chosen = self._sent(labels[positions])
        weights = None if weights is None else self._sent(weights[0][positions])
        positions = self._sent(positions)
        if "loss" in needs:
            with self.autocast():
                loss = supervised_loss(self.model, self._inputs(batch), positions, chosen, weights)
            return Answer(labels=chosen, weights=weights, loss=loss)
        if "hidden" in needs:
            return Answer(labels=chosen, weights=weights, hidden=self._hidden(batch)[positions])
        with self.autocast():
            output = self.model(**self._inputs(batch), logits_to_keep=positions, use_cache=False)
        logits = output.logits.squeeze(0)  # indexing would copy the whole gradient into zeros
        return Answer(labels=chosen, weights=weights, logits=logits if temperature == 1.0 else logits / temperature)

    def head_weight(self) -> torch.Tensor:
        """[V, H]. Raises `ConfigError` where logits are not its product with the hidden states."""
        head = self.model.get_output_embeddings()
        scaled = changed_by(self.model)
        if type(head) is not torch.nn.Linear or head.bias is not None or scaled:
            why = f"its {', '.join(scaled)}" if scaled else f"a head of type {type(head).__name__}"
            raise ConfigError(f"a loss over hidden states cannot be used with this model: {why}; use CrossEntropyLoss")
        return head.weight

    def autocast(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._type is torch.float32 or self.is_half else torch.autocast(self.device.type, dtype=self._type)

    def _embeddings(self, batch: dict[str, Any]) -> torch.Tensor:
        last = self._sent(torch.from_numpy(np.cumsum(batch["seq_lens"]) - 1))
        return torch.nn.functional.normalize(self._hidden(batch)[last].float(), dim=-1)

    def _hidden(self, batch: dict[str, Any]) -> torch.Tensor:
        with self.autocast():
            return last_hidden_states(self.model, self._inputs(batch))

    def _scores(self, batch: dict[str, Any]) -> torch.Tensor:
        last = self._sent(torch.from_numpy(np.cumsum(batch["seq_lens"]) - 1))
        with self.autocast():
            return sequence_scores(self.model, self._inputs(batch), last)

    def _inputs(self, batch: dict[str, Any]) -> dict[str, Any]:
        tensors = {
            name: self._sent(value)
            for name, value in batch.items()
            if isinstance(value, torch.Tensor) and name not in ("labels", "loss_weights")
        }
        lengths = [int(length) for length in batch["seq_lens"]]
        if self.model.config._attn_implementation == packed_attention.NAME:
            return tensors | packed_attention.document_boundaries(lengths, self.device, self._kernel)
        return tensors | {"seq_lens": lengths}

    def _sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """On the device, without waiting for it."""
        return tensor if self.device.type == "cpu" else tensor.pin_memory().to(self.device, non_blocking=True)


def ratings(answer: Answer, rows: Sequence[Row], returned: Collection[str] = ()) -> list[dict[str, Any]]:
    """For each row `loss_sum` in nats, `num_loss_tokens`, `num_correct`, and what `returned` names.

    `logps` [S] float32 log-probability of each label, `logits` [S, V] float32, or in place of all `embeddings` [D, H] or
    `scores` [D] or [D, C] float32.
    """
    if answer.of_documents is not None:
        parts = answer.of_documents.cpu().split([len(row.seq_lens) for row in rows])
        return [{"embeddings" if answer.scores is None else "scores": part.numpy()} for part in parts]
    counts = [row.num_loss_tokens for row in rows]
    total = sum(counts)
    if answer.hidden is not None:
        return [{"num_loss_tokens": count} for count in counts]
    logits = answer.logits[:total] if answer.logits is not None else torch.zeros(0, 1)
    labels = answer.labels[:total].to(logits.device)
    losses = token_losses(logits, labels) if total else torch.zeros(0)
    correct = logits.argmax(dim=-1) == labels
    rated: list[dict[str, Any]] = [
        {"loss_sum": float(loss.sum()), "num_loss_tokens": count, "num_correct": int(right.sum())}
        for loss, right, count in zip(losses.split(counts), correct.split(counts), counts, strict=True)
    ]
    more = {"logps": -losses, "logits": logits.float()}
    for name in returned:
        for row, part in zip(rated, more[name].split(counts), strict=True):
            row[name] = part.cpu().numpy()
    return rated


def compute_type(mixed_precision: str, device: torch.device) -> torch.dtype:
    """Raises `ConfigError` where the card cannot compute in it."""
    if mixed_precision == "fp8":
        able = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
        what = (
            "this card could, but torch trains in float8 through torchao alone, which is not used here"
            if able
            else f"{device.type} has no float8 arithmetic here"
        )
        raise ConfigError(f"mixed_precision is 'fp8': {what}; use bf16")
    return COMPUTE_TYPES[mixed_precision]
