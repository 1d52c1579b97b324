"""Reading a base model for training. Imports torch."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from twinkle_core.errors import ConfigError
from twinkle_core.kernel import packed_attention


def load_base(folder: str | Path) -> PreTrainedModel:
    """The model in `folder`, float32, with packed attention, in training mode. Never runs code from the folder."""
    if not Path(folder).is_dir():
        raise ConfigError(f"model folder {folder} does not exist on this machine")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    refuse_quantized(config, folder)
    model, info = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation=packed_attention.register(),
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
    )
    packed_attention.check_supported(type(model), model.config)
    if info["missing_keys"] or info["mismatched_keys"]:
        raise ConfigError(f"weights in {folder} are incomplete: {sorted(info['missing_keys'])[:5]} missing, {info['mismatched_keys'][:5]} misshapen")
    model.config.use_cache = False
    return model.train()


def refuse_quantized(config: object, folder: str | Path) -> None:
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"the model in {folder} is quantized; convert it to plain weights first")
