"""What a mesh cannot do is refused with the reason, on every rank and before weights are read; nothing waits."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import peft
import pytest
import torch

from tests.model.tiny_models import CONFIGS, packed_row, save_model
from tests.parallel.bodies import open_model
from tests.parallel.oracle import packed_rows
from tests.parallel.ranks import run_ranks
from twinkle_core.errors import ConfigError, TwinkleError
from twinkle_core.model import loading
from twinkle_core.model.parallel import sharded_loading

Attempt = tuple[str, dict[str, int], dict[str, Any], str]
"""Architecture, sizes, settings, and the message."""
AT_ONCE: Sequence[Attempt] = [
    ("llama", {"fsdp_size": 2, "ep_size": 2}, {}, "ep_size above 1 is known for model types qwen3_moe; this one is 'llama': use fsdp_size"),
    ("moe3", {"fsdp_size": 2, "ep_size": 2}, {}, "ep_size 2 does not divide the model's 3 experts"),
    ("qwen3_moe", {"tp_size": 2}, {}, "the plan of 'qwen3_moe' has model.layers.0.mlp.experts"),
    ("heads3", {"tp_size": 2}, {}, "tp_size 2 does not divide the 3 attention heads"),
    ("heads3", {"dp_size": 2, "ulysses_size": 2}, {}, "ulysses_size 2 does not divide the model's 3 attention heads"),
    ("mistral", {"cp_size": 2}, {}, "has sliding-window layers: set cp_size to 1 and use ulysses_size"),
    ("dropout", {"cp_size": 2}, {}, "has attention dropout: set cp_size to 1"),
    ("llama", {"pp_size": 2}, {}, "pp_size is 2: transformers models are spread along dp, fsdp, cp, tp"),
    ("llama", {"fsdp_size": 4}, {}, "device_mesh has 4 ranks, the group 2 workers"),
    ("llama", {"dp_size": 2}, {"fsdp_config": {"cpu_offload": True}}, "cpu_offload and reshard_after_forward are for sharded parameters"),
    ("llama", {"tp_size": 2}, {"fsdp_config": {"cpu_offload": True}}, "cpu_offload and reshard_after_forward are for sharded parameters"),
    ("llama", {"fsdp_size": 2}, {"fsdp_config": {"offload": True}}, "fsdp_config has offload; known: activation_checkpointing"),
]
CHANGES: dict[str, tuple[str, dict[str, Any]]] = {
    "moe3": ("qwen3_moe", {"num_experts": 3}),
    "heads3": ("qwen3", {"num_attention_heads": 3, "num_key_value_heads": 3}),
    "dropout": ("llama", {"attention_dropout": 0.1}),
}
DORA = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], use_dora=True)
EXPERTS = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj"], target_parameters=["mlp.experts.down_proj"])
EFFICIENT = {"memory_efficient_init": True}
ADAPTERS: Sequence[tuple[str, dict[str, int], dict[str, Any], peft.LoraConfig, str]] = [
    ("qwen3_moe", {"fsdp_size": 2, "ep_size": 2}, {}, EXPERTS, "needs experts that no adapter changes: leave target_parameters unset"),
    ("llama", {"tp_size": 2}, {}, DORA, "has an adapter that needs whole weights .*DoRA.*: use fsdp_size"),
    (
        "llama",
        {"tp_size": 2},
        EFFICIENT,
        peft.LoraConfig(target_modules=["q_proj"]),
        "set memory_efficient_init=False, and add all adapters",
    ),
    ("llama", {"fsdp_size": 2}, EFFICIENT, DORA, "use_dora read the base model's weights, which are sharded"),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: save_model(tmp_path_factory.mktemp(name), name) for name in CONFIGS}
    return made | {name: save_model(tmp_path_factory.mktemp(name), of, **changes) for name, (of, changes) in CHANGES.items()}


def message_of(call: Any) -> str:
    try:
        call()
    except TwinkleError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def _refuse_to_read(*_: Any) -> Any:
    raise AssertionError("weights were read")


def openings(rank: int, folders: dict[str, Path]) -> list[str]:
    read, loading._read = loading._read, _refuse_to_read
    try:
        return [
            message_of(lambda name=name, sizes=sizes, settings=settings: open_model(rank, folders[name], sizes, **settings))
            for name, sizes, settings, _ in AT_ONCE
        ]
    finally:
        loading._read = read


def test_a_model_that_cannot_lie_so_is_refused_before_its_weights_are_read(folders: dict[str, Path], tmp_path: Path) -> None:
    for answers in run_ranks(2, openings, tmp_path, folders):
        for message, (name, sizes, settings, expected) in zip(answers, AT_ONCE, strict=True):
            assert re.match(f"ConfigError: .*{expected}", message), f"{name} {sizes} {settings}: {message}"


def adding(rank: int, folders: dict[str, Path]) -> list[str]:
    messages = []
    for name, sizes, settings, config, _ in ADAPTERS:
        model, _ = open_model(rank, folders[name], sizes, **settings)
        messages.append(message_of(lambda model=model, config=config: model.add_adapter_to_model("default", config)))
    return messages


def test_an_adapter_that_cannot_lie_so_is_refused_when_it_is_added(folders: dict[str, Path], tmp_path: Path) -> None:
    for answers in run_ranks(2, adding, tmp_path, folders):
        for message, (name, sizes, _, _, expected) in zip(answers, ADAPTERS, strict=True):
            assert re.match(f"ConfigError: .*{expected}", message), f"{name} {sizes}: {message}"


def unreadable(rank: int, folder: Path) -> list[str]:
    """What each rank hears when one alone cannot read the weights: rank 1 its slices, rank 0 the whole that it would send."""
    messages = []
    with pytest.MonkeyPatch.context() as patch:
        names = sharded_loading.weight_files(folder)
        gone = dict.fromkeys(names, folder / "gone.safetensors")
        patch.setattr(sharded_loading, "weight_files", lambda _: gone if rank == 1 else names)
        messages.append(message_of(lambda: open_model(rank, folder, {"fsdp_size": 2}, **EFFICIENT)))
        patch.setattr(sharded_loading, "weight_files", lambda _: {})
        patch.setattr(sharded_loading, "load_base", lambda *_: torch.nn.Linear(1, 1))
        messages.append(message_of(lambda: open_model(rank, folder, {"fsdp_size": 2}, **EFFICIENT)))
    return messages


def test_weights_that_one_rank_cannot_read_are_told_on_every_rank(folders: dict[str, Path], tmp_path: Path) -> None:
    for slices, sent in run_ranks(2, unreadable, tmp_path, folders["llama"], limit_seconds=20):
        assert re.match("DamagedError: .*gone.safetensors: .* cannot be read", slices), slices
        assert re.match("ConfigError: memory_efficient_init finds no lm_head.weight", sent), sent


def whole_rows(rank: int, folder: Path) -> list[str]:
    """What asks for whole rows where they are cut, with a row of which one rank has all that is learnt."""
    messages = []
    for sizes in ({"dp_size": 2, "ulysses_size": 2}, {"cp_size": 2}):
        model, _ = open_model(rank, folder, sizes)
        model.set_optimizer("AdamW", lr=1e-3)
        calls = {
            "set_loss": lambda model=model: model.set_loss("FusedLinearCrossEntropyLoss"),
            "add_metric": lambda model=model: model.add_metric("Accuracy"),
            "forward": lambda model=model: model.forward([packed_row(9)]),
            "forward_only": lambda model=model: model.forward_only([packed_row(9)]),
        }
        messages += [message_of(call) for call in calls.values()]
        model.set_loss("CrossEntropyLoss")
        assert float(model.forward_backward(packed_rows(1)).loss_sum) > 0, "the model goes on"
    return messages


def test_what_needs_whole_rows_is_refused_on_every_rank_where_rows_are_cut(folders: dict[str, Path], tmp_path: Path) -> None:
    for answers in run_ranks(2, whole_rows, tmp_path, folders["llama"]):
        assert len(answers) == 8
        for message in answers:
            assert re.match("ConfigError: the mesh cuts rows over ranks .* needs whole rows: use fsdp_size", message), message


def test_settings_without_a_mesh_are_refused(folders: dict[str, Path]) -> None:
    from twinkle_core.model import TransformersModel

    with pytest.raises(ConfigError, match="for a device_mesh with fsdp_size above 1"):
        TransformersModel(folders["llama"], fsdp_config={"cpu_offload": True})
