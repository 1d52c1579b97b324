import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

from tests.model.tiny_models import SIZES
from twinkle_core.errors import ConfigError
from twinkle_core.kernel.fused_head import has_plain_head, supervised_loss, take_rows
from twinkle_core.kernel.linear_cross_entropy import linear_cross_entropy
from twinkle_core.types import IGNORE


@pytest.mark.parametrize("rows", [1, 4, 100])
def test_any_chunk_size_gives_the_plain_loss_and_gradients(rows: int):
    torch.manual_seed(0)
    hidden, weight, factors = torch.randn(11, 8), torch.randn(33, 8), torch.rand(11)
    labels = torch.randint(0, 33, (11,))
    labels[[0, 7]] = IGNORE
    ours = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    theirs = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    loss, losses = linear_cross_entropy(*ours, labels, factors, chunk_rows=rows)
    reference = torch.nn.functional.cross_entropy(theirs[0] @ theirs[1].T, labels, reduction="none", ignore_index=IGNORE)
    torch.testing.assert_close(losses, reference.detach(), rtol=1e-5, atol=1e-6)
    (3.0 * loss).backward()
    (3.0 * (reference * factors).sum()).backward()
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-5, atol=1e-5)


def test_by_hand():
    # Logits 0 and log 3 for the right and the wrong word: probability 1/4, loss log 4, gradient of the logits (-3/4, 3/4).
    hidden = torch.tensor([[1.0]], requires_grad=True)
    weight = torch.tensor([[0.0], [1.0986123]], requires_grad=True)
    loss, _ = linear_cross_entropy(hidden, weight, torch.tensor([0]))
    loss.backward()
    assert loss.item() == pytest.approx(1.3862944)
    torch.testing.assert_close(weight.grad, torch.tensor([[-0.75], [0.75]]))
    torch.testing.assert_close(hidden.grad, torch.tensor([[0.75 * 1.0986123]]))


@pytest.mark.parametrize("words", [33, 70_000])
def test_large_logits_and_any_number_of_words_give_the_losses_of_float64(words: int):
    torch.manual_seed(0)
    hidden, weight, factors = 20 * torch.randn(7, 8), torch.randn(words, 8), torch.rand(7)
    labels = torch.randint(0, words, (7,))
    ours = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    exact = hidden.double().requires_grad_(), weight.double().requires_grad_()
    loss, losses = linear_cross_entropy(*ours, labels, factors)
    reference = torch.nn.functional.cross_entropy(exact[0] @ exact[1].T, labels, reduction="none")
    torch.testing.assert_close(losses.double(), reference.detach(), rtol=1e-5, atol=1e-4)
    loss.backward(retain_graph=True)
    (reference * factors).sum().backward()
    for one, other in zip(ours, exact, strict=True):
        torch.testing.assert_close(one.grad.double(), other.grad, rtol=1e-4, atol=1e-4)
    once = ours[1].grad.clone()
    loss.backward()  # what is kept for the backward pass is not changed by it
    assert torch.equal(ours[1].grad, once + once)


def test_no_logits_beyond_a_chunk_exist():
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            nonlocal largest
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor):
                    largest = max(largest, tensor.numel())
            return out

    hidden, weight = torch.randn(40, 2, requires_grad=True), torch.randn(50, 2, requires_grad=True)
    with Sizes():
        linear_cross_entropy(hidden, weight, torch.arange(40), chunk_rows=4)[0].backward()
    assert largest == 4 * 50


def test_taken_rows_give_their_gradient_back():
    states = torch.arange(8.0).view(4, 2).requires_grad_()
    (take_rows(states, torch.tensor([3, 1])) * torch.tensor([[1.0], [10.0]])).sum().backward()
    torch.testing.assert_close(states.grad, torch.tensor([[0.0, 0.0], [10.0, 10.0], [0.0, 0.0], [1.0, 1.0]]))


def test_a_head_that_changes_its_logits_is_refused():
    sizes = {**SIZES, "num_hidden_layers": 1}
    assert has_plain_head(AutoModelForCausalLM.from_config(LlamaConfig(**sizes)))
    model = AutoModelForCausalLM.from_config(Gemma2Config(**sizes, head_dim=16, final_logit_softcapping=30.0))
    assert not has_plain_head(model)
    with pytest.raises(ConfigError, match="'gemma2' changes its logits"):
        supervised_loss(model, {}, torch.tensor([0]), torch.tensor([0]))
