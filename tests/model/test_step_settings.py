"""How a step is computed, and what that changes: nothing, to rounding or to the bit."""

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.model.tiny_models import batch, packed_row, save_model
from tests.parallel.ranks import run_ranks
from twinkle_core.config import LoraConfig
from twinkle_core.device_mesh import DeviceMesh
from twinkle_core.errors import ConfigError
from twinkle_core.infra.environment import fix_cublas_workspace
from twinkle_core.infra.local_group import LocalGroup
from twinkle_core.kernel import layers
from twinkle_core.model import TRANSFORMERS_WORKER, TransformersModel, forward
from twinkle_core.types import PackedRow

LORA = LoraConfig(rank=4, alpha=8, target_modules=("q_proj", "down_proj"))


@pytest.fixture(scope="module", params=["llama", "qwen3"], ids=["own head", "tied head"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp(request.param), request.param)


def rows() -> Sequence[PackedRow]:
    """Of several documents; one row's turns have weights, one row teaches nothing."""
    one, two, three = batch(3)
    weights = np.linspace(0.25, 2.0, len(two.input_ids), dtype=np.float32)
    return [one, replace(two, loss_weights=weights), three, packed_row(6, learn_nothing=True)]


def step(model: TransformersModel) -> tuple[float, float, float, dict[str, np.ndarray]]:
    """Loss, weight, gradient norm, and gradients of one step."""
    output = model.forward_backward(rows(), micro_batch_size=2)
    norm = model.clip_grad_norm(1e9)
    assert norm is not None
    worker = model._group._worker  # type: ignore[attr-defined]
    gradients = {
        name: parameter.grad.full_tensor() if hasattr(parameter.grad, "full_tensor") else parameter.grad
        for name, parameter in worker.state().parameters.items()
    }
    return float(output.loss), output.loss_weight, float(norm), {name: value.detach().clone().numpy() for name, value in gradients.items()}


def build(folder: Path, lora: bool, loss: Any = None, **settings: Any) -> TransformersModel:
    model = TransformersModel(folder, seed=3, **settings)
    if lora:
        model.add_adapter_to_model("default", LORA)
    model.set_optimizer("SGD", lr=0.1)
    if loss is not None:
        model.set_loss(loss)
    return model


def assert_close(found: Any, expected: Any) -> None:
    assert found[:3] == pytest.approx(expected[:3], rel=1e-5)
    for name, value in expected[3].items():
        np.testing.assert_allclose(found[3][name], value, rtol=1e-5, atol=1e-6 * np.abs(value).max(), err_msg=name)


class Fused:
    """Counts what went the way without logits."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.calls = 0
        original = forward.supervised_loss

        def counted(*args: Any) -> torch.Tensor:
            self.calls += 1
            return original(*args)

        patch.setattr(forward, "supervised_loss", counted)


@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_the_loss_at_the_head_is_that_of_the_logits(folder: Path, lora: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(forward.Forward, "can_fuse", lambda _self: False)
        plain = step(build(folder, lora))
    fused = Fused(monkeypatch)
    assert_close(step(build(folder, lora)), plain)
    assert fused.calls == 2
    assert_close(step(build(folder, lora, "CrossEntropyLoss")), plain)
    assert fused.calls == 4


def test_logits_are_made_where_somebody_looks_at_them(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fused = Fused(monkeypatch)
    model = build(folder, True)
    model.set_loss("CrossEntropyLoss", label_smoothing=0.1)
    step(model)
    model = build(folder, True)
    model.add_metric("Accuracy", is_training=True)
    step(model)
    model = build(folder, False)
    model.apply_patch(lambda live: live.register_forward_hook(lambda _module, _inputs, output: output))
    step(model)
    assert fused.calls == 0


def sharded(rank: int, folder: Path, is_fused: bool, checkpointing: str) -> Any:
    if not is_fused:  # in a process that is thrown away
        forward.Forward.can_fuse = lambda _self: False  # type: ignore[method-assign]
    group = LocalGroup(TRANSFORMERS_WORKER, rank=rank, world_size=2, init_method="unused: the group is joined")
    mesh = DeviceMesh.from_sizes(world_size=2, fsdp_size=2)
    return step(build(folder, False, group=group, device_mesh=mesh, mixed_precision="no", activation_checkpointing=checkpointing))


@pytest.mark.slow  # starts processes, twice
def test_the_loss_at_the_head_and_checkpointed_layers_take_part_in_sharding(folder: Path, tmp_path: Path) -> None:
    alone = step(build(folder, False))
    found = run_ranks(2, sharded, tmp_path, folder, True, "full")
    plain = run_ranks(2, sharded, tmp_path, folder, False, "none")
    for rank in range(2):
        assert_close(found[rank], plain[rank])
    assert found[0][2] == pytest.approx(alone[2], rel=1e-4)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_activation_checkpointing_computes_again_and_changes_no_bit(folder: Path, mode: str) -> None:
    def run(**settings: Any) -> tuple[Any, int]:
        model = build(folder, True, **settings)
        calls: list[int] = []
        layer: Any = layers.decoder_layers(model._group._worker.model)[0]  # type: ignore[attr-defined]
        layer.mlp.register_forward_pre_hook(lambda *_: calls.append(1))
        return step(model), len(calls)

    (plain, once), (found, twice) = run(), run(activation_checkpointing=mode)
    assert (once, twice) == (2, 4)
    assert found[:3] == plain[:3]
    for name, value in plain[3].items():
        np.testing.assert_array_equal(found[3][name], value)


def test_settings_of_a_step_are_checked(folder: Path) -> None:
    for settings, why in (
        ({"activation_checkpointing": "some"}, "known: none, selective, full"),
        ({"attention_kernel": "flash9"}, "known: flash2, flash4"),
        ({"attention_kernel": "flash4"}, "needs the package flash-attn-4"),
        ({"activation_checkpointing": "full", "fsdp_config": {"activation_checkpointing": "full"}}, "give one of them"),
    ):
        with pytest.raises(ConfigError, match=why):
            TransformersModel(folder, **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="compile_layers is True, but layers are compiled on a GPU, not on cpu"):
        build(folder, True, compile_layers=True)


def test_why_layers_are_not_compiled_is_told(folder: Path) -> None:
    def why(**changes: Any) -> str | None:
        model = TransformersModel(folder, **changes)._group._worker.model  # type: ignore[attr-defined]
        return layers.why_not_compiled(model)

    assert why() is None
    assert "dropout" in str(why(attention_dropout=0.1))


def test_a_gpu_is_made_deterministic_by_the_environment_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    fix_cublas_workspace()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    fix_cublas_workspace()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(ConfigError, match="CUBLAS_WORKSPACE_CONFIG is ':0:0'.*deterministic=False"):
        fix_cublas_workspace()
