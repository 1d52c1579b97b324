"""Patches by name, class and function, and what is no patch."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.model.tiny_models import packed_row, save_model
from twinkle_core.config import LoraConfig
from twinkle_core.errors import ConfigError
from twinkle_core.model import TransformersModel
from twinkle_core.model.parallel.fully_sharded import decoder_layers
from twinkle_core.patch import NOT_NEEDED, PATCHES, Patch, apply_context, apply_patch


class Scaled(Patch):
    """Scales what a linear layer gives."""

    def __call__(self, module: Any, factor: float = 2.0) -> str:
        self._before = module.forward
        module.forward = lambda inputs: self._before(inputs) * factor
        return f"by {factor}"

    def unpatch(self, module: Any) -> None:
        module.forward = self._before


class Made:
    """A class that is no `Patch`: made with the arguments, called with the model."""

    def __init__(self, factor: float) -> None:
        self.factor = factor

    def __call__(self, module: Any) -> None:
        Scaled()(module, self.factor)


def scale(module: Any, factor: float) -> None:
    Scaled()(module, factor)


@pytest.mark.parametrize("patch", [Scaled, Scaled(), Made, scale, functools.partial(scale)])
def test_a_patch_is_called_with_the_model_and_its_arguments(patch: Any) -> None:
    layer = torch.nn.Linear(1, 1)
    before = layer(torch.ones(1))
    apply_patch(layer, patch, factor=3.0)
    assert torch.equal(layer(torch.ones(1)), before * 3)


def test_a_context_takes_a_patch_back_even_after_an_error() -> None:
    layer = torch.nn.Linear(1, 1)
    before = layer(torch.ones(1))

    def inside() -> None:
        with apply_context(layer, Scaled, factor=3.0) as said:
            assert said == "by 3.0" and torch.equal(layer(torch.ones(1)), before * 3)
            raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"):
        inside()
    assert torch.equal(layer(torch.ones(1)), before)


def test_a_model_that_names_no_layer_is_told_which_it_is(tmp_path: Path) -> None:
    model = TransformersModel(save_model(tmp_path, "llama"))
    inner = model._group._worker.model  # type: ignore[attr-defined]
    for module in inner.modules():
        if hasattr(module, "_no_split_modules"):
            module._no_split_modules = None
    with pytest.raises(ConfigError, match="names no decoder layer"):
        decoder_layers(inner)
    model.apply_patch("NoSplitModulesPatch", names=["LlamaDecoderLayer"])
    assert [type(layer).__name__ for layer in decoder_layers(inner)] == ["LlamaDecoderLayer"] * 2
    with pytest.raises(ConfigError, match="LlamaLayer is no class of a module of it; known: .*LlamaDecoderLayer"):
        model.apply_patch("NoSplitModulesPatch", names=["LlamaLayer"])
    with pytest.raises(ConfigError, match="no name is given"):
        model.apply_patch("NoSplitModulesPatch")


def test_a_patch_of_a_class_reaches_the_model(tmp_path: Path) -> None:
    class HeadScaled(Patch):
        def __call__(self, module: Any, factor: float) -> None:
            Scaled()(module.lm_head, factor)

    plain, patched = (TransformersModel(save_model(tmp_path / name, "llama")) for name in ("a", "b"))
    patched.apply_patch(HeadScaled, factor=2.0)
    (expected,), (found,) = (model.forward_only([packed_row(5)], return_logits=True) for model in (plain, patched))
    assert (found["logits"] == expected["logits"] * 2).all()


@pytest.mark.parametrize(
    ("patch", "arguments", "message"),
    [
        ("liger", {}, f"patch is 'liger'; known: {', '.join(PATCHES)}; or give a function"),
        ("ms://org/patch", {}, "code that comes from a hub is never run"),
        ("TransformersFusedCEPatch", {}, r"set_loss\('FusedLinearCrossEntropyLoss'\) needs none"),
        (Scaled, {"factr": 2.0}, "patch Scaled takes no 'factr'; known: module, factor"),
        (Made, {"factr": 2.0}, "patch Made takes no 'factr'; known: factor"),
        (scale, {"factr": 2.0}, "patch scale takes no 'factr'"),
        (3, {}, "patch is 3, which cannot be called"),
    ],
)
def test_what_is_no_patch_is_refused(patch: Any, arguments: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_patch(torch.nn.Linear(1, 1), patch, **arguments)


def test_every_patch_of_twinkle_is_there_or_refused_with_a_reason() -> None:
    """The classes of twinkle/patch, 0.5.1."""
    theirs = {
        "GatedDeltaNetPaddingFreePatch", "MegatronEmbeddingPatch", "MegatronPeft", "NoSplitModulesPatch", "Qwen3AllowToolTailTemplate",
        "Qwen3ChatTemplate", "TransformersEmbeddingPatch", "TransformersFusedCEPatch", "VLLMLoraWeights", "VLLMMoEWeights",
    }  # fmt: skip
    assert PATCHES.keys() | NOT_NEEDED.keys() == theirs and not PATCHES.keys() & NOT_NEEDED.keys()


def test_a_patch_that_cannot_be_taken_back_says_so() -> None:
    class Forever(Patch):
        def __call__(self, module: Any) -> None:
            pass

    with pytest.raises(ConfigError, match=re.escape("Forever cannot be taken back")), apply_context(torch.nn.Linear(1, 1), Forever()):
        pass
    module = torch.nn.Linear(1, 1)
    with pytest.raises(ConfigError, match="which cannot be taken back"), apply_context(module, lambda changed: changed.bias.data.zero_()):  # type: ignore[arg-type]
        pytest.fail("it was applied")


@pytest.mark.parametrize("when", ["before the adapter", "before the first pass", "after it"])
def test_a_patch_is_heard_by_layers_that_a_cpu_computes_otherwise(tmp_path: Path, when: str) -> None:
    """A hook on the layer below an adapter, and another forward pass of a class."""
    before_class = LlamaRMSNorm.forward

    def change(module: Any) -> None:
        for name, layer in module.named_modules():
            if name.endswith(("q_proj", "q_proj.base_layer")) and type(layer) is torch.nn.Linear:
                layer.register_forward_hook(lambda module, inputs, output: seen.append("hook"))
        LlamaRMSNorm.forward = lambda self, states: (seen.append("class"), before_class(self, states))[1]  # type: ignore[assignment]

    seen: list[str] = []
    model = TransformersModel(save_model(tmp_path, "llama", num_hidden_layers=1))
    try:
        if when == "before the adapter":
            model.apply_patch(change)
        model.add_adapter_to_model("default", LoraConfig(rank=2))
        if when == "before the first pass":
            model.apply_patch(change)
        model.forward_only([packed_row(5)])
        if when == "after it":
            assert seen == []
            model.apply_patch(change)
            model.forward_only([packed_row(5)])
        assert sorted(seen) == ["class"] * 3 + ["hook"]
    finally:
        LlamaRMSNorm.forward = before_class  # type: ignore[method-assign]
