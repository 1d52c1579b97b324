"""Metrics: sums and counts that add up over micro-batches and ranks, and numbers made of them. Imports no torch."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from twinkle_core.errors import ConfigError
from twinkle_core.metric.accuracy import Accuracy
from twinkle_core.metric.base import Metric
from twinkle_core.metric.completion_and_reward import CompletionRewardMetric
from twinkle_core.metric.dpo import DPOMetric
from twinkle_core.metric.embedding import EmbeddingMetric
from twinkle_core.metric.grpo import CISPOMetric, GRPOMetric, GSPOMetric
from twinkle_core.metric.loss import LossMetric
from twinkle_core.metric.train_metric import TrainMetric

METRICS: Mapping[str, type[Metric]] = MappingProxyType(
    {
        "LossMetric": LossMetric,
        "Accuracy": Accuracy,
        "TrainMetric": TrainMetric,
        "DPOMetric": DPOMetric,
        "GRPOMetric": GRPOMetric,
        "GSPOMetric": GSPOMetric,
        "CISPOMetric": CISPOMetric,
        "EmbeddingMetric": EmbeddingMetric,
        "CompletionRewardMetric": CompletionRewardMetric,
    }
)


def build_metric(metric: str | type[Metric] | Metric, arguments: Mapping[str, Any] | None = None) -> Metric:
    """The metric that is meant: a name or a class, made with the arguments, or an instance as it is.

    Raises `ConfigError` for an unknown name (naming the known) and for arguments that it does not take.
    """
    given = dict(arguments or {})
    if isinstance(metric, str):
        if metric not in METRICS:
            raise ConfigError(f"metric is {metric!r}; known: {', '.join(METRICS)}")
        metric = METRICS[metric]
    if not isinstance(metric, type):
        if given or not isinstance(metric, Metric):
            raise ConfigError(f"metric is {metric!r} with arguments {given}; give a name, a class, or a `Metric` that is made already")
        return metric
    taken = inspect.signature(metric).parameters
    if unknown := [name for name in given if name not in taken]:
        raise ConfigError(f"{metric.__name__} takes no {unknown[0]!r}; known: {', '.join(taken) or 'none'}")
    return metric(**given)


__all__ = [
    "METRICS",
    "Accuracy",
    "CISPOMetric",
    "CompletionRewardMetric",
    "DPOMetric",
    "EmbeddingMetric",
    "GRPOMetric",
    "GSPOMetric",
    "LossMetric",
    "Metric",
    "TrainMetric",
    "build_metric",
]
