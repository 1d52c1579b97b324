"""How often the likeliest token is the right one."""

from __future__ import annotations

from collections.abc import Mapping

from twinkle_core.metric.base import Inputs, LossValue, Metric, Outputs, means


class Accuracy(Metric):
    """`accuracy`, the share of supervised tokens whose label has the largest logit. Says what it needs, so that logits are kept for it."""

    needs = frozenset({"logits"})

    def accumulate(self, inputs: Inputs, outputs: Outputs, loss: LossValue | None = None) -> None:
        logits = self.given(outputs.logits, "logits")
        self.add("accuracy", (logits.argmax(dim=-1) == inputs.labels).sum())
        self.add("num_tokens", len(inputs.labels))

    def numbers(self, sums: Mapping[str, float]) -> dict[str, float]:
        return means(sums, "num_tokens", ["accuracy"])
