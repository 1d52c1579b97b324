"""Reading the config of a base model, and saying clearly why a folder holds none that can be trained. Imports transformers."""

from __future__ import annotations

from pathlib import Path

import transformers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from twinkle_core.errors import ConfigError


def load_config(folder: str | Path) -> PreTrainedConfig:
    """The config in `folder`. Never runs code from there.

    Raises `ConfigError` for model types that the installed transformers does not carry (with code of their own or without), those
    without a causal language model, and quantized weights.
    """
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"{Path(folder) / 'config.json'} describes no model that transformers {transformers.__version__} carries in its own code "
            f"({reason}); code from a model's folder is never run: take a version of the model in transformers' form"
        ) from error
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ConfigError(
            f"model type '{config.model_type}' in {folder} has no causal language model in transformers {transformers.__version__}"
        )
    refuse_quantized(config, folder)
    return config


def refuse_quantized(config: PreTrainedConfig, folder: str | Path) -> None:
    if getattr(config, "quantization_config", None):
        raise ConfigError(f"the model in {folder} is quantized; convert it to plain weights first")
