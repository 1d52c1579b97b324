"""Losses over preference pairs, judged documents and scores, by hand."""

import math
from dataclasses import replace

import pytest
import torch

from twinkle_core.loss import build_loss
from twinkle_core.loss.base import LossInputs, LossOutput, ModelOutputs
from twinkle_core.types import DocumentKind

# Chosen: tokens with log-probabilities -1 and -2 (sum -3, mean -1.5). Rejected: -2, -2 and -2 (sum -6, mean -2).
LOG_PROBS = torch.tensor([-1.0, -2.0, -2.0, -2.0, -2.0], dtype=torch.float64, requires_grad=True)
# Reference: chosen -4, rejected -4.5: the margin is m = (-3 + 4) - (-6 + 4.5) = 2.5.
INPUTS = LossInputs(
    labels=torch.ones(5, dtype=torch.int64),
    num_loss_tokens=(2, 3),
    kinds=(DocumentKind.CHOSEN, DocumentKind.REJECTED),
    ref_log_probs=torch.tensor([-2.0, -2.0, -1.5, -1.5, -1.5], dtype=torch.float64),
)


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def loss_of(name: str, inputs: LossInputs = INPUTS, **arguments: object) -> LossOutput:
    return build_loss(name, arguments)(inputs, ModelOutputs(log_probs=LOG_PROBS))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, -math.log(sigmoid(0.1 * 2.5))),
        ({"beta": 2.0}, -math.log(sigmoid(5.0))),
        ({"beta": 0.4, "label_smoothing": 0.2}, -0.8 * math.log(sigmoid(1.0)) - 0.2 * math.log(sigmoid(-1.0))),
        ({"loss_type": "hinge"}, 1 - 0.25),
        ({"loss_type": "hinge", "beta": 0.4}, 0.0),
        ({"loss_type": "ipo"}, (2.5 - 5.0) ** 2),  # Twinkle: (0.25 - 5)^2
        ({"loss_type": "ipo", "beta": 0.5}, (2.5 - 1.0) ** 2),
        ({"loss_type": "kto_pair", "beta": 1.0}, 1 - (sigmoid(1.0) + sigmoid(1.5)) / 2),
        ({"reference_free": True, "beta": 1.0}, -math.log(sigmoid(3.0))),
        ({"reference_free": True, "beta": 1.0, "sft_weight": 2.0}, -math.log(sigmoid(3.0)) + 2 * 1.5),
    ],
)
def test_dpo(arguments: dict[str, object], expected: float) -> None:
    output = loss_of("DPOLoss", **arguments)
    assert output.loss_sum.item() == pytest.approx(expected)
    assert output.weight == 1


def test_kto_pair_takes_a_reference_point() -> None:
    output = loss_of("DPOLoss", replace(INPUTS, kl=0.5), loss_type="kto_pair", beta=1.0)
    assert output.loss_sum.item() == pytest.approx(1 - (sigmoid(1.0 - 0.5) + sigmoid(0.5 + 1.5)) / 2)


def test_gradient_of_dpo_by_hand() -> None:
    # d(-log sigmoid(z)) = -(1 - sigmoid(z)) dz, z = 0.25: -beta (1 - sigmoid) on each chosen token, + on each rejected one
    (grad,) = torch.autograd.grad(loss_of("DPOLoss").loss_sum, LOG_PROBS)
    step = 0.1 * (1 - sigmoid(0.25))
    assert grad.tolist() == pytest.approx([-step, -step, step, step, step])


def test_ipos_minimum_is_where_the_paper_puts_it() -> None:
    """The margin 1 / (2 beta) = 2.5 has loss and gradient 0."""
    output = loss_of("DPOLoss", loss_type="ipo", beta=0.2)
    (grad,) = torch.autograd.grad(output.loss_sum, LOG_PROBS)
    assert output.loss_sum.item() == pytest.approx(0)
    assert grad.tolist() == pytest.approx([0.0] * 5)


def test_simpo() -> None:
    # beta (mean_c - mean_r) - gamma = 2.5 x 0.5 - 0.5 = 0.75
    assert loss_of("SimPOLoss").loss_sum.item() == pytest.approx(-math.log(sigmoid(0.75)))


def test_cpo() -> None:
    # -log sigmoid(0.1 x (-3 + 6)) + 1 x 3
    assert loss_of("CPOLoss").loss_sum.item() == pytest.approx(-math.log(sigmoid(0.3)) + 3)
    assert loss_of("CPOLoss", bc_coef=0.0).loss_sum.item() == pytest.approx(-math.log(sigmoid(0.3)))


def test_orpo() -> None:
    # odds of e^-1.5 and e^-2: 0.22313 / 0.77687 = 0.28722 and 0.13534 / 0.86466 = 0.15652; their ratio is 1.83505
    odds = [math.exp(mean) / (1 - math.exp(mean)) for mean in (-1.5, -2.0)]
    assert odds == pytest.approx([0.28722, 0.15652], abs=1e-5)
    expected = 1.5 - 0.1 * math.log(sigmoid(math.log(odds[0] / odds[1])))
    assert loss_of("ORPOLoss").loss_sum.item() == pytest.approx(expected)


def test_orpo_of_certain_tokens_is_finite() -> None:
    certain = torch.zeros(5, dtype=torch.float64, requires_grad=True)
    loss_sum = build_loss("ORPOLoss")(INPUTS, ModelOutputs(log_probs=certain)).loss_sum
    (grad,) = torch.autograd.grad(loss_sum, certain)
    assert torch.isfinite(loss_sum)
    assert torch.isfinite(grad).all()


def test_weights_of_tokens_weigh_log_probabilities() -> None:
    # chosen: (1 x -1 + 3 x -2) / 4 = -1.75; rejected -2: 2.5 x 0.25 - 0.5 = 0.125
    weighed = replace(INPUTS, weights=torch.tensor([1.0, 3.0, 1.0, 1.0, 1.0]), document_weights=())
    assert loss_of("SimPOLoss", weighed).loss_sum.item() == pytest.approx(-math.log(sigmoid(0.125)))


def test_kto() -> None:
    # r: 1 for the desirable document, -1.5 for the undesirable one; z = 0.5
    judged = replace(INPUTS, kinds=(DocumentKind.DESIRABLE, DocumentKind.UNDESIRABLE), kl=0.5)
    output = loss_of("KTOLoss", judged, beta=1.0, undesirable_weight=2.0)
    assert output.loss_sum.item() == pytest.approx((1 - sigmoid(0.5)) + 2 * (1 - sigmoid(0.5 + 1.5)))
    assert output.weight == 2
    free = loss_of("KTOLoss", replace(judged, kl=None), beta=1.0, use_kl=False)
    assert free.loss_sum.item() == pytest.approx((1 - sigmoid(1.0)) + (1 - sigmoid(1.5)))
    below = loss_of("KTOLoss", replace(judged, kl=-3.0), beta=1.0)
    assert below.loss_sum.item() == pytest.approx(free.loss_sum.item()), "an estimate below 0 counts as 0"
    with pytest.raises(ValueError, match="document 0 is CHOSEN"):
        loss_of("KTOLoss", replace(INPUTS, kl=0.5))


def test_reward_model() -> None:
    scores = torch.tensor([2.0, -1.0, 0.5, 1.5], dtype=torch.float64, requires_grad=True)
    two = LossInputs(
        labels=torch.ones(0, dtype=torch.int64), num_loss_tokens=(0,) * 4, kinds=(DocumentKind.CHOSEN, DocumentKind.REJECTED) * 2
    )
    output = build_loss("RewardModelLoss")(two, ModelOutputs(scores=scores))
    assert output.loss_sum.item() == pytest.approx(-math.log(sigmoid(3.0)) - math.log(sigmoid(-1.0)))
    assert output.weight == 2
    margins = replace(two, margins=torch.tensor([1.0, 0.5], dtype=torch.float64))
    output = build_loss("RewardModelLoss", {"center": 0.25})(margins, ModelOutputs(scores=scores))
    expected = -math.log(sigmoid(2.0)) - math.log(sigmoid(-1.5)) + 0.25 * (1.0**2 + 2.0**2)
    assert output.loss_sum.item() == pytest.approx(expected)
    with pytest.raises(ValueError, match="learns from pairs"):
        build_loss("RewardModelLoss")(replace(two, kinds=(DocumentKind.CHOSEN,) * 4), ModelOutputs(scores=scores))


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("DPOLoss", {"loss_type": "dpo"}, "known: sigmoid, hinge, ipo, kto_pair"),
        ("DPOLoss", {"beta": 0}, "beta is 0"),
        ("DPOLoss", {"loss_type": "ipo", "label_smoothing": 0.1}, "is for sigmoid"),
        ("DPOLoss", {"label_smoothing": 0.5}, "label_smoothing is 0.5"),
        ("DPOLoss", {"sft_weight": -1.0}, "sft_weight is -1.0"),
        ("SimPOLoss", {"beta": -1}, "beta is -1"),
        ("CPOLoss", {"bc_coef": -1}, "bc_coef -1"),
        ("ORPOLoss", {"lambda_orpo": -1}, "lambda_orpo is -1"),
        ("KTOLoss", {"desirable_weight": -1.0}, "weights -1.0"),
        ("RewardModelLoss", {"center": -0.1}, "center is -0.1"),
    ],
)
def test_wrong_settings_are_refused(name: str, arguments: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        build_loss(name, arguments)
