"""Layers that compute the same on a CPU in less time: linear ones, LoRA's, RMS norms. Imports torch.

A layer's forward function is put in place on the instance; parameters, names, hooks and types stay. Whatever a function
is not written for (half precision, sharded weights, DoRA, several adapters at once, …) goes to the class's own.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from peft.tuners.lora.layer import Linear as LoraLinear
from transformers import PreTrainedModel

from twinkle_core.kernel.cpu_products import linear_product, lora_product
from twinkle_core.kernel.cpu_rms_norm import rms_norm

PLAIN_RMS_NORMS = {
    f"transformers.models.{folder}.modeling_{folder}.{name}"
    for folder, name in (
        ("llama", "LlamaRMSNorm"),
        ("mistral", "MistralRMSNorm"),
        ("qwen2", "Qwen2RMSNorm"),
        ("qwen2_moe", "Qwen2MoeRMSNorm"),
        ("qwen3", "Qwen3RMSNorm"),
        ("qwen3_moe", "Qwen3MoeRMSNorm"),
        ("smollm3", "SmolLM3RMSNorm"),
    )
}
"""Those that multiply by `weight` itself, after rounding to the input's type. Others add one to it, or have none."""


def use_cpu_layers(model: PreTrainedModel) -> None:
    """Puts the functions in place in the model's decoder, where they are not yet. Call it again after an adapter was added."""
    decoder: Any = model.get_decoder()
    layers = getattr(decoder, "layers", None)
    if not isinstance(layers, torch.nn.ModuleList):
        return
    for module in [*layers.modules(), *decoder.children()]:
        kind = type(module)
        function = _rms_norm if f"{kind.__module__}.{kind.__qualname__}" in PLAIN_RMS_NORMS else _FUNCTIONS.get(kind)
        if function is not None and "forward" not in vars(module):
            module.forward = MethodType(function, module)


def drop_cpu_layers(model: PreTrainedModel) -> None:
    """Takes the functions out again: somebody is about to change the layers, or what their classes do, and shall be heard."""
    ours = {*_FUNCTIONS.values(), _rms_norm}
    for module in model.modules():
        if getattr(vars(module).get("forward"), "__func__", None) in ours:
            del module.forward


def _linear(self: torch.nn.Linear, inputs: torch.Tensor) -> torch.Tensor:
    if not _are_plain(inputs, self.weight):
        return torch.nn.Linear.forward(self, inputs)
    return linear_product(inputs, self.weight, self.bias)


def _rms_norm(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    if not _are_plain(hidden_states, self.weight):
        result: torch.Tensor = type(self).forward(self, hidden_states)
        return result
    return rms_norm(hidden_states, self.weight, self.variance_epsilon)


def _lora(self: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    active = [name for name in self.active_adapters if name in self.lora_A]
    if args or kwargs or self.disable_adapters or self.merged or len(active) != 1 or active[0] in self.lora_variant:
        return LoraLinear.forward(self, x, *args, **kwargs)
    base, down, up = self.base_layer, self.lora_A[active[0]], self.lora_B[active[0]]
    if type(base) is not torch.nn.Linear or up.bias is not None or not _are_plain(x, base.weight, down.weight, up.weight):
        return LoraLinear.forward(self, x)
    dropout = self.lora_dropout[active[0]]
    dropped = None if isinstance(dropout, torch.nn.Identity) or not dropout.training else dropout(x)
    product = lora_product(x, dropped, base.weight, down.weight, up.weight, self.scaling[active[0]])
    return product if base.bias is None else product + base.bias


def _are_plain(*tensors: torch.Tensor) -> bool:
    """Whole float32 tensors of a CPU, outside autocast."""
    return not torch.is_autocast_enabled("cpu") and all(
        type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.dtype == torch.float32 and tensor.is_cpu for tensor in tensors
    )


_FUNCTIONS: dict[type, Any] = {torch.nn.Linear: _linear, LoraLinear: _lora}
