"""Families x training or evaluation x one or two rows: documents of a packed row neither see nor teach each other."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma3TextConfig, GptOssConfig, PreTrainedModel

from tests.model.tiny_models import CONFIGS, SIZES
from twinkle_core.kernel.packed_attention import document_boundaries, register
from twinkle_core.processor.base import InputProcessor
from twinkle_core.types import PackedRow

CPU = torch.device("cpu")
ALTERNATING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "head_dim": 16}
FAMILIES: dict[str, tuple[Any, dict[str, Any]]] = {
    **CONFIGS,
    "gemma2": (Gemma2Config, {**ALTERNATING, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}),
    "gemma3": (Gemma3TextConfig, {**ALTERNATING}),
    "gpt-oss": (GptOssConfig, {**ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 4}),
}


def make(name: str, attention: str) -> PreTrainedModel:
    config_class, settings = FAMILIES[name]
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(
        config_class(**{**SIZES, **settings, "initializer_range": 0.2, "use_cache": False, "attention_dropout": 0.0}),
        attn_implementation=attention,
    )
    for parameter in model.parameters():  # sinks start as they were allocated
        if parameter.ndim == 1 and parameter.shape[0] == SIZES["num_attention_heads"]:
            torch.nn.init.normal_(parameter)
    return model


def row(lengths: list[int], seed: int) -> PackedRow:
    ids = np.random.default_rng(seed).integers(3, 256, sum(lengths)).astype(np.int32)
    count = len(lengths)
    return PackedRow(input_ids=ids, labels=ids, seq_lens=np.array(lengths, dtype=np.int32), sample_ids=np.arange(count, dtype=np.int64))


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", FAMILIES)
def test_documents_neither_see_nor_teach_each_other(name: str, training: bool, rows: int):
    model, eager = make(name, register()).train(training), make(name, "eager").train(training)
    eager.load_state_dict(model.state_dict())
    batch = InputProcessor().collate([row([9, 12], 1), row([1, 7], 2)][:rows])
    lengths = batch["seq_lens"]
    embeddings = model.get_input_embeddings()(batch["input_ids"]).detach().requires_grad_()
    where = {"position_ids": batch["position_ids"], "use_cache": False}
    packed = model(inputs_embeds=embeddings, **where, **document_boundaries(lengths, CPU)).logits[0]
    with torch.no_grad():
        for part, ids in zip(packed.split(lengths), batch["input_ids"].split(lengths, dim=1), strict=True):
            alone = eager(inputs_embeds=model.get_input_embeddings()(ids), use_cache=False).logits[0]
            torch.testing.assert_close(part, alone, rtol=1e-4, atol=1e-4)
        leaking = model(inputs_embeds=embeddings, **where, **document_boundaries([sum(lengths)], CPU)).logits[0]
    assert (leaking[9:21] - packed[9:21]).abs().max() > 1e-2, "the check cannot see a leak"
    packed[9:21].square().sum().backward()
    assert embeddings.grad is not None
    assert torch.count_nonzero(embeddings.grad[0, :9]) == torch.count_nonzero(embeddings.grad[0, 21:]) == 0
    assert (embeddings.grad[0, 9:21].abs().amax(dim=-1) > 0).all()
