"""Losses over sampled answers with advantages, by hand."""

import math
from dataclasses import replace

import pytest
import torch

from twinkle_core.loss import build_loss
from twinkle_core.loss.base import LossInputs, LossOutput, ModelOutputs

# Two sequences, of 2 tokens with advantage 2 and of 1 token with advantage -1; ratios 1.5, 0.9 and 0.5.
RATIOS = (1.5, 0.9, 0.5)
OLD = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
LOG_PROBS = (OLD + torch.tensor(RATIOS, dtype=torch.float64).log()).requires_grad_()
INPUTS = LossInputs(
    labels=torch.ones(3, dtype=torch.int64),
    num_loss_tokens=(2, 1),
    advantages=torch.tensor([2.0, -1.0], dtype=torch.float64),
    old_log_probs=OLD,
    ref_log_probs=(LOG_PROBS.detach() + math.log(2.0)),
)


def loss_of(name: str, inputs: LossInputs = INPUTS, **arguments: object) -> LossOutput:
    entropies = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64)
    return build_loss(name, arguments)(inputs, ModelOutputs(log_probs=LOG_PROBS, entropies=entropies))


def gradient(output: LossOutput) -> list[float]:
    return torch.autograd.grad(output.loss_sum, LOG_PROBS)[0].tolist()


def test_grpo() -> None:
    # token 1: min(1.5 x 2, 1.2 x 2) = 2.4 clipped; token 2: 0.9 x 2 = 1.8; token 3: min(0.5 x -1, 0.8 x -1) = -0.8 clipped
    output = loss_of("GRPOLoss")
    assert output.loss_sum.item() == pytest.approx(-(2.4 + 1.8) / 2 + 0.8)
    assert output.weight == 2
    assert gradient(output) == pytest.approx([0.0, -0.9 * 2 / 2, 0.0])


def test_grpos_upper_clip_kl_and_entropy() -> None:
    # epsilon_high 0.4: token 1 gives 2.8. k3 of log 2: 2 - log 2 - 1 on each token.
    assert loss_of("GRPOLoss", epsilon_high=0.4).loss_sum.item() == pytest.approx(-(2.8 + 1.8) / 2 + 0.8)
    k3 = 1 - math.log(2)
    assert loss_of("GRPOLoss", beta=0.5).loss_sum.item() == pytest.approx(-2.1 + 0.8 + 0.5 * (k3 + k3))
    assert loss_of("GRPOLoss", entropy_coef=0.1).loss_sum.item() == pytest.approx(-2.1 + 0.8 - 0.1 * (0.75 + 2.0))


def test_grpo_on_policy_has_ratio_one_and_the_gradient_of_log_probs() -> None:
    output = loss_of("GRPOLoss", replace(INPUTS, old_log_probs=None), on_policy=True)
    assert output.loss_sum.item() == pytest.approx(-2.0 + 1.0)
    assert gradient(output) == pytest.approx([-1.0, -1.0, 1.0])


def test_a_ratio_that_would_overflow_is_bounded() -> None:
    far = replace(INPUTS, old_log_probs=torch.full((3,), -5000.0, dtype=torch.float64), advantages=-INPUTS.advantages)
    assert math.isfinite(loss_of("GRPOLoss", far).loss_sum.item())


def test_token_advantages_stand_for_those_of_sequences() -> None:
    tokens = replace(INPUTS, advantages=None, token_advantages=torch.tensor([2.0, 0.0, -1.0], dtype=torch.float64))
    assert loss_of("GRPOLoss", tokens).loss_sum.item() == pytest.approx(-2.4 / 2 + 0.8)


def test_gspo() -> None:
    # ratio of sequence 1: sqrt(1.5 x 0.9) = 1.16190, within 1.2; of sequence 2: 0.5, clipped to 0.8
    ratio = math.sqrt(1.35)
    output = loss_of("GSPOLoss")
    assert output.loss_sum.item() == pytest.approx(-2 * ratio + 0.8)
    assert gradient(output) == pytest.approx([-ratio, -ratio, 0.0])
    # GSPO-token with the same advantage for each token: same value, same gradient
    tokens = replace(INPUTS, token_advantages=torch.tensor([2.0, 2.0, -1.0], dtype=torch.float64))
    output = loss_of("GSPOLoss", tokens)
    assert output.loss_sum.item() == pytest.approx(-2 * ratio + 0.8)
    assert gradient(output) == pytest.approx([-ratio, -ratio, 0.0])

    # with 2 and 1 each token is pushed by its own advantage: -r A_t / 2
    tokens = replace(INPUTS, token_advantages=torch.tensor([2.0, 1.0, -1.0], dtype=torch.float64))
    assert gradient(loss_of("GSPOLoss", tokens)) == pytest.approx([-ratio, -ratio / 2, 0.0])


def test_sapo() -> None:
    def gate(ratio: float, tau: float) -> float:
        return 4 / tau / (1 + math.exp(-tau * (ratio - 1)))

    expected = -(gate(1.5, 1.0) * 2 + gate(0.9, 1.0) * 2) / 2 + gate(0.5, 2.0)
    assert loss_of("SAPOLoss", tau_neg=2.0).loss_sum.item() == pytest.approx(expected)
    # on policy the gate has slope 1: the plain policy gradient
    assert gradient(loss_of("SAPOLoss", tau_neg=2.0, on_policy=True)) == pytest.approx([-1.0, -1.0, 1.0])


def test_cispo() -> None:
    # ratios kept to at most 1.3; every token keeps its gradient -r A
    output = loss_of("CISPOLoss", epsilon_high=0.3)
    logs = LOG_PROBS.tolist()
    assert output.loss_sum.item() == pytest.approx(-1.3 * 2 * logs[0] - 0.9 * 2 * logs[1] + 0.5 * logs[2])
    assert output.weight == 3
    assert gradient(output) == pytest.approx([-2.6, -1.8, 0.5])
    assert gradient(loss_of("CISPOLoss")) == pytest.approx([-2.4, -1.8, 0.5]), "epsilon stands for a missing epsilon_high"
    assert gradient(loss_of("CISPOLoss", epsilon_low=0.2)) == pytest.approx([-2.4, -1.8, 0.8])


def test_bnpo_and_dr_grpo() -> None:
    # the token losses of GRPO are -2.4, -1.8 and 0.8
    output = loss_of("BNPOLoss")
    assert (output.loss_sum.item(), output.weight) == (pytest.approx(-3.4), 3)
    output = loss_of("DRGRPOLoss", max_completion_length=10)
    assert (output.loss_sum.item(), output.weight) == (pytest.approx(-0.34), 2)


@pytest.mark.parametrize(
    ("name", "arguments", "why"),
    [
        ("GRPOLoss", {"epsilon": -0.1}, "epsilon is -0.1"),
        ("GRPOLoss", {"epsilon_high": -0.1}, "epsilon_high -0.1"),
        ("GRPOLoss", {"beta": -1}, "beta is -1"),
        ("SAPOLoss", {"tau_pos": 0}, "tau_pos is 0"),
        ("CISPOLoss", {"epsilon_low": 1.5}, "epsilon_low is 1.5"),
        ("DRGRPOLoss", {"max_completion_length": 0}, "max_completion_length is 0"),
    ],
)
def test_wrong_settings_are_refused(name: str, arguments: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        build_loss(name, arguments)
