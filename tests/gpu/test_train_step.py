"""What holds on a GPU in bf16. Run by hand: python -m pytest tests/gpu -m gpu"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from twinkle_core.kernel.bf16_adamw import Bf16AdamW
from twinkle_core.kernel.flash4 import is_installed
from twinkle_core.kernel.fused_head import supervised_loss
from twinkle_core.kernel.layers import prepare_layers
from twinkle_core.kernel.linear_cross_entropy import linear_cross_entropy
from twinkle_core.kernel.packed_attention import document_boundaries, register

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

TOLERANCE = 0.02
"""Largest difference of bf16 results allowed, as a share of the largest value: two or three roundings (2^-8 each)."""
SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.06, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0, "use_cache": False,
}  # fmt: skip
FAMILIES: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=128),
    "mistral": MistralConfig(**SIZES, sliding_window=50),
    "gemma3": Gemma3TextConfig(**SIZES, head_dim=64, sliding_window=50, layer_types=["sliding_attention", "full_attention"]),
    "gpt-oss": GptOssConfig(
        **SIZES,
        head_dim=64,
        sliding_window=50,
        num_local_experts=4,
        num_experts_per_tok=4,
        layer_types=["sliding_attention", "full_attention"],
    ),
}
KERNELS = ["flash2", pytest.param("flash4", marks=pytest.mark.skipif(not is_installed(), reason="flash-attn-4 is not installed"))]
LENGTHS = [70, 200, 1, 129]


def make(name: str, dtype: torch.dtype = torch.bfloat16) -> PreTrainedModel:
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(FAMILIES[name], attn_implementation=register())
    return model.to("cuda", dtype).train()


def inputs(lengths: Sequence[int], kernel: Any) -> dict[str, Any]:
    places = torch.cat([torch.arange(length) for length in lengths])[None].cuda()
    return {"position_ids": places, **document_boundaries(lengths, places.device, kernel)}


def tokens(count: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 512, (1, count), generator=torch.Generator().manual_seed(seed)).cuda()


def close(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found.float() - expected.float()).abs().max() / expected.float().abs().max())


@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_document_in_a_pack_has_the_logits_it_has_alone(name: str, kernel: str, training: bool):
    model, ids = make(name).train(training), tokens(sum(LENGTHS))
    with torch.no_grad():
        packed = model(input_ids=ids, **inputs(LENGTHS, kernel)).logits[0].split(LENGTHS)
        leaking = model(input_ids=ids, **inputs([sum(LENGTHS)], kernel)).logits[0].split(LENGTHS)
        for part, alone in zip(packed, ids.split(LENGTHS, dim=1), strict=True):
            assert close(part, model(input_ids=alone, **inputs([alone.shape[1]], kernel)).logits[0]) < TOLERANCE
    assert close(leaking[1], packed[1]) > 5 * TOLERANCE, "the check cannot see a leak"


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_of_one_document_has_exactly_no_gradient_on_another(name: str, kernel: str):
    model = make(name)
    embeddings = model.get_input_embeddings()(tokens(sum(LENGTHS))).detach().requires_grad_()
    start, stop = LENGTHS[0], LENGTHS[0] + LENGTHS[1]
    model(inputs_embeds=embeddings, **inputs(LENGTHS, kernel)).logits[0, start:stop].float().square().sum().backward()
    assert embeddings.grad is not None
    assert torch.count_nonzero(embeddings.grad[0, :start]) == torch.count_nonzero(embeddings.grad[0, stop:]) == 0
    assert (embeddings.grad[0, start:stop].abs().amax(dim=-1) > 0).all()


def gradients(model: PreTrainedModel, lengths: Sequence[int], kernel: Any = "flash2") -> tuple[float, torch.Tensor]:
    ids = tokens(sum(lengths), seed=sum(lengths))
    positions = torch.arange(sum(lengths) - 1, device="cuda")
    model.zero_grad()
    loss = supervised_loss(model, {"input_ids": ids, **inputs(lengths, kernel)}, positions, ids[0, 1:])
    loss.backward()
    return loss.item(), torch.cat([parameter.grad.float().flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_compiled_layers_give_the_plain_gradients_and_compile_once(checkpointing: Any, kernel: str):
    torch._dynamo.reset()
    plain, compiled, exact = make("qwen3"), make("qwen3"), make("qwen3", torch.float32)
    prepare_layers(compiled, compiled=True, checkpointing=checkpointing)
    rows = ([70, 200], [150, 1, 129], [31, 90, 33, 101, 7], [333], [12, 400, 8, 9, 5, 77, 180], [600, 1])
    graphs = []
    for lengths in rows:
        reference, found, expected = gradients(exact, lengths), gradients(compiled, lengths, kernel), gradients(plain, lengths, kernel)
        assert found[0] == pytest.approx(reference[0], rel=2e-3)
        size = reference[1].norm()
        errors = [float((grads[1] - reference[1]).norm() / size) for grads in (found, expected)]
        norms = [float(grads[1].norm() / size) for grads in (found, expected)]
        print(f"{kernel} {checkpointing} {lengths}: gradient error compiled {errors[0]:.4f}, plain {errors[1]:.4f}; norms {norms}")
        assert errors[0] < 1.2 * errors[1], "compiled layers are no less exact than plain ones"
        assert norms == pytest.approx([1.0, 1.0], rel=0.01)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[-1], f"still compiling: {graphs}"


def test_the_head_in_chunks_is_the_plain_one():
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 64, device="cuda"), torch.randn(1000, 64, device="cuda") / 4
    labels, factors = torch.randint(0, 1000, (300,), device="cuda"), torch.rand(300, device="cuda")
    double_hidden, double_weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    expected = (torch.nn.functional.cross_entropy(double_hidden @ double_weight.T, labels, reduction="none") * factors).sum()
    expected.backward()
    for dtype, limit in ((torch.float32, 1e-5), (torch.bfloat16, 2e-2)):
        for rows in (77, 300):
            ours_hidden, ours_weight = (tensor.to(dtype, copy=True).requires_grad_() for tensor in (hidden, weight))
            loss, _ = linear_cross_entropy(ours_hidden, ours_weight, labels, factors, chunk_rows=rows)
            loss.backward()
            assert loss.item() == pytest.approx(expected.item(), rel=limit)
            for ours, theirs in ((ours_hidden, double_hidden), (ours_weight, double_weight)):
                assert float((ours.grad.double() - theirs.grad).norm() / theirs.grad.norm()) < limit


@pytest.mark.parametrize("kernel", KERNELS)
def test_two_runs_are_equal_to_the_bit_with_deterministic_kernels(kernel: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)

    def run() -> list[torch.Tensor]:
        model = make("qwen3")
        prepare_layers(model, compiled=True)
        optimizer = Bf16AdamW(dict(model.named_parameters()), lr=1e-3)
        for lengths in ([70, 200], [150, 1, 129], [600, 333]):
            gradients(model, lengths, kernel)
            optimizer.step()
        return [parameter.detach().clone() for parameter in model.parameters()]

    try:
        assert all(torch.equal(one, other) for one, other in zip(run(), run(), strict=True))
    finally:
        torch.use_deterministic_algorithms(False)


def test_compiled_updates_are_the_plain_ones_and_float32_adamw():
    torch.manual_seed(0)
    start = torch.randn(3, 1000, device="cuda").bfloat16()
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.float())
    optimizer = Bf16AdamW({"p": ours}, lr=1e-4, weight_decay=0.1)
    reference = torch.optim.AdamW([theirs], lr=1e-4, weight_decay=0.1)
    for _ in range(20):
        ours.grad = torch.randn_like(start)
        theirs.grad = ours.grad.float() / 2
        optimizer.step(grad_factor=torch.full((), 0.5, device="cuda"))
        reference.step()
    torch.testing.assert_close(optimizer.float32_value("p"), theirs.detach(), rtol=1e-6, atol=1e-6)
    assert (ours - optimizer.float32_value("p").bfloat16()).count_nonzero() <= 3, "only ties may round differently"
