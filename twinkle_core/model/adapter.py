"""LoRA adapters (https://arxiv.org/abs/2106.09685) through peft. Imports torch."""

from __future__ import annotations

import json
from typing import Any

import peft
import torch
from transformers import PreTrainedModel

from twinkle_core.config import LoraConfig
from twinkle_core.errors import ConfigError, TrainingError

EMBEDDINGS = ("lm_head", "embed_tokens")


class Adapter:
    """An adapter inside `model`, with the names that peft gives its tensors in files."""

    def __init__(self, model: PreTrainedModel, name: str, config: LoraConfig | peft.LoraConfig, seed: int) -> None:
        """Changes `model` in place: adds the adapter, freezes the rest. The start depends on `seed` alone."""
        self.name = name
        settings = _as_peft(config)
        _refuse_tied(model, settings)
        torch.manual_seed(seed)
        self._peft_model = peft.get_peft_model(model, settings, adapter_name=name)

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """Trainable parameters by the names that peft saves them under."""
        saved = peft.get_peft_model_state_dict(self._peft_model, adapter_name=self.name, save_embedding_layers=False)
        names = {tensor.data_ptr(): name for name, tensor in saved.items()}
        found: dict[str, torch.nn.Parameter] = {}
        for name, parameter in self._peft_model.named_parameters():
            if parameter.requires_grad:
                if parameter.numel() == 0 or parameter.data_ptr() not in names:
                    shape = list(parameter.shape)
                    raise ConfigError(f"trainable parameter {name} {shape} would not be saved by peft; change the adapter's settings")
                found[names[parameter.data_ptr()]] = parameter
        if not found:
            raise ConfigError("the adapter has no trainable parameter; check target_modules")
        return found

    def config_json(self) -> str:
        """The text of `adapter_config.json`, without any local path."""
        settings = self._peft_model.peft_config[self.name].to_dict()
        settings |= {"base_model_name_or_path": None, "inference_mode": True}
        return json.dumps(settings, indent=2, sort_keys=True, default=_sorted_set) + "\n"


def refuse_untrained(weights: dict[str, torch.Tensor]) -> None:
    """Raises `TrainingError` for an adapter that cannot have learnt anything: empty, or B still all zero."""
    empty = [name for name, tensor in weights.items() if tensor.numel() == 0]
    if not weights or empty:
        raise TrainingError(f"the adapter is empty ({empty or 'no tensors'}): nothing would be saved")
    outer = [tensor for name, tensor in weights.items() if "lora_B" in name]
    if outer and not any(bool(tensor.any()) for tensor in outer):
        raise TrainingError(f"all {len(outer)} lora_B matrices are zero after training: the adapter changes nothing")


def _as_peft(config: LoraConfig | peft.LoraConfig) -> peft.LoraConfig:
    if isinstance(config, peft.LoraConfig):
        return config
    targets = config.target_modules if isinstance(config.target_modules, str) else list(config.target_modules)
    return peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=config.rank,
        lora_alpha=config.alpha,  # type: ignore[arg-type]  # declared int; any number serves as the scale's numerator
        lora_dropout=config.dropout,
        target_modules=targets,
    )


def _refuse_tied(model: PreTrainedModel, settings: peft.LoraConfig) -> None:
    targets = settings.target_modules
    listed = [name for name in targets if name.rsplit(".", 1)[-1] in EMBEDDINGS] if targets and not isinstance(targets, str) else []
    if listed and model.config.tie_word_embeddings:
        raise ConfigError(f"target_modules {sorted(listed)} share one matrix in this model (tied embeddings): merging would change both")


def _sorted_set(value: Any) -> Any:
    if isinstance(value, set):
        return sorted(value)
    raise TypeError(f"{value!r} in the adapter's settings has no JSON form")
