"""What metrics are made of. They touch tensors through their methods only, so that nothing here imports torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol

from twinkle_core.errors import DataError

if TYPE_CHECKING:
    import torch


class Inputs(Protocol):
    """The part of `twinkle_core.loss.base.LossInputs` that metrics read. S supervised tokens, D documents."""

    @property
    def labels(self) -> torch.Tensor: ...
    @property
    def num_loss_tokens(self) -> tuple[int, ...]: ...
    @property
    def kinds(self) -> tuple[int, ...]: ...
    @property
    def document_weights(self) -> tuple[float, ...]: ...
    @property
    def documents(self) -> torch.Tensor: ...
    @property
    def weights(self) -> torch.Tensor | None: ...
    @property
    def advantages(self) -> torch.Tensor | None: ...
    @property
    def token_advantages(self) -> torch.Tensor | None: ...
    @property
    def old_log_probs(self) -> torch.Tensor | None: ...
    @property
    def ref_log_probs(self) -> torch.Tensor | None: ...
    def weighted(self, values: torch.Tensor) -> torch.Tensor: ...
    def document_sums(self, values: torch.Tensor) -> torch.Tensor: ...
    def document_means(self, values: torch.Tensor) -> torch.Tensor: ...


class Outputs(Protocol):
    """The part of `twinkle_core.loss.base.ModelOutputs` that metrics read."""

    @property
    def log_probs(self) -> torch.Tensor | None: ...
    @property
    def logits(self) -> torch.Tensor | None: ...
    @property
    def entropies(self) -> torch.Tensor | None: ...
    @property
    def embeddings(self) -> torch.Tensor | None: ...


class LossValue(Protocol):
    """The part of `twinkle_core.loss.base.LossOutput` that metrics read."""

    @property
    def loss_sum(self) -> torch.Tensor: ...
    @property
    def weight(self) -> float: ...


class Metric:
    """Numbers about training, kept as sums and counts, so that those of several ranks and micro-batches add up.

    Subclasses have `accumulate`, whose arguments `when` tells, and `numbers`, a pure function of the sums. Nothing waits for the
    device until the numbers are asked for.
    """

    when: ClassVar[Literal["forward", "step", "hand"]] = "forward"
    """forward: `accumulate(inputs, outputs, loss)` after each micro-batch's loss. step: `accumulate(step=, lr=, grad_norm=)` after each
    optimizer step. hand: by whoever has what it takes."""
    needs: ClassVar[frozenset[str]] = frozenset()
    """Fields of the outputs that it reads, to be kept for it."""

    def __init__(self) -> None:
        self._sums: dict[str, Any] = {}

    def add(self, name: str, value: float | torch.Tensor) -> None:
        """Adds to a sum; a tensor (scalar) stays on its device."""
        self._sums[name] = self._sums.get(name, 0.0) + (value if isinstance(value, (int, float)) else value.detach().double())

    def sums(self) -> dict[str, float]:
        """Everything seen since the last reset, as plain JSON."""
        return {name: float(value) for name, value in self._sums.items()}

    def merge(self, sums: Mapping[str, float]) -> None:
        """Adds what another rank's `sums` gave."""
        for name, value in sums.items():
            self.add(name, value)

    def reset(self) -> None:
        self._sums = {}

    def calculate(self) -> dict[str, float]:
        """The numbers of what was seen, and starts anew; {} where nothing was seen."""
        found = self.numbers(self.sums())
        self.reset()
        if wrong := {name: value for name, value in found.items() if not math.isfinite(value)}:
            raise DataError(f"{type(self).__name__}: {wrong} of sums that are not finite; look at the model's outputs")
        return found

    def numbers(self, sums: Mapping[str, float]) -> dict[str, float]:
        raise NotImplementedError(f"{type(self).__name__} has no numbers")

    def given(self, value: torch.Tensor | None, name: str) -> torch.Tensor:
        if value is None:
            raise DataError(f"{type(self).__name__} needs {name}, and none were given")
        return value.detach()


def means(sums: Mapping[str, float], count: str, names: Sequence[str]) -> dict[str, float]:
    """Each of the sums that is there, divided by the sum called `count`; {} where that is 0."""
    number = sums.get(count, 0.0)
    return {name: sums[name] / number for name in names if name in sums} if number else {}
