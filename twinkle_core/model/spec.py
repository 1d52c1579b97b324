"""What a model is built of: plain data that travels from the driver to its workers. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from twinkle_core.errors import ConfigError

MIXED_PRECISIONS = ("no", "fp16", "bf16", "fp8")
CHECKPOINTING = ("none", "selective", "full")
KERNELS = ("flash2", "flash4")
STRATEGIES = ("accelerate", "native_fsdp")
DEFAULT_CACHE = Path.home() / ".cache" / "twinkle"
NOT_TAKEN = {
    "trust_remote_code": "code that comes with a model is never run",
    "attn_implementation": "attention is by document of a packed row, and set here",
    "torch_dtype": "mixed_precision decides the compute type; parameters are read as float32",
    "dtype": "mixed_precision decides the compute type; parameters are read as float32",
    "device_map": "device_mesh decides where parameters lie",
    "quantization_config": "quantized weights cannot be trained; give plain ones",
}
"""Arguments of transformers' `from_pretrained` that would be passed on elsewhere, and why not here."""
DDP_SETTINGS = ("find_unused_parameters", "broadcast_buffers", "bucket_cap_mb", "gradient_as_bucket_view", "static_graph")
"""Settings of torch's DistributedDataParallel that change nothing here: gradients are one flat buffer, summed once a step."""


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """One model and how it is to be computed."""

    model_id: str | None
    """Folder, .gguf file, hf://…, ms://…, s3://… or pypi://…; None for random weights by `config`."""
    model_cls: Any = "AutoModelForCausalLM"
    """Name of a class of transformers, or the class."""
    config: Any = None
    """A transformers configuration that replaces the one beside the weights."""
    overrides: Mapping[str, Any] = field(default_factory=dict)
    """Attributes of the configuration to set."""
    cache_dir: Path = DEFAULT_CACHE
    mixed_precision: str | None = "no"
    """None: bf16 on a GPU, no elsewhere."""
    seed: int = 0
    strategy: str = "accelerate"
    device_mesh: Any = None
    fsdp_config: Mapping[str, Any] = field(default_factory=dict)
    memory_efficient_init: bool = False
    grad_scaler_config: Mapping[str, Any] = field(default_factory=dict)
    activation_checkpointing: str = "none"
    """What of each layer the backward pass computes again: nothing; all but products and attention ('selective'); all ('full')."""
    compile_layers: bool | None = None
    """None: on a GPU, where the model's layers can be compiled."""
    attention_kernel: str = "flash2"
    """On a GPU: torch's own, or 'flash4', of the package flash-attn-4."""
    deterministic: bool = True
    """On a GPU: the same bits from the same input. On a CPU that is so anyway."""

    def __post_init__(self) -> None:
        if self.mixed_precision is not None and self.mixed_precision not in MIXED_PRECISIONS:
            raise ConfigError(f"mixed_precision is {self.mixed_precision!r}; known: {', '.join(MIXED_PRECISIONS)}")
        if self.strategy not in STRATEGIES:
            raise ConfigError(f"strategy is {self.strategy!r}; known: {', '.join(STRATEGIES)} (both mean the same: the mesh decides)")
        for name, known in (("activation_checkpointing", CHECKPOINTING), ("attention_kernel", KERNELS)):
            if getattr(self, name) not in known:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; known: {', '.join(known)}")
        other = self.fsdp_config.get("activation_checkpointing", "no")
        if self.activation_checkpointing != "none" and other != "no":
            raise ConfigError(
                f"activation_checkpointing is {self.activation_checkpointing!r}, and {other!r} in fsdp_config: give one of them"
            )
        if self.model_id is None and self.config is None:
            raise ConfigError("neither model_id nor config is given: name a model, or give a transformers configuration for random weights")
        for name, reason in NOT_TAKEN.items():
            if name in self.overrides:
                raise ConfigError(f"{name}={self.overrides[name]!r} is not taken: {reason}")


def check_ddp(settings: Mapping[str, Any]) -> None:
    """Raises `ConfigError` for a key that torch's DistributedDataParallel does not have."""
    unknown = sorted(settings.keys() - set(DDP_SETTINGS))
    if unknown:
        raise ConfigError(f"ddp_config has {', '.join(unknown)}; known: {', '.join(DDP_SETTINGS)} (none is needed: see the documentation)")
