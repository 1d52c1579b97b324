import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from twinkle_core.loss import cross_entropy as module
from twinkle_core.loss.cross_entropy import cross_entropy, token_losses
from twinkle_core.types import IGNORE


def test_sum_count_and_gradient_by_hand():
    # Token 1: equal logits over 4 words. Token 2: odds 3:1 for the wrong word of 2 possible ones. Token 3 is not learnt.
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [math.log(3.0), 0.0, -1e9, -1e9], [5.0, 1.0, 2.0, 3.0]], requires_grad=True)
    total, count = cross_entropy(logits, torch.tensor([2, 1, IGNORE]))
    assert total.item() == pytest.approx(math.log(4) + math.log(4), rel=1e-6) and int(count) == 2
    total.backward()
    expected = torch.tensor([[0.25, 0.25, -0.75, 0.25], [0.75, -0.75, 0.0, 0.0], [0.0, 0.0, 0.0, 0.0]])
    torch.testing.assert_close(logits.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("chunk_elements", [1, 70, 1 << 22])
def test_any_chunk_size_gives_torchs_own_losses_and_gradients(dtype: torch.dtype, chunk_elements: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", chunk_elements)
    torch.manual_seed(0)
    ours = (4 * torch.randn(11, 33)).to(dtype).requires_grad_()
    theirs = ours.detach().clone().requires_grad_()
    labels = torch.randint(0, 33, (11,))
    labels[[0, 7]] = IGNORE
    weights = torch.rand(11)
    losses = token_losses(ours, labels)
    reference = torch.nn.functional.cross_entropy(theirs.float(), labels, reduction="none", ignore_index=IGNORE)
    assert losses.dtype == torch.float32 and losses[0] == losses[7] == 0
    torch.testing.assert_close(losses, reference, rtol=1e-5, atol=1e-5)
    (losses * weights).sum().backward()
    (reference * weights).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-6 if dtype == torch.float32 else 1e-2)


def test_no_float32_tensor_of_the_whole_logits_is_made(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", 50)
    logits = torch.randn(20, 25, dtype=torch.bfloat16, requires_grad=True)
    largest: dict[torch.dtype, int] = {}

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            out = function(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, (tuple, list)) else (out,):
                if isinstance(tensor, torch.Tensor):
                    largest[tensor.dtype] = max(largest.get(tensor.dtype, 0), tensor.numel())
            return out

    with Sizes():
        token_losses(logits, torch.arange(20)).sum().backward()
    assert largest[torch.bfloat16] == 20 * 25
    assert 0 < largest[torch.float32] <= 50
