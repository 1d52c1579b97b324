"""LoRA adapters (https://arxiv.org/abs/2106.09685) through peft. Imports torch."""

from __future__ import annotations

import dataclasses
import json
import re
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import peft
import torch
from transformers import PreTrainedModel

from twinkle_core.config import LoraConfig
from twinkle_core.errors import ConfigError, DataError, TrainingError
from twinkle_core.model.checkpoint_files import ADAPTER_CONFIG_FILE, ADAPTER_FILE, read_json, read_tensors

EMBEDDINGS = ("lm_head", "embed_tokens")
_PREFIX = "lora_"
_NAME = re.compile(r"[A-Za-z0-9_-]+")


class Adapter:
    """One adapter inside `model`, beside others, with the names that peft gives its tensors in files."""

    def __init__(
        self,
        model: PreTrainedModel,
        name: str,
        config: LoraConfig | peft.LoraConfig,
        seed: int,
        *,
        beside: Adapter | None = None,
        is_trainable: bool = True,
    ) -> None:
        """Changes `model` in place: adds the adapter, freezes the rest. The start depends on `seed` alone.

        `beside` is an adapter that the model has already.
        """
        if not _NAME.fullmatch(name) or name in _PREFIX:
            raise ConfigError(
                f"adapter name {name!r}: letters, digits, '-' and '_' are taken, and no part of {_PREFIX!r} (peft mistakes it)"
            )
        self.name = name
        self.is_trainable = is_trainable
        settings = as_peft(config)
        _refuse_tied(model, settings)
        torch.manual_seed(seed)
        if beside is None:
            self._peft_model = peft.get_peft_model(model, settings, adapter_name=name)
        else:
            self._peft_model = beside._peft_model
            self._peft_model.add_adapter(name, settings)
        self.activate()
        self._names = self._name_parameters()
        self._refuse_tied_head(model)

    def activate(self) -> None:
        """Makes this the adapter that the model computes with and whose parameters get gradients."""
        self._peft_model.set_adapter(self.name)
        if not self.is_trainable:
            self._peft_model.requires_grad_(False)

    @property
    def disabled(self) -> AbstractContextManager[None]:
        """The base model alone."""
        context: AbstractContextManager[None] = self._peft_model.disable_adapter()
        return context

    def parameters(self) -> dict[str, torch.nn.Parameter]:
        """The adapter's parameters by the names that peft saves them under, as they are now: placing a model may replace them."""
        parameters = dict(self._peft_model.named_parameters())
        return {saved: parameters[name] for saved, name in self._names.items()}

    def config_dict(self) -> dict[str, Any]:
        """The adapter's settings as plain values, without any local path."""
        settings = self._peft_model.peft_config[self.name].to_dict()
        settings |= {"base_model_name_or_path": None, "inference_mode": True}
        result: dict[str, Any] = json.loads(json.dumps(settings, sort_keys=True, default=_sorted_set))
        return result

    def config_json(self) -> str:
        """The text of `adapter_config.json`."""
        return json.dumps(self.config_dict(), indent=2, sort_keys=True) + "\n"

    def _name_parameters(self) -> dict[str, str]:
        """Name in files -> name in the model."""
        parameters = dict(self._peft_model.named_parameters())
        marks = {name: torch.full((1,), number) for number, name in enumerate(parameters)}
        saved = peft.get_peft_model_state_dict(self._peft_model, marks, adapter_name=self.name, save_embedding_layers=False)
        names = list(parameters)
        found = {name: names[int(mark)] for name, mark in saved.items()}
        taken = set(found.values())
        for name, parameter in parameters.items():
            if parameter.requires_grad and (name not in taken or parameter.numel() == 0):
                shape = list(parameter.shape)
                raise ConfigError(f"trainable parameter {name} {shape} would not be saved by peft; change the adapter's settings")
            if name in taken:
                parameter.data = parameter.data.float()  # a copy of a module of a base in half precision
        if not found:
            raise ConfigError("the adapter has no trainable parameter; check target_modules")
        return found

    def _refuse_tied_head(self, model: PreTrainedModel) -> None:
        touched = sorted({part for name in self._names for part in name.split(".") if part in EMBEDDINGS})
        if touched and model.config.tie_word_embeddings:
            raise ConfigError(f"the adapter changes {touched}, which share one matrix here (tied embeddings): merging would change both")


def read_adapter(folder: str | Path) -> tuple[peft.LoraConfig, dict[str, torch.Tensor]]:
    """Settings and tensors of an adapter in peft's form. Raises `DataError` where they are not LoRA's, or are empty or all zero."""
    path = Path(folder)
    settings = read_json(path / ADAPTER_CONFIG_FILE)
    if settings.get("peft_type") != "LORA":
        raise DataError(f"{path / ADAPTER_CONFIG_FILE} has peft_type {settings.get('peft_type')!r}; LORA adapters are taken")
    known = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    if settings.get("auto_mapping"):
        settings["auto_mapping"] = None
    try:
        config = peft.LoraConfig(
            **{name: value for name, value in settings.items() if name in known and name not in ("peft_type", "inference_mode")}
        )
    except (TypeError, ValueError) as error:
        raise DataError(f"{path / ADAPTER_CONFIG_FILE} is not understood: {error}") from error
    tensors = read_tensors(path / ADAPTER_FILE)
    try:
        refuse_untrained(tensors)
    except TrainingError as error:
        raise DataError(f"{path / ADAPTER_FILE}: {error}") from error
    return config, tensors


def refuse_untrained(weights: dict[str, torch.Tensor]) -> None:
    """Raises `TrainingError` for an adapter that cannot have learnt anything: empty, or B still all zero."""
    empty = [name for name, tensor in weights.items() if tensor.numel() == 0]
    if not weights or empty:
        raise TrainingError(f"the adapter is empty ({empty or 'no tensors'}): nothing would be saved")
    outer = [tensor for name, tensor in weights.items() if "lora_B" in name]
    if outer and not any(bool(tensor.any()) for tensor in outer):
        raise TrainingError(f"all {len(outer)} lora_B matrices are zero after training: the adapter changes nothing")


def as_peft(config: LoraConfig | peft.LoraConfig) -> peft.LoraConfig:
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
    named = [*([] if not targets or isinstance(targets, str) else targets), *(settings.modules_to_save or ())]
    listed = [name for name in named if name.rsplit(".", 1)[-1] in EMBEDDINGS]
    if listed and model.config.tie_word_embeddings:
        raise ConfigError(
            f"target_modules or modules_to_save {sorted(listed)} share one matrix here (tied embeddings): merging would change both"
        )


def _sorted_set(value: Any) -> Any:
    if isinstance(value, set):
        return sorted(value)
    raise TypeError(f"{value!r} in the adapter's settings has no JSON form")
