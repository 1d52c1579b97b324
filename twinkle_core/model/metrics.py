"""The numbers that describe how an adapter learns, gathered in the driver. Imports no torch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from twinkle_core.lazy_number import LazyNumber
from twinkle_core.types import StepOutput

if TYPE_CHECKING:
    from twinkle_core.metric import Metric


MOST_KEPT = 512
"""Losses that are kept unread before they are added up."""


class AdapterMetrics:
    """Of the calls since the last `calculate`: mean loss a token, last gradient norm, rate, step and speed; the same for `forward_only`.

    `added` are the user's, by whether they are of training: those of kind 'step' live here, those of kind 'forward' on the workers.
    """

    def __init__(self) -> None:
        self._train = _Sums()
        self._evaluation = _Sums()
        self._norm: float | LazyNumber | None = None
        self.added: dict[bool, list[Metric]] = {True: [], False: []}
        self.of_steps: list[Metric] = []

    def forget_training(self) -> None:
        """What was learnt from is gone: another state was loaded."""
        self._train.reset()
        self._norm = None

    def trained(self, output: StepOutput) -> None:
        self._train.add(output.loss_sum, output.loss_weight, output.num_loss_tokens)

    def clipped(self, norm: float | LazyNumber) -> None:
        self._norm = norm

    def rated(self, rows: list[dict[str, Any]]) -> None:
        for row in rows:
            if "loss_sum" in row:
                self._evaluation.add(row["loss_sum"], float(row["num_loss_tokens"]), row["num_loss_tokens"])

    def stepped(self, facts: Mapping[str, float], norm: float | LazyNumber) -> None:
        """After an optimizer step. A metric that looks at the norm waits for it."""
        for metric in self.of_steps:
            observe: Any = metric
            observe.accumulate(step=int(facts["step"]), lr=facts["lr"], grad_norm=norm)

    def calculate(
        self, is_training: bool, facts: Mapping[str, float], sums_by_rank: Sequence[Sequence[Mapping[str, float]]]
    ) -> dict[str, float]:
        """`facts` are numbers of the moment, `sums_by_rank` those of each metric that lives on the workers."""
        sums = self._train if is_training else self._evaluation
        numbers = {**sums.numbers(), **facts}
        if is_training and self._norm is not None:
            numbers["grad_norm"] = float(self._norm)
        sums.reset()
        for place, metric in enumerate(self.added[is_training]):
            for rank in sums_by_rank:
                metric.merge(rank[place])
            numbers |= metric.calculate()
        for metric in self.of_steps if is_training else ():
            numbers |= metric.calculate()
        return numbers


class _Sums:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self._kept: list[float | LazyNumber] = []
        self._loss_sum, self._weight, self._num_tokens, self._began = 0.0, 0.0, 0, time.perf_counter()

    def add(self, loss_sum: float | LazyNumber, weight: float, num_tokens: int) -> None:
        self._kept.append(loss_sum)
        self._weight += weight
        self._num_tokens += num_tokens
        if len(self._kept) >= MOST_KEPT:
            self._add_up()

    def _add_up(self) -> None:
        kept, self._kept = self._kept, []
        for loss_sum in kept:
            self._loss_sum += float(loss_sum)

    def numbers(self) -> dict[str, float]:
        if not self._weight:
            return {}
        self._add_up()
        seconds = time.perf_counter() - self._began
        return {
            "loss": self._loss_sum / self._weight,
            "num_loss_tokens": self._num_tokens,
            "loss_tokens_per_second": self._num_tokens / seconds if seconds else 0.0,
        }
