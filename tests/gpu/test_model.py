"""`TransformersModel` on a GPU: held in bf16, compiled, the loss at the head, and resumed to the bit. Run by hand as its neighbour."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, GptOssConfig, Qwen3Config

from twinkle_core.config import LoraConfig
from twinkle_core.kernel.layers import decoder_layers
from twinkle_core.model import TransformersModel, forward
from twinkle_core.types import IGNORE, PackedRow

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

VOCABULARY = 512
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "initializer_range": 0.06, "bos_token_id": 1, "eos_token_id": 2,
    "pad_token_id": 0,
}  # fmt: skip
CONFIGS: dict[str, Any] = {
    "qwen3": Qwen3Config(**SIZES, head_dim=128, tie_word_embeddings=True),
    "gpt-oss": GptOssConfig(**SIZES, head_dim=64, sliding_window=50, num_local_experts=4, num_experts_per_tok=4,
                            layer_types=["sliding_attention", "full_attention"]),
}  # fmt: skip
LORA = LoraConfig(rank=8, alpha=16, dropout=0.1)


@pytest.fixture(autouse=True)
def process_as_before() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name, config in CONFIGS.items():
        torch.manual_seed(3)
        made[name] = tmp_path_factory.mktemp(name)
        AutoModelForCausalLM.from_config(config).save_pretrained(made[name])
    return made


def rows(seed: int) -> Sequence[PackedRow]:
    """Three rows of documents of other lengths each time."""
    generator = np.random.default_rng(seed)
    made = []
    for _ in range(3):
        lengths = generator.integers(1, 300, size=int(generator.integers(1, 5)))
        ids = generator.integers(3, VOCABULARY, int(lengths.sum())).astype(np.int32)
        labels = np.roll(ids, -1)
        labels[np.cumsum(lengths) - 1] = IGNORE
        documents = np.arange(len(lengths), dtype=np.int64)
        made.append(PackedRow(input_ids=ids, labels=labels, seq_lens=lengths.astype(np.int32), sample_ids=documents))
    return made


def build(folder: Path, lora: bool, **settings: Any) -> TransformersModel:
    model = TransformersModel(folder, seed=3, **settings)
    if lora:
        model.add_adapter_to_model("default", LORA)
    model.set_optimizer("AdamW", lr=1e-3, weight_decay=0.01)
    model.set_lr_scheduler("CosineWarmupScheduler", num_training_steps=12, num_warmup_steps=2)
    return model


def worker(model: TransformersModel) -> Any:
    return model._group._worker  # type: ignore[attr-defined]  # a LocalGroup


def train(model: TransformersModel, start: int, stop: int) -> list[str]:
    said = []
    for step in range(start, stop):
        loss = model.forward_backward(rows(step), micro_batch_size=2, seed=(1, step)).loss
        said.append(repr((float(loss), float(model.clip_grad_and_step()))))
    return said


@pytest.mark.parametrize("settings", [{}, {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}], ids=str)
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_resumed_run_is_the_uninterrupted_one_to_the_bit(
    folders: dict[str, Path], name: str, lora: bool, settings: dict[str, Any], tmp_path: Path
) -> None:
    whole = build(folders[name], lora, **settings)
    train(whole, 0, 3)
    saved = whole.save("three", tmp_path)
    assert saved is not None
    lines = train(whole, 3, 6)
    torch._dynamo.reset()  # as a new process would begin
    resumed = build(folders[name], lora, **settings)
    resumed.resume_from_checkpoint(saved)
    assert train(resumed, 3, 6) == lines
    end = whole.get_state_dict()
    for key, value in resumed.get_state_dict().items():
        np.testing.assert_array_equal(value, end[key], err_msg=key)


def test_a_step_takes_the_fast_way(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """By default: compiled layers, bf16 parameters, no logits; and it compiles nothing once each kind of row was seen."""
    calls: list[int] = []
    original = forward.supervised_loss
    monkeypatch.setattr(forward, "supervised_loss", lambda *given: (calls.append(1), original(*given))[1])
    model = build(folders["qwen3"], False)
    live = worker(model).model
    assert {parameter.dtype for parameter in live.parameters()} == {torch.bfloat16}
    assert all(layer._compiled_call_impl is not None for layer in decoder_layers(live))
    assert torch.are_deterministic_algorithms_enabled()
    train(model, 0, 5)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    train(model, 5, 10)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs > 0
    assert len(calls) == 10 * 2


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_bf16_computes_about_the_float32_step(folders: dict[str, Path], lora: bool) -> None:
    exact, half, eager = (
        build(folders["qwen3"], lora, **settings)
        for settings in ({"mixed_precision": "no"}, {"mixed_precision": "bf16"}, {"mixed_precision": "bf16", "compile_layers": False})
    )
    losses, norms = [], []
    for model in (exact, half, eager):
        losses.append(float(model.forward_backward(rows(0), seed=(1,)).loss))
        norms.append(float(model.clip_grad_and_step()))
    print(f"losses {losses}, norms {norms}")
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=2e-3)
    assert norms[1:] == pytest.approx([norms[0]] * 2, rel=2e-2)


def test_adapters_that_take_turns_do_not_run_out_of_compilations(folders: dict[str, Path]) -> None:
    model = TransformersModel(folders["qwen3"], seed=3)
    for number in range(4):
        model.add_adapter_to_model(f"number-{number}", LORA)
        model.set_optimizer("AdamW", lr=1e-3, adapter_name=f"number-{number}")
    for step in range(3):
        for number in range(4):
            model.forward_backward(rows(step), adapter_name=f"number-{number}")
            model.forward_only(rows(step)[:1], adapter_name=f"number-{number}")
            assert model.clip_grad_and_step(adapter_name=f"number-{number}") > 0
