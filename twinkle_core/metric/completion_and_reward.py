"""What sampled answers earned, how long they were, and what sampling them took."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from twinkle_core.errors import DataError
from twinkle_core.metric.base import Metric


class CompletionRewardMetric(Metric):
    """`NAME_mean` and `NAME_std` (over all answers, population) of each reward, `completion_length_mean` in tokens, and the mean of
    `generate_seconds` and `weight_sync_seconds` a call. A reward that is None or not finite is an error: it says nothing.
    """

    when = "hand"

    def accumulate(
        self,
        *,
        rewards: Mapping[str, Sequence[float]] | Sequence[float] | None = None,
        completion_lengths: Sequence[int] | None = None,
        generate_time: float | None = None,
        weight_sync_time: float | None = None,
    ) -> None:
        """`rewards` by name, or one list called `reward`; times in seconds."""
        named = rewards if isinstance(rewards, Mapping) else {"reward": rewards or []}
        for name, values in named.items():
            for number, value in enumerate(values):
                if value is None or not math.isfinite(value):
                    raise DataError(f"{name} of answer {number} is {value}; score it, or leave the answer out")
            self._add_all(f"{name}_mean", values)
            self.add(f"{name}_squares", math.fsum(float(value) ** 2 for value in values))
        self._add_all("completion_length_mean", completion_lengths or [])
        self._add_all("generate_seconds", [] if generate_time is None else [generate_time])
        self._add_all("weight_sync_seconds", [] if weight_sync_time is None else [weight_sync_time])

    def numbers(self, sums: Mapping[str, float]) -> dict[str, float]:
        found = {}
        for name in [name.removesuffix("#count") for name, count in sums.items() if name.endswith("#count") and count]:
            count = sums[f"{name}#count"]
            found[name] = sums[name] / count
            base = name.removesuffix("_mean")
            if f"{base}_squares" in sums:
                found[f"{base}_std"] = math.sqrt(max(0.0, sums[f"{base}_squares"] / count - found[name] ** 2))
        return found

    def _add_all(self, name: str, values: Sequence[float]) -> None:
        self.add(name, math.fsum(float(value) for value in values))
        self.add(f"{name}#count", len(values))
