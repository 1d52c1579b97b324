"""Cross-entropy in its forms: by hand, against torch's own, and their own backward passes against finite differences."""

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from twinkle_core.loss import build_loss
from twinkle_core.loss.base import LossInputs, ModelOutputs
from twinkle_core.loss.cross_entropy import token_losses
from twinkle_core.loss.fused_linear_cross_entropy import linear_cross_entropy, linear_token_losses
from twinkle_core.loss.log_probs import token_entropies, token_log_probs
from twinkle_core.types import IGNORE

HALF, QUARTER = math.log(0.5), math.log(0.25)
TWO = LossInputs(labels=torch.tensor([0, 1]), num_loss_tokens=(2,), weights=torch.tensor([1.0, 3.0]))
LOG_PROBS = torch.tensor([HALF, QUARTER], dtype=torch.float64, requires_grad=True)


def test_weights_by_hand() -> None:
    # 1 x log 2 + 3 x log 4 = 7 log 2, over a weight of 4
    output = build_loss("CrossEntropyLoss")(TWO, ModelOutputs(log_probs=LOG_PROBS))
    assert output.loss_sum.item() == pytest.approx(7 * math.log(2))
    assert output.weight == 4
    (grad,) = torch.autograd.grad(output.loss_sum, LOG_PROBS)
    assert grad.tolist() == [-1, -3]


def test_dft_by_hand() -> None:
    # 1 x 0.5 x log 2 + 3 x 0.25 x log 4 = 2 log 2; the gradient is -w p: the factor p is not differentiated
    output = build_loss("CrossEntropyLoss", {"dft": True})(TWO, ModelOutputs(log_probs=LOG_PROBS))
    assert output.loss_sum.item() == pytest.approx(2 * math.log(2))
    (grad,) = torch.autograd.grad(output.loss_sum, LOG_PROBS)
    assert grad.tolist() == pytest.approx([-0.5, -0.75])


def test_label_smoothing_by_hand() -> None:
    # p = (3/4, 1/4), label 0, smoothing 0.2: 0.8 log(4/3) + 0.2 (log(4/3) + log 4) / 2
    logits = torch.tensor([[math.log(3), 0.0]])
    loss = token_losses(logits, torch.tensor([0]), label_smoothing=0.2).item()
    assert loss == pytest.approx(0.8 * math.log(4 / 3) + 0.1 * (math.log(4 / 3) + math.log(4)), rel=1e-6)


def case(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(9, 4, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.randn(11, 4, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    labels = torch.randint(0, 11, (9,), generator=generator)
    labels[[0, 5]] = IGNORE
    return hidden, head, labels, torch.rand(9, generator=generator, dtype=torch.float64)


def plain(hidden, head, labels, weights, label_smoothing, softcap) -> torch.Tensor:
    logits = hidden @ head.T
    logits = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    losses = torch.nn.functional.cross_entropy(logits, labels, reduction="none", ignore_index=IGNORE, label_smoothing=label_smoothing)
    return (losses * weights).sum()


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("label_smoothing", [0.0, 0.3])
@pytest.mark.parametrize("chunk_rows", [1, 4, 512])
def test_the_fused_forms_equal_torchs_own_to_1e_6(softcap: float | None, label_smoothing: float, chunk_rows: int) -> None:
    hidden, head, labels, weights = case()
    expected = plain(hidden, head, labels, weights, label_smoothing, softcap)
    settings = {"label_smoothing": label_smoothing, "softcap": softcap, "chunk_rows": chunk_rows}
    for found in (
        linear_cross_entropy(hidden, head, labels, weights, **settings),
        (linear_token_losses(hidden, head, labels, **settings) * weights).sum(),
    ):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=0)
        gradients = torch.autograd.grad(2 * found, (hidden, head))
        torch.testing.assert_close(gradients, torch.autograd.grad(2 * expected, (hidden, head), retain_graph=True), rtol=1e-6, atol=1e-9)


def test_bfloat16_is_off_by_the_rounding_of_its_logits_only() -> None:
    """Stated: loss to 1%, gradients to 2% of the largest one."""
    hidden, head, labels, weights = case(torch.bfloat16)
    exact = [value.detach().double().requires_grad_() for value in (hidden, head)]
    expected = plain(*exact, labels, weights, 0.1, 2.0)
    found = linear_cross_entropy(hidden, head, labels, weights, label_smoothing=0.1, softcap=2.0, chunk_rows=4)
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(expected.item(), rel=1e-2)
    for ours, theirs in zip(torch.autograd.grad(found, (hidden, head)), torch.autograd.grad(expected, exact), strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours.double() - theirs).abs().max() < 2e-2 * theirs.abs().max()


def test_own_backward_passes_agree_with_finite_differences() -> None:
    hidden, head, labels, weights = case()
    check = torch.autograd.gradcheck
    assert check(lambda h, w: linear_cross_entropy(h, w, labels, weights, label_smoothing=0.1, softcap=2.0, chunk_rows=4), (hidden, head))
    assert check(lambda h, w: linear_token_losses(h, w, labels, label_smoothing=0.1, softcap=2.0, chunk_rows=4), (hidden, head))
    logits = (hidden @ head.T).detach().requires_grad_()
    assert check(lambda z: token_losses(z, labels, label_smoothing=0.1, chunk_rows=2), (logits,))
    assert check(token_entropies, (logits,))


def test_a_frozen_head_or_state_gets_no_gradient() -> None:
    hidden, head, labels, weights = case()
    for function in (lambda h, w: linear_cross_entropy(h, w, labels, weights), lambda h, w: linear_token_losses(h, w, labels).sum()):
        (grad,) = torch.autograd.grad(function(hidden, head.detach()), (hidden,))
        assert grad.abs().sum() > 0
        (grad,) = torch.autograd.grad(function(hidden.detach(), head), (head,))
        assert grad.abs().sum() > 0


@pytest.mark.parametrize("function", [linear_cross_entropy, linear_token_losses])
def test_no_tensor_of_all_tokens_by_all_words_is_made(function) -> None:
    hidden = torch.randn(40, 3, requires_grad=True)
    head = torch.randn(50, 3, requires_grad=True)
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            nonlocal largest
            out = operation(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                largest = max(largest, tensor.numel()) if isinstance(tensor, torch.Tensor) else largest
            return out

    with Sizes():
        function(hidden, head, torch.arange(40), chunk_rows=8).sum().backward()
    assert largest == 8 * 50


def test_the_chunked_loss_leaves_the_logits_as_they_are() -> None:
    logits = torch.randn(2, 5, requires_grad=True)
    before = logits.detach().clone()
    loss = build_loss("ChunkedCrossEntropyLoss", {"chunk_size": 1})
    for _ in range(2):  # the second backward pass reads what it read the first time
        logits.grad = None
        loss(TWO, ModelOutputs(logits=logits)).loss_sum.backward()
        expected = logits.softmax(dim=1).detach() - torch.nn.functional.one_hot(TWO.labels, 5)
        torch.testing.assert_close(logits.grad, expected * torch.tensor([[1.0], [3.0]]))
    assert torch.equal(logits.detach(), before)


def test_log_probs_at_a_temperature_and_entropy_by_hand() -> None:
    logits = torch.tensor([[math.log(3), 0.0]])  # 3 : 1, and 9 : 1 at temperature 0.5
    label = torch.tensor([0])
    assert token_log_probs(logits, label).exp().item() == pytest.approx(0.75)
    assert token_log_probs(logits, label, temperature=0.5).exp().item() == pytest.approx(0.9)
    assert token_entropies(logits).item() == pytest.approx(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25)), rel=1e-6)
    masked = torch.tensor([[0.0, 0.0, -torch.inf]], requires_grad=True)
    token_entropies(masked).sum().backward()
    assert torch.isfinite(masked.grad).all()
    with pytest.raises(ValueError, match="temperature is 0"):
        token_log_probs(logits, label, temperature=0)


def test_wrong_settings_are_refused() -> None:
    for arguments, why in (
        ({"reduction": "none"}, "known: mean, sum"),
        ({"label_smoothing": 1.0}, "label_smoothing is 1.0"),
        ({"label_smoothing": 0.1, "dft": True}, "takes no label_smoothing"),
    ):
        with pytest.raises(ValueError, match=why):
            build_loss("CrossEntropyLoss", arguments)
    with pytest.raises(ValueError, match="chunk_size is 0"):
        build_loss("ChunkedCrossEntropyLoss", {"chunk_size": 0})
    with pytest.raises(ValueError, match="softcap is -1"):
        build_loss("FusedLinearCrossEntropyLoss", {"softcap": -1})
