"""Reading a base model for training. Imports torch."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import transformers
from accelerate import init_empty_weights
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from twinkle_core.errors import ConfigError
from twinkle_core.hub.resolve import resolve_model
from twinkle_core.kernel import packed_attention
from twinkle_core.model.base_config import load_config
from twinkle_core.model.heads import of_score_head, score_head
from twinkle_core.model.spec import ModelSpec


def load_base(folder: str | Path, device: torch.device) -> PreTrainedModel:
    """The model in `folder` on `device`, float32, with packed attention, in training mode. Never runs code from the folder."""
    if not Path(folder).is_dir():
        raise ConfigError(f"model folder {folder} does not exist on this machine")
    return _ready(_read(AutoModelForCausalLM, Path(folder), load_config(Path(folder))), device)


def load_model(
    spec: ModelSpec, device: torch.device, *, on_meta: bool = False, check: Callable[[PreTrainedModel], None] | None = None
) -> tuple[PreTrainedModel, Path | None]:
    """The model that `spec` describes, as `load_base` gives it, and the folder of its weights, if it has one.

    Weights that are not read are drawn from `spec.seed`. `on_meta` gives parameters no memory and reads no weights; buffers are real.
    `check` sees the model without memory first, and may refuse it before weights are read.
    """
    model_class = class_of(spec.model_cls)
    folder = None if spec.model_id is None else _folder(spec.model_id, spec.cache_dir)
    config = spec.config if spec.config is not None else load_config(_existing(folder))
    _override(config, spec)
    if check is not None:
        empty = _built(model_class, config, spec.seed, on_meta=True)
        check(empty)
        if on_meta:
            return empty, folder
    if folder is not None and not on_meta:
        return _ready(_read(model_class, folder, config, spec.seed), device), folder
    return _built(model_class, config, spec.seed, on_meta=on_meta, device=None if on_meta else device), folder


def _built(model_class: Any, config: PreTrainedConfig, seed: int, *, on_meta: bool, device: torch.device | None = None) -> PreTrainedModel:
    """Random weights, or with `on_meta` none."""
    build: Any = model_class.from_config if hasattr(model_class, "from_config") else model_class._from_config
    torch.manual_seed(seed)
    with init_empty_weights(include_buffers=False) if on_meta else nullcontext():
        model = build(config, dtype=torch.float32, attn_implementation=packed_attention.register())
    if on_meta:
        model.tie_weights()  # the context gave each name a parameter of its own
    return _ready(model, device)


def class_of(model_cls: Any) -> Any:
    """A class of transformers by name; a class is taken as it is."""
    found = getattr(transformers, model_cls, None) if isinstance(model_cls, str) else model_cls
    if not (
        isinstance(found, type) and hasattr(found, "from_pretrained") and (hasattr(found, "from_config") or hasattr(found, "_from_config"))
    ):
        raise ConfigError(
            f"model_cls is {model_cls!r}, which is no model class of transformers; use AutoModelForCausalLM or a class like it"
        )
    return found


def _folder(model_id: str, cache: Path) -> Path:
    """A folder that transformers loads; several processes of one machine may ask at once."""
    if Path(model_id).is_dir():
        return Path(model_id)
    return resolve_model(model_id, cache).materialise()


def _existing(folder: Path | None) -> Path:
    if folder is None:
        raise ConfigError("neither model_id nor config is given")
    return folder


def _override(config: PreTrainedConfig, spec: ModelSpec) -> None:
    known = config.to_dict().keys() | {"num_labels"}
    for name, value in spec.overrides.items():
        if name not in known:
            raise ConfigError(f"{name}={value!r} is no setting of a {config.model_type} model; known: {', '.join(sorted(known))}")
        setattr(config, name, value)


def _read(model_class: Any, folder: Path, config: PreTrainedConfig, seed: int = 0) -> PreTrainedModel:
    loaded: Any = model_class.from_pretrained(
        folder,
        config=config,
        dtype=torch.float32,
        attn_implementation=packed_attention.register(),
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
    )
    model: PreTrainedModel = loaded[0]
    info: dict[str, Any] = loaded[1]
    new = set(of_score_head(info["missing_keys"])) if score_head(model) is not None else set()  # a language model's folder has no such head
    if info["missing_keys"] - new or info["mismatched_keys"]:
        missing, misshapen = sorted(info["missing_keys"] - new)[:5], sorted(map(str, info["mismatched_keys"]))[:5]
        raise ConfigError(f"weights in {folder} are incomplete: {missing} missing, {misshapen} misshapen")
    _draw({name: parameter for name, parameter in model.named_parameters() if name in new}, config, seed)
    return model


def _draw(parameters: Mapping[str, torch.nn.Parameter], config: PreTrainedConfig, seed: int) -> None:
    """The start of a head that the folder lacks: the same for the same seed, on every worker."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters.values():
            if parameter.ndim > 1:
                parameter.normal_(0.0, config.get_text_config().initializer_range, generator=generator)
            else:
                parameter.zero_()


def _ready(model: PreTrainedModel, device: torch.device | None) -> PreTrainedModel:
    packed_attention.check_supported(type(model), model.config)
    if score_head(model) is not None:
        model.config.architectures = [type(model).__name__]  # what is saved says so, and not that it is the base's kind of model
    elif "logits_to_keep" not in inspect.signature(model.forward).parameters:
        raise ConfigError(f"{type(model).__name__} is no causal language model: its forward pass has no logits_to_keep")
    model.config.use_cache = False
    if device is not None:
        torch.nn.Module.to(model, device)
    model.train()
    return model
