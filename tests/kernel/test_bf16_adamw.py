import pytest
import torch

from twinkle_core.errors import ConfigError
from twinkle_core.kernel.bf16_adamw import Bf16AdamW, join_bits, split_bits


def test_any_float32_is_its_bf16_rounding_and_sixteen_bits():
    values = torch.cat([torch.randn(2000), torch.tensor([0.0, -0.0, 1e-40, 3e38, 1.00390625, -1.00390625])])
    high, low = split_bits(values)
    assert torch.equal(join_bits(high, low), values)
    assert ((high.float() - values).abs()[:2000] <= values.abs()[:2000] * 2**-8).all()


def test_updates_too_small_for_bf16_add_up_to_those_of_float32():
    ours, lossy, reference = (torch.nn.Parameter(torch.ones(5, 3, dtype=t)) for t in (torch.bfloat16, torch.bfloat16, torch.float32))
    settings = {"lr": 1e-4, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    exact, rounding = Bf16AdamW({"p": ours}, **settings), Bf16AdamW({"p": lossy}, **settings, keep_float32=False)
    adamw = torch.optim.AdamW([reference], **settings)
    for _ in range(30):
        grad = torch.rand(5, 3).bfloat16()
        ours.grad, lossy.grad, reference.grad = 4 * grad, grad, grad.float()
        exact.step(grad_factor=torch.tensor(0.25))
        rounding.step()
        adamw.step()
    torch.testing.assert_close(exact.float32_value("p"), reference.detach(), rtol=1e-6, atol=0)
    assert (lossy == 1.0).all(), "without the low bits nothing was learnt"


def test_what_cannot_work_is_refused():
    parameter = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ConfigError, match="p torch.float32"):
        Bf16AdamW({"p": parameter}, lr=1.0)
    half = {"p": torch.nn.Parameter(torch.ones(2).bfloat16())}
    with pytest.raises(ConfigError, match="does not move with beta2=0.999"):
        Bf16AdamW(half, lr=1.0, moments="bf16")
    with pytest.raises(ConfigError, match="known: float32, bf16"):
        Bf16AdamW(half, lr=1.0, moments="fp8")
