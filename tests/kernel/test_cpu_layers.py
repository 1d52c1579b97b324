import copy
from typing import Any

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from tests.model.tiny_models import SIZES
from twinkle_core.kernel import cpu_products
from twinkle_core.kernel.cpu_layers import use_cpu_layers
from twinkle_core.kernel.cpu_products import linear_product, lora_product, multiply
from twinkle_core.kernel.cpu_rms_norm import rms_norm
from twinkle_core.kernel.layers import prepare_layers
from twinkle_core.kernel.packed_attention import document_boundaries, register


def close_to(ours: torch.Tensor, wanted: torch.Tensor) -> None:
    """float32 against float64: a relative error of the largest value of 1e-6."""
    assert (ours.double() - wanted).abs().max() <= 1e-6 * wanted.abs().max()


@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 7, 3), (64, 48, 96), (33, 576, 192)])
def test_products_of_plain_and_transposed_matrices(shape: tuple[int, int, int]):
    torch.manual_seed(0)
    rows, inner, columns = shape
    left, weight = torch.randn(rows, inner), torch.randn(columns, inner)
    close_to(multiply(left, weight), left.double() @ weight.double().T)
    close_to(multiply(left, weight.T.contiguous().T), left.double() @ weight.double().T)
    close_to(multiply(left.T.contiguous().T, weight), left.double() @ weight.double().T)
    assert torch.equal(multiply(left, weight), multiply(left.clone(), weight.clone()))
    assert multiply(torch.zeros(0, inner), weight).shape == (0, columns)


def test_linear_with_its_gradients_is_torchs_in_float64():
    torch.manual_seed(0)
    given = torch.randn(2, 9, 24), torch.randn(40, 24), torch.randn(40)
    ours = [tensor.clone().requires_grad_() for tensor in given]
    wanted = [tensor.double().requires_grad_() for tensor in given]
    out, expected = linear_product(*ours), torch.nn.functional.linear(*wanted)
    close_to(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    for one, other in zip(ours, wanted, strict=True):
        close_to(one.grad, other.grad)


def test_frozen_weights_get_no_gradient_and_their_inputs_are_not_kept():
    inputs, weight = torch.randn(3, 4, requires_grad=True), torch.randn(2, 4)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: (kept.append(tensor), tensor)[1], lambda tensor: tensor):
        out = linear_product(inputs, weight)
    assert [tensor.shape for tensor in kept] == [weight.shape]
    out.sum().backward()
    assert weight.grad is None
    close_to(inputs.grad, torch.ones(3, 2).double() @ weight.double())


@pytest.mark.parametrize("with_dropout", [False, True])
def test_lora_with_its_gradients_is_the_papers_in_float64(with_dropout: bool):
    torch.manual_seed(0)
    given = torch.randn(2, 9, 24), torch.randn(40, 24), torch.randn(3, 24), torch.randn(40, 3)
    mask = 2.0 * (torch.rand(2, 9, 24) > 0.5) if with_dropout else torch.ones(2, 9, 24)
    ours = [tensor.clone().requires_grad_() for tensor in given]
    wanted = [tensor.double().requires_grad_() for tensor in given]
    inputs, weight, down, up = wanted
    expected = inputs @ weight.T + 1.7 * ((inputs * mask.double()) @ down.T @ up.T)
    out = lora_product(ours[0], ours[0] * mask if with_dropout else None, *ours[1:], 1.7)
    close_to(out, expected)
    out.square().sum().backward()
    expected.square().sum().backward()
    for one, other in zip(ours, wanted, strict=True):
        close_to(one.grad, other.grad)


@pytest.mark.parametrize("rows", [1, 256, 300])
def test_rms_norm_with_its_gradients_is_that_of_float64(rows: int):
    torch.manual_seed(0)
    given = torch.randn(1, rows, 24), torch.randn(24), torch.randn(1, rows, 24)
    ours = [tensor.clone().requires_grad_() for tensor in given[:2]]
    states, weight = wanted = [tensor.double().requires_grad_() for tensor in given[:2]]
    out, expected = rms_norm(*ours, 1e-2), weight * states / (states.square().mean(-1, keepdim=True) + 1e-2).sqrt()
    close_to(out, expected)
    out.backward(given[2])
    expected.backward(given[2].double())
    for one, other in zip(ours, wanted, strict=True):
        assert (one.grad.double() - other.grad).abs().max() <= 3e-6 * other.grad.abs().max()


def test_rms_norm_by_hand():
    # States 3 and 4 have the mean square 12.5: 3 / sqrt(12.5) = 0.8485.
    torch.testing.assert_close(rms_norm(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 2.0]), 0.0), torch.tensor([[0.848528, 2.262742]]))


CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "llama": (LlamaConfig, {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
    "qwen2, biases": (Qwen2Config, {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
    "qwen3, dropout": (Qwen3Config, {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "lora_dropout": 0.5}),
    "llama, DoRA": (LlamaConfig, {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "use_dora": True}),
    "llama, rsLoRA of some": (LlamaConfig, {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "up_proj"], "use_rslora": True}),
    "llama, LoRA bias": (LlamaConfig, {"r": 4, "lora_alpha": 8, "target_modules": ["v_proj"], "lora_bias": True}),
    "llama, all parameters": (LlamaConfig, {}),
}


def built(kind: Any, adapter: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    config = kind(**SIZES, use_cache=False, **({"head_dim": 16} if kind is Qwen3Config else {}))
    model = AutoModelForCausalLM.from_config(config, attn_implementation=register())
    if adapter:
        whole = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", **adapter))
        for name, parameter in whole.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1)
    return model.train()


def gradients(model: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(1)  # dropout
    lengths, kind = [4, 7], next(model.parameters()).dtype
    positions = torch.cat([torch.arange(length) for length in lengths])[None]
    logits = model(input_ids=torch.arange(11)[None] + 5, position_ids=positions, **document_boundaries(lengths, torch.device("cpu"))).logits
    assert logits.dtype == kind
    logits.square().mean().backward()
    return logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("case", CASES)
def test_a_model_gives_the_logits_and_gradients_of_transformers_and_peft(case: str):
    kind, adapter = CASES[case]
    model = built(kind, adapter)
    reference, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    use_cpu_layers(model)
    replaced = sum("forward" in vars(module) for module in model.modules())
    lora_parts = sum(type(module) is torch.nn.Linear and ".lora_" in name for name, module in model.named_modules())
    bases = sum(name.endswith("base_layer") for name, _ in model.named_modules())
    norms = 9 if kind is Qwen3Config else 5  # two a layer, one at the end; Qwen3 has two more a layer
    assert replaced == 14 + norms + lora_parts + bases  # two layers of seven linear maps
    logits, found = gradients(model)
    theirs, wanted = gradients(reference)
    _, true = gradients(exact) if not adapter.get("lora_dropout") else (None, wanted)  # dropout of float64 draws others
    assert found.keys() == wanted.keys()
    torch.testing.assert_close(logits, theirs, rtol=1e-5, atol=1e-5)
    for name, gradient in found.items():
        size = true[name].abs().max()
        assert (gradient - true[name]).abs().max() <= 2e-5 * size, name


def test_what_the_functions_do_not_know_goes_to_the_layers_own():
    model = built(LlamaConfig, {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"})
    use_cpu_layers(model)
    layer = model.model.layers[0].self_attn.q_proj
    inputs = torch.randn(3, SIZES["hidden_size"])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(inputs).dtype == layer.base_layer(inputs).dtype == torch.bfloat16
    before = layer(inputs)
    layer.merge()
    torch.testing.assert_close(layer(inputs), before, rtol=1e-5, atol=1e-5)
    layer.unmerge()
    layer.enable_adapters(False)
    torch.testing.assert_close(layer(inputs), inputs @ layer.base_layer.weight.T)


@pytest.mark.parametrize("with_onednn", [True, False])
@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_checkpointing_changes_no_bit(monkeypatch: pytest.MonkeyPatch, checkpointing: Any, with_onednn: bool):
    if not with_onednn:
        monkeypatch.setattr(cpu_products, "_has_onednn", lambda: False)
    found = []
    for mode in ("none", checkpointing):
        model = built(LlamaConfig, {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"})
        use_cpu_layers(model)
        prepare_layers(model, checkpointing=mode)
        found.append(gradients(model))
    assert len(found[0][1]) == 28 and all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


def test_names_and_parameters_stay_and_a_second_call_changes_nothing():
    model = built(LlamaConfig, {})
    before = [(name, id(parameter)) for name, parameter in model.named_parameters()]
    use_cpu_layers(model)
    layer = model.model.layers[0].mlp.up_proj
    function = layer.forward
    use_cpu_layers(model)
    assert layer.forward is function and type(layer) is torch.nn.Linear
    assert [(name, id(parameter)) for name, parameter in model.named_parameters()] == before
    assert "forward" not in vars(model.lm_head)  # the fused head looks for one
