"""Reading a base model for training. Imports torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from twinkle_core.errors import ConfigError
from twinkle_core.kernel import packed_attention


def load_base(folder: str | Path, device: torch.device) -> PreTrainedModel:
    """The model in `folder` on `device`, float32, with packed attention, in training mode. Never runs code from the folder."""
    if not Path(folder).is_dir():
        raise ConfigError(f"model folder {folder} does not exist on this machine")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    refuse_quantized(config, folder)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation=packed_attention.register(),
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
    )
    model: PreTrainedModel = loaded[0]
    info: dict[str, Any] = loaded[1]
    packed_attention.check_supported(type(model), model.config)
    if info["missing_keys"] or info["mismatched_keys"]:
        missing, misshapen = sorted(info["missing_keys"])[:5], sorted(map(str, info["mismatched_keys"]))[:5]
        raise ConfigError(f"weights in {folder} are incomplete: {missing} missing, {misshapen} misshapen")
    model.config.use_cache = False
    torch.nn.Module.to(model, device)
    model.train()
    return model


def refuse_quantized(config: object, folder: str | Path) -> None:
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"the model in {folder} is quantized; convert it to plain weights first")
