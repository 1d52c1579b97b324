"""The loss as it is minimised."""

from __future__ import annotations

from collections.abc import Mapping

from twinkle_core.metric.base import Inputs, LossValue, Metric, Outputs


class LossMetric(Metric):
    """`loss`, the sum over the weight of all micro-batches and ranks (never a mean of means), and `num_tokens`, supervised."""

    def accumulate(self, inputs: Inputs, outputs: Outputs, loss: LossValue) -> None:
        self.add("loss_sum", loss.loss_sum)
        self.add("weight", loss.weight)
        self.add("num_tokens", sum(inputs.num_loss_tokens))

    def numbers(self, sums: Mapping[str, float]) -> dict[str, float]:
        if not sums.get("weight"):
            return {}
        return {"loss": sums["loss_sum"] / sums["weight"], "num_tokens": sums["num_tokens"]}
