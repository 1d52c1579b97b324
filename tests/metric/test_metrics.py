"""Metrics by hand, and that those of ranks and micro-batches add up."""

import json
import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.loss.worlds import World, make, random_part, row
from twinkle_core.loss.base import LossInputs, LossOutput, ModelOutputs
from twinkle_core.metric import METRICS, Metric, TrainMetric, build_metric
from twinkle_core.types import DocumentKind


def numbers_of(metric: Metric, inputs: LossInputs, outputs: ModelOutputs, loss: LossOutput | None = None) -> dict[str, float]:
    metric.accumulate(inputs, outputs, loss)  # type: ignore[attr-defined]
    return metric.calculate()


def test_loss_is_the_sum_over_the_weight_not_a_mean_of_means() -> None:
    # case PK07: 1, 31 and 8 tokens with losses 0.5, 2 and 1 have the mean 70.5 / 40
    metric = build_metric("LossMetric")
    for loss, tokens in ((0.5, 1), (2.0, 31), (1.0, 8)):
        inputs = LossInputs(labels=torch.ones(tokens, dtype=torch.int64), num_loss_tokens=(tokens,))
        metric.accumulate(inputs, ModelOutputs(), LossOutput(loss_sum=torch.tensor(loss * tokens), weight=float(tokens)))  # type: ignore[attr-defined]
    assert metric.calculate() == {"loss": 1.7625, "num_tokens": 40}
    assert metric.calculate() == {}, "calculate starts anew"


def test_accuracy() -> None:
    logits = torch.tensor([[0.0, 1.0], [2.0, 1.0], [0.0, 3.0]])
    inputs = LossInputs(labels=torch.tensor([1, 1, 1]), num_loss_tokens=(3,))
    assert numbers_of(build_metric("Accuracy"), inputs, ModelOutputs(logits=logits)) == {"accuracy": pytest.approx(2 / 3)}
    with pytest.raises(ValueError, match="Accuracy needs logits"):
        build_metric("Accuracy").accumulate(inputs, ModelOutputs())  # type: ignore[attr-defined]


def test_train_metric_tells_the_last_step_and_the_speed() -> None:
    times = iter([100.0, 104.0, 104.0, 109.0, 109.0])
    metric = TrainMetric(clock=lambda: next(times))
    metric.accumulate(step=1, lr=0.1, grad_norm=3.0)
    metric.accumulate(step=2, lr=0.2, grad_norm=2.0)
    assert metric.calculate() == {"step": 2, "lr": 0.2, "grad_norm": 2.0, "total_seconds": 4.0, "steps_per_second": 0.5}
    metric.accumulate(step=3, lr=0.3)
    assert metric.calculate() == {"step": 3, "lr": 0.3, "total_seconds": 9.0, "steps_per_second": 0.2}


def test_dpo() -> None:
    # log-ratios: chosen 1 and -2, rejected -1.5 and -1: with beta 0.5 rewards 0.5, -1 and -0.75, -0.5; margins 1.25 and -0.5
    inputs = LossInputs(
        labels=torch.ones(5, dtype=torch.int64),
        num_loss_tokens=(2, 1, 1, 1),
        kinds=(DocumentKind.CHOSEN, DocumentKind.REJECTED) * 2,
        ref_log_probs=torch.tensor([-2.0, -2.0, -1.5, -1.0, -1.0]),
    )
    outputs = ModelOutputs(log_probs=torch.tensor([-1.0, -2.0, -3.0, -3.0, -2.0]))
    found = numbers_of(build_metric("DPOMetric", {"beta": 0.5}), inputs, outputs)
    assert found == {
        "rewards_chosen": -0.25,
        "rewards_rejected": -0.625,
        "rewards_margin": 0.375,
        "rewards_accuracy": 0.5,
        "log_probs_chosen": -3.0,
        "log_probs_rejected": -2.5,
    }
    free = build_metric("DPOMetric", {"beta": 0.5, "reference_free": True})
    assert numbers_of(free, replace(inputs, ref_log_probs=None), outputs)["rewards_chosen"] == -1.5
    with pytest.raises(ValueError, match="DPOMetric needs ref_log_probs"):
        numbers_of(build_metric("DPOMetric"), replace(inputs, ref_log_probs=None), outputs)


# As in tests/loss/test_policy.py: ratios 1.5 and 0.9 with advantage 2, 0.5 with advantage -1.
OLD = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
RATIOS = torch.tensor([1.5, 0.9, 0.5], dtype=torch.float64)
SAMPLED = LossInputs(
    labels=torch.ones(3, dtype=torch.int64), num_loss_tokens=(2, 1), advantages=torch.tensor([2.0, -1.0]), old_log_probs=OLD
)
MOVED = ModelOutputs(log_probs=OLD + RATIOS.log(), entropies=torch.tensor([0.5, 1.0, 2.0]))
KL = sum(ratio - 1 - math.log(ratio) for ratio in (1.5, 0.9, 0.5)) / 3


def test_grpo() -> None:
    found = numbers_of(build_metric("GRPOMetric"), SAMPLED, MOVED)
    expected = {"ratio": 2.9 / 3, "kl": KL, "clip_fraction_low": 1 / 3, "clip_fraction_high": 1 / 3, "entropy": 3.5 / 3}
    assert found == pytest.approx(expected)
    assert numbers_of(build_metric("GRPOMetric", {"epsilon_high": 0.6}), SAMPLED, MOVED)["clip_fraction_high"] == 0
    flipped = replace(SAMPLED, advantages=torch.tensor([-2.0, 1.0]))
    found = numbers_of(build_metric("GRPOMetric"), flipped, MOVED)
    assert (found["clip_fraction_low"], found["clip_fraction_high"]) == (0, 0), "the minimum takes the unclipped term"
    referred = replace(SAMPLED, ref_log_probs=MOVED.log_probs + math.log(2))
    assert numbers_of(build_metric("GRPOMetric"), referred, MOVED)["kl_ref"] == pytest.approx(1 - math.log(2))


def test_the_policy_that_sampled_has_ratio_one_and_no_kl() -> None:
    for name in ("GRPOMetric", "GSPOMetric", "CISPOMetric"):
        found = numbers_of(build_metric(name), SAMPLED, ModelOutputs(log_probs=OLD))
        assert found == {"ratio": 1.0, "kl": 0.0, "clip_fraction_low": 0.0, "clip_fraction_high": 0.0}


def test_gspo_and_cispo() -> None:
    found = numbers_of(build_metric("GSPOMetric"), SAMPLED, MOVED)
    assert found["ratio"] == pytest.approx((math.sqrt(1.35) + 0.5) / 2)
    assert (found["clip_fraction_low"], found["clip_fraction_high"]) == (0.5, 0.0)
    assert found["kl"] == pytest.approx(KL)
    found = numbers_of(build_metric("CISPOMetric"), SAMPLED, MOVED)
    assert (found["clip_fraction_low"], found["clip_fraction_high"]) == (0.0, pytest.approx(1 / 3))
    found = numbers_of(build_metric("CISPOMetric", {"epsilon_low": 0.2, "epsilon_high": 1.0}), SAMPLED, MOVED)
    assert (found["clip_fraction_low"], found["clip_fraction_high"]) == (pytest.approx(1 / 3), 0.0)


def test_embedding() -> None:
    # q1 at 0, its positive at 60 degrees, its negative at 90; q2 at 180, its positive at 90
    angles = torch.tensor([0.0, 60.0, 90.0, 180.0, 90.0], dtype=torch.float64) * math.pi / 180
    kinds = (DocumentKind.ANCHOR, DocumentKind.POSITIVE, DocumentKind.NEGATIVE, DocumentKind.ANCHOR, DocumentKind.POSITIVE)
    inputs = LossInputs(labels=torch.ones(0, dtype=torch.int64), num_loss_tokens=(0,) * 5, kinds=kinds)
    found = numbers_of(
        build_metric("EmbeddingMetric"), inputs, ModelOutputs(embeddings=2 * torch.stack([angles.cos(), angles.sin()], dim=1))
    )
    # q1: 0.5 against 0, 0; q2: 0 against -0.5 and 0, which is as near as its positive
    expected = {"positive_cosine": 0.25, "accuracy": 0.5, "negative_cosine": -0.125, "margin": 0.375}
    assert found == pytest.approx(expected)


def test_completions_and_rewards() -> None:
    metric = build_metric("CompletionRewardMetric")
    metric.accumulate(rewards={"format": [1, 0], "answer": [0.5, 0.5]}, completion_lengths=[10, 20], generate_time=4.0)  # type: ignore[attr-defined]
    metric.accumulate(rewards={"format": [1, 1]}, completion_lengths=[30, 40], generate_time=2.0)  # type: ignore[attr-defined]
    found = metric.calculate()
    assert found == {
        "format_mean": 0.75,
        "format_std": pytest.approx(math.sqrt(0.1875)),
        "answer_mean": 0.5,
        "answer_std": 0.0,
        "completion_length_mean": 25.0,
        "generate_seconds": 3.0,
    }
    for wrong in (None, math.nan):
        with pytest.raises(ValueError, match="reward of answer 1 is"):
            metric.accumulate(rewards=[1.0, wrong])  # type: ignore[attr-defined]


FORWARD: dict[str, str] = {
    "LossMetric": "CrossEntropyLoss",
    "Accuracy": "CrossEntropyLoss",
    "DPOMetric": "DPOLoss",
    "GRPOMetric": "GRPOLoss",
    "GSPOMetric": "GSPOLoss",
    "CISPOMetric": "CISPOLoss",
}


@pytest.mark.parametrize("name", FORWARD)
def test_ranks_and_micro_batches_add_up(name: str) -> None:
    loss = make(FORWARD[name])
    rows = [row([random_part(FORWARD[name], seed, weight=0.5 + seed % 3) for seed in seeds]) for seeds in ((1, 2), (3,), (4, 5, 6))]

    def seen(metric: Metric, *batches: list) -> Metric:
        for batch in batches:
            inputs, outputs = World().inputs(batch)
            metric.accumulate(inputs, outputs, loss(inputs, outputs))  # type: ignore[attr-defined]
        return metric

    expected = seen(build_metric(name), rows).calculate()
    first, second = seen(build_metric(name), rows[:1], []), seen(build_metric(name), rows[1:2], rows[2:])
    first.merge(json.loads(json.dumps(second.sums())))
    assert first.calculate() == pytest.approx(expected, rel=1e-9)
    assert expected
    assert all(isinstance(value, float) for value in expected.values())
    assert first.calculate() == {}
    assert seen(build_metric(name), []).calculate() == {}


def test_a_sum_waits_on_its_device_until_asked() -> None:
    class Watched(torch.Tensor):
        reads = 0

        def __float__(self) -> float:
            Watched.reads += 1
            return float(self.as_subclass(torch.Tensor))

    metric = build_metric("LossMetric")
    inputs = LossInputs(labels=torch.ones(1, dtype=torch.int64), num_loss_tokens=(1,))
    for _ in range(3):
        loss = LossOutput(loss_sum=torch.tensor(2.0).as_subclass(Watched), weight=1.0)
        metric.accumulate(inputs, ModelOutputs(), loss)  # type: ignore[attr-defined]
    assert Watched.reads == 0
    assert metric.calculate()["loss"] == 2.0
    assert Watched.reads == 1


def test_what_is_not_finite_is_an_error() -> None:
    inputs = LossInputs(labels=torch.ones(1, dtype=torch.int64), num_loss_tokens=(1,))
    with pytest.raises(ValueError, match="LossMetric: {'loss': nan}"):
        numbers_of(build_metric("LossMetric"), inputs, ModelOutputs(), LossOutput(loss_sum=torch.tensor(math.nan), weight=1.0))


class Own(Metric):
    """A user's own."""


def test_names_classes_and_instances() -> None:
    assert set(METRICS) >= FORWARD.keys()
    made = Own()
    assert build_metric(made) is made
    assert isinstance(build_metric(Own), Own)
    refused: list[tuple[Callable[[], object], str]] = [
        (lambda: build_metric("Acuracy"), "metric is 'Acuracy'; known: LossMetric, Accuracy"),
        (lambda: build_metric("DPOMetric", {"betta": 1}), "takes no 'betta'; known: beta, reference_free"),
        (lambda: build_metric(made, {"beta": 1}), "made already"),
        (lambda: build_metric(3), "metric is 3"),  # type: ignore[arg-type]
    ]
    for call, why in refused:
        with pytest.raises(ValueError, match=why):
            call()
