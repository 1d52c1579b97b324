"""How near embeddings of texts lie that belong together."""

from __future__ import annotations

from collections.abc import Mapping

from twinkle_core.errors import DataError
from twinkle_core.metric.base import Inputs, LossValue, Metric, Outputs
from twinkle_core.types import DocumentKind


class EmbeddingMetric(Metric):
    """Cosines of anchors: `positive_cosine` with their positive, `negative_cosine` with all other positives and negatives of the
    micro-batch, `margin` between the two, and `accuracy`, the share of anchors to which no other is as near as their positive.
    """

    needs = frozenset({"embeddings"})

    def accumulate(self, inputs: Inputs, outputs: Outputs, loss: LossValue | None = None) -> None:
        embeddings = self.given(outputs.embeddings, "embeddings").double()
        units = embeddings / embeddings.norm(dim=-1, keepdim=True).clamp_min(1e-12)
        numbers = range(len(inputs.kinds))
        anchors = [number for number in numbers if inputs.kinds[number] == DocumentKind.ANCHOR]
        others = [number for number in numbers if number not in set(anchors)]
        if any(number + 1 >= len(inputs.kinds) or inputs.kinds[number + 1] != DocumentKind.POSITIVE for number in anchors):
            raise DataError(f"EmbeddingMetric: every anchor is followed by its positive; kinds are {inputs.kinds}")
        cosines = units[anchors] @ units[others].T
        places = [others.index(number + 1) for number in anchors]
        positive = cosines[range(len(anchors)), places] if anchors else cosines.sum(dim=1)
        self.add("positive_cosine", positive.sum())
        self.add("negative_cosine", cosines.sum() - positive.sum())
        self.add("num_negatives", len(anchors) * max(0, len(others) - 1))
        self.add("accuracy", ((cosines >= positive[:, None]).sum(dim=1) == 1).sum())
        self.add("num_anchors", len(anchors))

    def numbers(self, sums: Mapping[str, float]) -> dict[str, float]:
        if not sums.get("num_anchors"):
            return {}
        found = {name: sums[name] / sums["num_anchors"] for name in ("positive_cosine", "accuracy")}
        if sums["num_negatives"]:
            found["negative_cosine"] = sums["negative_cosine"] / sums["num_negatives"]
            found["margin"] = found["positive_cosine"] - found["negative_cosine"]
        return found
