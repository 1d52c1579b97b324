"""Decoder layers compiled one by one, and recomputed in the backward pass instead of kept. Imports torch.

Layer by layer rather than the whole model: layers of a kind share one compilation, and the loop over them stays plain Python.
Sizes are symbolic from the start: a row of another length or with another number of documents compiles nothing, and which
kernels a row meets does not depend on the rows before it, so that a resumed run computes the same bits.
"""

from __future__ import annotations

from functools import partial
from typing import Any, Literal

import torch
import torch.nn.attention.varlen  # defines the operation named in PRODUCTS
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts
from transformers import PreTrainedModel

from twinkle_core.errors import ConfigError
from twinkle_core.kernel import packed_attention, recurrent_layers

Checkpointing = Literal["none", "selective", "full"]
PRODUCTS = (
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.torch_attn._varlen_attn.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
)
"""What selective checkpointing of an eager layer keeps: matrix products and attention."""
VARIANTS = 16
"""Compilations that the layers may have for each adapter: one for each kind of layer, in training, in evaluation, with one token alone."""


def decoder_layers(model: PreTrainedModel) -> list[torch.nn.Module]:
    """The model's layers, first to last. Raises `ConfigError` where transformers does not show them as one list."""
    layers = getattr(model.get_decoder(), "layers", None)
    if not isinstance(layers, torch.nn.ModuleList) or not len(layers):
        raise ConfigError(f"model type '{model.config.model_type}' has no list of decoder layers to compile or to checkpoint")
    return list(layers)


def why_not_compiled(model: PreTrainedModel) -> str | None:
    """What of the model makes its layers no single graph; None where nothing known does."""
    config = model.config.get_text_config()
    if config._attn_implementation != packed_attention.NAME:
        return f"its attention is {config._attn_implementation}"
    if config.model_type in recurrent_layers.LAYERS:
        return "its recurrent layers cut documents apart on the CPU"
    if getattr(config, "attention_dropout", 0.0) or getattr(config, "attn_logit_softcapping", None) is not None:
        return "its attention has dropout or soft-capped logits, and is written out by document"
    names = [name.lower() for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    if any(name.endswith(".sinks") for name in names):
        return "its attention has sinks, and is written out by document"
    if any("expert" in name for name in names):
        return "its experts get as many tokens as the router gives them"
    return None


def prepare_layers(model: PreTrainedModel, *, compiled: bool = False, checkpointing: Checkpointing = "none") -> None:
    """How each decoder layer runs, and what its backward pass computes again. Parameter names stay as they are.

    Call it once, after adapters were added. `compiled`, on a GPU only: each layer becomes one graph at its first call; a layer that cannot
    is an error then, and so is compiling again and again, for both would be slow and look fine. `checkpointing`: nothing is
    computed again, or all but the dear operations, or the whole layer. Uncompiled, its result is that
    without checkpointing to the bit where the kernels are deterministic; dropout draws the same numbers again.
    """
    if checkpointing not in ("none", "selective", "full"):
        raise ConfigError(f"activation checkpointing is {checkpointing!r}; known: none, selective, full")
    layers: list[Any] = decoder_layers(model)
    if compiled and checkpointing == "selective":
        raise ConfigError("selective checkpointing works on uncompiled layers; compiled ones choose by themselves, or take 'full'")
    if compiled and model.device.type != "cuda":
        raise ConfigError(
            f"layers are compiled on a GPU, not on {model.device.type}: there the lengths of the documents would be compiled in"
        )
    if compiled:
        allow_variants(1)
        torch._dynamo.config.fail_on_recompile_limit_hit = True
    for layer in layers:
        if compiled:
            layer.compile(fullgraph=True, dynamic=True)
        if checkpointing != "none":
            if not hasattr(layer, "gradient_checkpointing"):
                raise ConfigError(f"{type(layer).__name__} does not take part in activation checkpointing")
            layer.gradient_checkpointing = True
            contexts: dict[str, Any] = (
                {"context_fn": partial(create_selective_checkpoint_contexts, _keep_products)} if checkpointing == "selective" else {}
            )
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, **contexts)


def allow_variants(adapters: int) -> None:
    """Each adapter that is switched on makes compiled layers other ones."""
    torch._dynamo.config.recompile_limit = max(VARIANTS * adapters, torch._dynamo.config.recompile_limit)


def _keep_products(_context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE
