"""What the settings of a sharded model promise: half precision within its tolerance, layers computed again, memory spared."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.tensor import DTensor

from tests.model.tiny_models import save_model
from tests.parallel.bodies import gradients_of_batch, open_model
from tests.parallel.oracle import oracle_of_batch, packed_rows, save_adapter
from tests.parallel.ranks import run_ranks

HALF_TOLERANCE = 0.1
"""Norm of the error of each gradient in bf16, as a share of its norm: bf16 keeps 8 bits, each rounding is up to 0.4%."""


def half_precision(rank: int, folder: Path, adapter: Path | None, sizes: dict[str, int] | None) -> dict[str, Any]:
    """In bf16: a batch's gradients, the types that a layer computes in, and those of what a rank keeps."""
    model, worker = open_model(rank, folder, sizes, mixed_precision="bf16")
    if adapter is not None:
        model.add_adapter_to_model("default", adapter)
    model.set_optimizer("AdamW", lr=1e-3)
    seen: set[str] = set()

    def look(module: Any, _inputs: Any, output: torch.Tensor) -> None:
        seen.add(f"{module.weight.dtype} gives {output.dtype}")

    layer = worker.model.get_decoder().layers[0].mlp.gate_proj
    layer.register_forward_hook(look)
    answer = gradients_of_batch(model, worker, "packed", 1e9)
    parameters = worker.state().parameters.values()
    kept = {str(parameter.dtype) for parameter in parameters}
    model.forward_backward(packed_rows(2))
    kept |= {str(parameter.grad.dtype) for parameter in parameters}
    return answer | {"seen": seen, "kept": kept, "is_sharded": all(isinstance(parameter, DTensor) for parameter in parameters)}


@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
def test_bf16_computes_in_half_and_keeps_shards_gradients_and_sums_whole(lora: bool, tmp_path: Path) -> None:
    folder = save_model(tmp_path / "base", "llama")
    adapter = save_adapter(tmp_path / "adapter", folder, target_modules=["q_proj", "down_proj"]) if lora else None
    right = oracle_of_batch(folder, adapter, "packed", 1e9)
    answers = run_ranks(2, half_precision, tmp_path, folder, adapter, {"fsdp_size": 2})
    for answer in answers:
        assert answer["seen"] == {"torch.bfloat16 gives torch.bfloat16"}, "not computed in bf16"
        assert answer["kept"] == {"torch.float32"} and answer["is_sharded"]
        assert answer["loss"] == pytest.approx(right["loss"], rel=0.01)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        others = relative_errors(oracle_of_batch(folder, adapter, "packed", 1e9), right)
    errors = relative_errors(answers[0], right)
    assert max(errors.values()) < min(HALF_TOLERANCE, 1.5 * max(others.values())), (errors, others)
    assert min(errors.values()) > 1e-4, "bf16 cannot be as exact as float32"


def relative_errors(found: dict[str, Any], right: dict[str, Any]) -> dict[str, float]:
    """Of each gradient: norm of the difference over norm."""
    pairs = {name: (found["gradients"][name], value) for name, value in right["gradients"].items()}
    return {name: float(np.linalg.norm(one - value) / np.linalg.norm(value)) for name, (one, value) in pairs.items()}


NUM_LAYERS = 4


def forward_calls(rank: int, folder: Path, settings: list[dict[str, Any]]) -> list[list[int]]:
    """For each setting, how often each layer's MLP is computed for one micro-batch and its backward pass."""
    found = []
    for fsdp_config in settings:
        model, worker = open_model(rank, folder, {"fsdp_size": 2}, fsdp_config=fsdp_config)
        model.set_optimizer("AdamW", lr=1e-3)
        calls = [0] * NUM_LAYERS

        def count(index: int, calls: list[int] = calls) -> Any:
            def hook(*_: Any) -> None:
                calls[index] += 1

            return hook

        for index, layer in enumerate(worker.model.get_decoder().layers):
            layer.mlp.register_forward_pre_hook(count(index))  # computing again stops before the end
        model.forward_backward(packed_rows(2))
        found.append(calls)
    return found


def test_activation_checkpointing_computes_the_chosen_layers_again(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "base", "qwen3", num_hidden_layers=NUM_LAYERS)
    settings: list[dict[str, Any]] = [
        {},
        {"activation_checkpointing": "full"},
        {"activation_checkpointing": "selective"},
        {"activation_checkpointing": "selective", "checkpoint_every": 3},
    ]
    expected = [[1, 1, 1, 1], [2, 2, 2, 2], [2, 1, 2, 1], [2, 1, 1, 2]]
    assert run_ranks(2, forward_calls, tmp_path, folder, settings) == [expected, expected]


def memory_of_loading(rank: int, folder: Path, adapter: Path, is_efficient: bool) -> int:
    """Bytes by which this process grew at its peak while the model was opened, an adapter added and all placed."""
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)  # what earlier tests left in this process would be used again, and not be seen
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = _resident("VmRSS")
    model, _ = open_model(rank, folder, {"fsdp_size": 2}, memory_efficient_init=is_efficient)
    model.add_adapter_to_model("default", adapter)
    model.set_optimizer("AdamW", lr=1e-3)
    return _resident("VmHWM") - before


def _resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1]) * 1024


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="peak memory is read from Linux's /proc")
@pytest.mark.parametrize("source", ["slices of the files", "rank 0"])
def test_memory_efficient_init_never_holds_the_whole_model_on_the_other_ranks(source: str, tmp_path: Path) -> None:
    """Layers of 13 MB, 105 MB in all. Files that cannot be read in slices are read by rank 0, which sends tensors."""
    folder = save_model(tmp_path / "base", "llama", hidden_size=512, intermediate_size=1408, num_hidden_layers=8)
    adapter = save_adapter(tmp_path / "adapter", folder, target_modules=["q_proj"])
    whole = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    if source == "rank 0":
        _as_old_file(folder)
    plain = run_ranks(2, memory_of_loading, tmp_path, folder, adapter, False)
    spared = run_ranks(2, memory_of_loading, tmp_path, folder, adapter, True)
    assert min(plain) > 0.95 * whole, "the check cannot see a whole model"
    assert spared[1] < 0.85 * whole, f"{spared} of {whole} bytes"  # half of it, and some 20 MB that come with any first step
    if source != "rank 0":
        assert spared[0] < 0.75 * whole, f"{spared} of {whole} bytes"


def _as_old_file(folder: Path) -> None:
    """As an old checkpoint: the same tensors in torch's own file, of which slices cannot be read."""
    from safetensors.torch import load_file

    path = folder / "model.safetensors"
    torch.save(load_file(path), folder / "pytorch_model.bin")
    path.unlink()
