import pytest
import torch

from twinkle_core.errors import ConfigError
from twinkle_core.kernel.bf16_adamw import Bf16AdamW, adamw_update, join_bits, split_bits


def test_any_float32_is_its_bf16_rounding_and_sixteen_bits():
    values = torch.cat([torch.randn(2000), torch.tensor([0.0, -0.0, 1e-40, 3e38, 1.00390625, -1.00390625])])
    high, low = split_bits(values)
    assert torch.equal(join_bits(high, low), values)
    assert ((high.float() - values).abs()[:2000] <= values.abs()[:2000] * 2**-8).all()


@pytest.mark.parametrize("moments", ["float32", "bf16"])
def test_updates_too_small_for_bf16_add_up_to_those_of_float32(moments: str):
    ours, reference = (torch.nn.Parameter(torch.ones(5, 3, dtype=dtype)) for dtype in (torch.bfloat16, torch.float32))
    settings = {"lr": 1e-4, "weight_decay": 0.1, "betas": (0.9, 0.95)}
    exact, adamw = Bf16AdamW({"p": ours}, moments=moments, **settings), torch.optim.AdamW([reference], **settings, fused=True)
    for _ in range(30):
        grad = torch.rand(5, 3).bfloat16()
        ours.grad, reference.grad = 4 * grad, grad.float()
        exact.step(grad_factor=torch.tensor(0.25))
        adamw.step()
    if moments == "float32":
        assert torch.equal(exact.float32_value("p"), reference), "on a CPU, torch's own update"
    torch.testing.assert_close(exact.float32_value("p"), reference.detach(), rtol=3e-4, atol=0)
    assert (torch.ones(1).bfloat16() - settings["lr"] == 1.0).all(), "bf16 alone would have learnt nothing"
    assert (exact.float32_value("p") < 0.998).all()


def test_the_update_that_a_gpu_compiles_is_float32_adamw_in_the_last_digits():
    torch.manual_seed(0)
    reference = torch.nn.Parameter(torch.randn(400))
    high, low = split_bits(reference.detach())
    state = {"exp_avg": torch.zeros(400), "exp_avg_sq": torch.zeros(400), "low_bits": low}
    adamw = torch.optim.AdamW([reference], lr=1e-3, weight_decay=0.1, fused=True)
    for step in range(1, 21):
        grad = torch.randn(400).bfloat16()
        reference.grad = grad.float() / 2
        adamw.step()
        numbers = torch.tensor([1e-3, 0.1, 0.9, 0.999, 1e-8, 1 - 0.9**step, 1 - 0.999**step])
        adamw_update(high, grad, torch.tensor(0.5), numbers, **state)
    torch.testing.assert_close(join_bits(high, low), reference.detach(), rtol=1e-6, atol=1e-6)


def test_any_value_is_assigned_whole():
    parameter, value = torch.nn.Parameter(torch.zeros(500).bfloat16()), torch.randn(500)
    optimizer = Bf16AdamW({"p": parameter}, lr=1.0)
    optimizer.assign("p", value)
    assert torch.equal(optimizer.float32_value("p"), value)
    assert (parameter.float() - value).abs().max() > 0


def test_what_cannot_work_is_refused():
    parameter = torch.nn.Parameter(torch.ones(2))
    with pytest.raises(ConfigError, match="p torch.float32"):
        Bf16AdamW({"p": parameter}, lr=1.0)
    half = {"p": torch.nn.Parameter(torch.ones(2).bfloat16())}
    with pytest.raises(ConfigError, match="does not move with beta2=0.999"):
        Bf16AdamW(half, lr=1.0, moments="bf16")
    with pytest.raises(ConfigError, match="known: float32, bf16"):
        Bf16AdamW(half, lr=1.0, moments="fp8")
