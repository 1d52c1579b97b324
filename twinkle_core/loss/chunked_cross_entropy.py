"""Cross-entropy from logits, a given number of tokens at a time. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from twinkle_core.errors import ConfigError
from twinkle_core.loss.base import LossInputs, LossOutput, ModelOutputs, Need
from twinkle_core.loss.cross_entropy import CrossEntropyLoss, token_losses


@dataclass(frozen=True, kw_only=True)
class ChunkedCrossEntropyLoss(CrossEntropyLoss):
    """`CrossEntropyLoss` that takes logits and widens `chunk_size` tokens at a time to float32, forwards and backwards.

    The logits themselves are left alone (Twinkle's backward pass overwrites them, so that a second use reads gradients).
    https://pytorch.org/docs/stable/generated/torch.nn.functional.cross_entropy.html
    """

    chunk_size: int = 1024
    """Tokens at a time."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk_size < 1:
            raise ConfigError(f"chunk_size is {self.chunk_size}; it is at least 1")

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"logits"})

    def __call__(self, inputs: LossInputs, outputs: ModelOutputs) -> LossOutput:
        logits = self.given(outputs.logits, "logits")
        losses = token_losses(logits, inputs.labels, label_smoothing=self.label_smoothing, chunk_rows=self.chunk_size)
        if self.dft:
            losses = losses * (-losses).exp().detach()
        return self.output(inputs, inputs.weighted(losses).sum())
