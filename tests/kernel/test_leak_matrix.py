"""Families x training or evaluation x one or two rows: documents of a packed row neither see nor teach each other."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.families.families import FAMILIES, SIZES, VOCABULARY
from twinkle_core.kernel.packed_attention import check_supported, document_boundaries, register
from twinkle_core.processor.base import InputProcessor
from twinkle_core.types import PackedRow

CPU = torch.device("cpu")
LAYERS = {
    "full": ("qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "glm", "glm4", "llama", "smollm2"),
    "sliding window": ("mistral", "gemma2", "gemma3", "gemma4", "gpt_oss"),
    "recurrent": ("qwen3_5", "qwen3_5_moe"),
    "soft-capped": ("gemma2",),
    "sinks": ("gpt_oss",),
    "latent": ("deepseek_v2", "deepseek_v3"),
}
"""Kinds of attention → families that have it."""


@cache
def models(name: str) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A family's tiny model with packed attention, and with transformers' own (eager), of the same weights."""
    family = FAMILIES[name]
    made = []
    for attention in (register(), "eager"):
        torch.manual_seed(7)
        config = AutoConfig.for_model(family.model_type, **{**SIZES, **family.settings, "use_cache": False, "attention_dropout": 0.0})
        model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        for key, parameter in model.named_parameters():  # sinks start as they were allocated
            if key.endswith("sinks"):
                torch.nn.init.normal_(parameter)
        made.append(model)
    check_supported(type(made[0]), made[0].config)
    made[1].load_state_dict(made[0].state_dict())
    return made[0], made[1]


def row(lengths: list[int], seed: int) -> PackedRow:
    ids = np.random.default_rng(seed).integers(3, VOCABULARY, sum(lengths)).astype(np.int32)
    count = len(lengths)
    return PackedRow(input_ids=ids, labels=ids, seq_lens=np.array(lengths, dtype=np.int32), sample_ids=np.arange(count, dtype=np.int64))


def test_each_kind_of_attention_is_there() -> None:
    assert {name for names in LAYERS.values() for name in names} == FAMILIES.keys()
    kinds = {name: models(name)[0].config for name in FAMILIES}
    assert all("linear_attention" in kinds[name].layer_types for name in LAYERS["recurrent"])
    assert all(kinds[name].sliding_window == 5 for name in LAYERS["sliding window"])
    assert all(kinds[name].kv_lora_rank for name in LAYERS["latent"]) and kinds["gemma2"].attn_logit_softcapping
    assert [name for name in FAMILIES if any("sinks" in key for key, _ in models(name)[0].named_parameters())] == ["gpt_oss"]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])
@pytest.mark.parametrize("name", FAMILIES)
def test_documents_neither_see_nor_teach_each_other(name: str, training: bool, rows: int) -> None:
    """Of the second of two or four documents: its outputs are those it has alone, and its loss has exactly no gradient at the others."""
    model, eager = (one.train(training) for one in models(name))
    batch = InputProcessor().collate([row([9, 12], 1), row([1, 7], 2)][:rows])
    lengths = batch["seq_lens"]
    packed, gradient = teach(model, batch, lengths)
    with torch.no_grad():
        for part, ids in zip(packed.split(lengths), batch["input_ids"].split(lengths, dim=1), strict=True):
            alone = eager(input_ids=ids, use_cache=False).logits[0]
            torch.testing.assert_close(part, alone, rtol=1e-4, atol=1e-4)
    assert torch.count_nonzero(gradient[:9]) == torch.count_nonzero(gradient[21:]) == 0
    assert (gradient[9:21].abs().amax(dim=-1) > 0).all()
    leaking, leaked = teach(model, batch, [sum(lengths)])
    assert (leaking[9:21] - packed[9:21]).abs().max() > 1e-2, "the check cannot see a leak"
    assert torch.count_nonzero(leaked[:9]) > 0, "the check cannot see a leak"


def teach(model: PreTrainedModel, batch: dict[str, Any], lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits [T, V] with these boundaries, and the gradient [T, H] at the embeddings of the tokens 9 to 21's squares."""
    kept: list[torch.Tensor] = []

    def keep(_module: torch.nn.Module, _inputs: Any, embeddings: torch.Tensor) -> torch.Tensor:
        kept.append(embeddings.detach().requires_grad_())
        return kept[0]

    handle = model.get_input_embeddings().register_forward_hook(keep)
    try:
        where = {"position_ids": batch["position_ids"], "use_cache": False}
        logits: torch.Tensor = model(input_ids=batch["input_ids"], **where, **document_boundaries(lengths, CPU)).logits[0]
    finally:
        handle.remove()
    logits[9:21].square().sum().backward()
    model.zero_grad()
    assert kept[0].grad is not None
    return logits.detach(), kept[0].grad[0]
