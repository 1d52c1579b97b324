"""Losses against a teacher and against numbers, by hand."""

import math
from dataclasses import replace

import pytest
import torch

from twinkle_core.loss import build_loss
from twinkle_core.loss.base import LossInputs, LossOutput, ModelOutputs

# Teacher 3 : 1, student 1 : 1 over two words; the mixture at beta 0.5 is 5 : 3.
INPUTS = LossInputs(labels=torch.tensor([0]), num_loss_tokens=(1,), teacher_logits=torch.tensor([[math.log(3), 0.0]], dtype=torch.float64))
STUDENT = torch.zeros(1, 2, dtype=torch.float64, requires_grad=True)
T, S, M, NEAR_S = (0.75, 0.25), (0.5, 0.5), (0.625, 0.375), (0.525, 0.475)


def kl(p: tuple[float, ...], q: tuple[float, ...]) -> float:
    return sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))


def loss_of(inputs: LossInputs = INPUTS, student: torch.Tensor = STUDENT, **arguments: object) -> LossOutput:
    return build_loss("GKDLoss", arguments)(inputs, ModelOutputs(logits=student))


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        (0.0, kl(T, S)),
        (1.0, kl(S, T)),
        (0.5, 0.5 * kl(T, M) + 0.5 * kl(S, M)),
        (0.1, 0.1 * kl(T, NEAR_S) + 0.9 * kl(S, NEAR_S)),
    ],
)
def test_gkd(beta: float, expected: float) -> None:
    output = loss_of(beta=beta)
    assert output.loss_sum.item() == pytest.approx(expected)
    assert output.weight == 1


def test_forward_kl_has_the_gradient_of_cross_entropy() -> None:
    (grad,) = torch.autograd.grad(loss_of(beta=0.0).loss_sum, STUDENT)
    assert grad.tolist() == [pytest.approx([0.5 - 0.75, 0.5 - 0.25])]


def test_temperature_divides_the_logits_of_both() -> None:
    # at temperature 0.5 the teacher is 9 : 1
    assert loss_of(beta=0.0, temperature=0.5).loss_sum.item() == pytest.approx(kl((0.9, 0.1), S))
    # and a student of 2 : 1 is 4 : 1
    student = torch.tensor([[math.log(2), 0.0]], dtype=torch.float64)
    assert loss_of(student=student, beta=0.0, temperature=0.5).loss_sum.item() == pytest.approx(kl((0.9, 0.1), (0.8, 0.2)))


def test_the_teachers_likeliest_tokens_only() -> None:
    # teacher 3 : 1 : 6, student 1 : 1 : 2; of the teacher's two likeliest, 6 : 3, the student gives 2 : 1: no divergence
    teacher, student = (torch.tensor([values], dtype=torch.float64).log() for values in ((3.0, 1.0, 6.0), (1.0, 1.0, 2.0)))
    logits = replace(INPUTS, teacher_logits=teacher)
    assert loss_of(logits, student, topk=2).loss_sum.item() == pytest.approx(0.0, abs=1e-12)
    assert loss_of(logits, student).loss_sum.item() > 0.01
    other = torch.tensor([[1.0, 1.0, 1.0]], dtype=torch.float64).log()
    remote = replace(
        INPUTS,
        teacher_logits=None,
        teacher_top_log_probs=torch.tensor([[0.6, 0.3]], dtype=torch.float64).log(),
        teacher_top_ids=torch.tensor([[2, 0]]),
    )
    expected = kl((2 / 3, 1 / 3), S)
    assert loss_of(remote, other, beta=0.0).loss_sum.item() == pytest.approx(expected)
    assert loss_of(logits, other, beta=0.0, topk=2).loss_sum.item() == pytest.approx(expected)


@pytest.mark.parametrize("beta", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("chunk_size", [1, 3, 512])
def test_chunks_change_nothing_and_the_gradient_agrees_with_finite_differences(beta: float, chunk_size: int) -> None:
    generator = torch.Generator().manual_seed(0)
    student, teacher = (torch.randn(5, 4, generator=generator, dtype=torch.float64) for _ in range(2))
    five = LossInputs(labels=torch.ones(5, dtype=torch.int64), num_loss_tokens=(5,), teacher_logits=teacher)
    student.requires_grad_()
    whole = loss_of(five, student, beta=beta, chunk_size=5).loss_sum
    assert loss_of(five, student, beta=beta, chunk_size=chunk_size).loss_sum.item() == pytest.approx(whole.item())
    assert torch.autograd.gradcheck(lambda logits: loss_of(five, logits, beta=beta, chunk_size=chunk_size).loss_sum, (student,))


def test_a_teacher_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="they need one vocabulary"):
        loss_of(replace(INPUTS, teacher_logits=torch.zeros(1, 3)))
    with pytest.raises(ValueError, match="give one"):
        loss_of(replace(INPUTS, teacher_top_log_probs=torch.zeros(1, 1)))
    with pytest.raises(ValueError, match="needs teacher_top_ids"):
        loss_of(replace(INPUTS, teacher_logits=None, teacher_top_log_probs=torch.zeros(1, 1)))
    for arguments in ({"beta": 1.5}, {"temperature": 0.0}, {"topk": 0}, {"chunk_size": 0}):
        with pytest.raises(ValueError, match=str(next(iter(arguments.values())))):
            build_loss("GKDLoss", arguments)


def test_mse() -> None:
    # documents (1 - 3)^2 = 4 and (2 - 2.5)^2 = 0.25; with two values each: means (4 + 1) / 2 and (0 + 0.25) / 2
    two = LossInputs(labels=torch.ones(0, dtype=torch.int64), num_loss_tokens=(0, 0), targets=torch.tensor([3.0, 2.5]))
    scores = torch.tensor([1.0, 2.0], requires_grad=True)
    output = build_loss("MSELoss")(two, ModelOutputs(scores=scores))
    assert (output.loss_sum.item(), output.weight) == (4.25, 2)
    assert torch.autograd.grad(output.loss_sum, scores)[0].tolist() == [-4.0, -1.0]
    wide = replace(two, targets=torch.tensor([[3.0, 1.0], [2.0, 0.5]]))
    assert build_loss("MSELoss")(wide, ModelOutputs(scores=torch.tensor([[1.0, 2.0], [2.0, 1.0]]))).loss_sum.item() == 2.5 + 0.125
    with pytest.raises(ValueError, match=r"scores have the shape \(2, 1\), targets \(2,\)"):
        build_loss("MSELoss")(two, ModelOutputs(scores=torch.ones(2, 1)))
