"""Mean squared error of a regression head. Imports torch."""

from __future__ import annotations

from dataclasses import dataclass

from twinkle_core.errors import DataError
from twinkle_core.loss.base import Loss, LossInputs, LossOutput, ModelOutputs, Need


@dataclass(frozen=True, kw_only=True)
class MSELoss(Loss):
    """(score - target)^2, a mean over documents and the values of each. https://pytorch.org/docs/stable/generated/torch.nn.MSELoss.html

    Twinkle compares logits with token labels, which do not have one shape; here a document has a score and a target.
    """

    unit = "document"

    @property
    def needs(self) -> frozenset[Need]:
        return frozenset({"scores"})

    def __call__(self, inputs: LossInputs, outputs: ModelOutputs) -> LossOutput:
        scores, targets = self.given(outputs.scores, "scores"), self.given(inputs.targets, "targets")
        if scores.shape != targets.shape:
            raise DataError(f"MSELoss: scores have the shape {tuple(scores.shape)}, targets {tuple(targets.shape)}; make them the same")
        squares = (scores.float() if scores.dtype != targets.dtype else scores).sub(targets).square()
        if squares.ndim > 1:
            squares = squares.flatten(1).mean(dim=1)
        return self.output(inputs, squares.sum())
