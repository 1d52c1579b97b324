"""The families of models that users ask for: a tiny random config of each real architecture, or the reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCABULARY = 128
SIZES: Mapping[str, Any] = MappingProxyType(
    {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "initializer_range": 0.2,
    }
)
"""Small, with outputs that differ clearly from word to word."""
EXPERTS: Mapping[str, Any] = MappingProxyType({"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24})
LATENT: Mapping[str, Any] = MappingProxyType(
    {
        "num_key_value_heads": 4,
        "kv_lora_rank": 12,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "first_k_dense_replace": 1,
        "n_group": 2,
        "topk_group": 1,
        "head_dim": 4,
    }
)
"""Multi-head latent attention, values narrower than keys, a dense layer and one of experts in groups."""
GATED_DELTA: Mapping[str, Any] = MappingProxyType(
    {
        "num_hidden_layers": 4,
        "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 4,
    }
)
ALTERNATING: Mapping[str, Any] = MappingProxyType(
    {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        "sliding_window": 5,
    }
)


@dataclass(frozen=True, kw_only=True)
class Family:
    """A row of the table."""

    covers: str
    """The models that users know by name."""
    model_type: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    experts: tuple[str, ...] = ()
    """Names of the parameters that hold all experts of a layer, for peft's target_parameters."""
    remark: str = ""


FAMILIES: Mapping[str, Family] = MappingProxyType(
    {
        "qwen2": Family(covers="Qwen2, Qwen2.5, R1-Distill-Qwen", model_type="qwen2", settings={"tie_word_embeddings": True}),
        "qwen2_moe": Family(
            covers="Qwen1.5-MoE, Qwen2-MoE",
            model_type="qwen2_moe",
            settings={**EXPERTS, "shared_expert_intermediate_size": 24},
            experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        ),
        "qwen3": Family(covers="Qwen3", model_type="qwen3", settings={"tie_word_embeddings": True}),
        "qwen3_moe": Family(
            covers="Qwen3-MoE",
            model_type="qwen3_moe",
            settings=EXPERTS,
            experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        ),
        "qwen3_5": Family(
            covers="Qwen3.5, Qwen3.6 (text)",
            remark="of a folder with a vision tower, the text model alone is loaded",
            model_type="qwen3_5_text",
            settings={**GATED_DELTA, "tie_word_embeddings": True},
        ),
        "qwen3_5_moe": Family(
            covers="Qwen3.5-MoE, Qwen3.6-MoE (text)",
            remark="as Qwen3.5",
            model_type="qwen3_5_moe_text",
            settings={**GATED_DELTA, **EXPERTS, "shared_expert_intermediate_size": 24},
            experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        ),
        "glm": Family(covers="GLM-4-9B (-hf), GLM-Edge", model_type="glm"),
        "glm4": Family(covers="GLM-4-0414", model_type="glm4"),
        "deepseek_v2": Family(
            covers="DeepSeek-V2, V2-Lite",
            model_type="deepseek_v2",
            settings={**LATENT, "topk_method": "group_limited_greedy"},
            experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        ),
        "deepseek_v3": Family(
            covers="DeepSeek-V3, R1, Prover-V2",
            model_type="deepseek_v3",
            settings=LATENT,
            experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        ),
        "llama": Family(covers="Llama-3, R1-Distill-Llama, Yi", model_type="llama"),
        "smollm2": Family(covers="SmolLM2", model_type="llama", settings={"tie_word_embeddings": True}),
        "mistral": Family(covers="Mistral", model_type="mistral", settings={"sliding_window": 5}),
        "gemma2": Family(
            covers="Gemma-2",
            remark="soft-capped logits: load it with eager attention elsewhere, transformers' default drops the cap",
            model_type="gemma2",
            settings={**ALTERNATING, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
        ),
        "gemma3": Family(
            covers="Gemma-3 (text)",
            remark="folders with a vision tower are not tested",
            model_type="gemma3_text",
            settings={**ALTERNATING, "query_pre_attn_scalar": 8},
        ),
        "gemma4": Family(
            covers="Gemma-4 (text)",
            remark="dense; folders with a vision tower, experts or shared keys are not tested",
            model_type="gemma4_text",
            settings={
                **ALTERNATING,
                "final_logit_softcapping": 5.0,
                "vocab_size_per_layer_input": VOCABULARY,
                "hidden_size_per_layer_input": 8,
                "global_head_dim": 16,
                "num_kv_shared_layers": 0,
            },
        ),
        "gpt_oss": Family(
            covers="gpt-oss",
            remark="sliding windows and attention sinks by plain products",
            model_type="gpt_oss",
            settings={**ALTERNATING, "num_local_experts": 4, "num_experts_per_tok": 2},
            experts=("mlp.experts.gate_up_proj", "mlp.experts.down_proj"),
        ),
    }
)


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A family that cannot be had, and why."""

    covers: str
    config: Mapping[str, Any]
    """What a folder's config.json says, or the settings of a config that transformers carries."""
    reason: str
    error: str
    """Pattern of the message a user sees."""


def _own_code(covers: str, model_type: str, instead: str) -> Refused:
    return Refused(
        covers=covers,
        config={"model_type": model_type, "auto_map": {"AutoConfig": f"configuration_{model_type}.Config"}},
        reason=f"only with code of the model's folder, which is never run; {instead}",
        error="no model that transformers .* carries in its own code",
    )


REFUSED: Mapping[str, Refused] = MappingProxyType(
    {
        "chatglm": _own_code("ChatGLM3, GLM-4-9B (not -hf)", "chatglm", "take GLM-4-9B as `-hf`"),
        "internlm2": _own_code("InternLM2, InternLM2.5", "internlm2", "transformers has none"),
        "deepseek_v32": Refused(
            covers="DeepSeek-V3.2",
            config={"model_type": "deepseek_v32"},
            reason="an indexer chooses keys over the whole row (sparse attention)",
            error="layers of type indexed_attention",
        ),
        "deepseek_v4": Refused(
            covers="DeepSeek-V4",
            config={"model_type": "deepseek_v4"},
            reason="keys are compressed over windows that cross documents",
            error="layers of type compressed_sparse_attention, heavily_compressed_attention",
        ),
        "llama4": Refused(
            covers="Llama-4 (text)",
            config={"model_type": "llama4_text"},
            reason="attention in chunks of the whole row",
            error="layers of type chunked_attention",
        ),
    }
)


def save_family(name: str, folder: Path) -> Path:
    """The family's tiny model in `folder`, always the same."""
    family = FAMILIES[name]
    config = AutoConfig.for_model(family.model_type, **{**SIZES, **family.settings})
    with torch.random.fork_rng():
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(folder)
    return folder
