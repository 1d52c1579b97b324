"""The law of every form: losses, norm and gradients are those of one process without our code, whatever the cut, and nothing hangs.

Each form is trained whole and by LoRA, on padded and packed batches, with and without accumulation, all with uneven ends
(`oracle.BATCHES`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import pytest

from tests.model.tiny_models import save_model
from tests.parallel.bodies import gradients_of
from tests.parallel.oracle import BATCHES, assert_same, oracle_of_batch, save_adapter
from tests.parallel.ranks import run_ranks

SLOW = pytest.mark.slow
FULL, LORA = "full", "lora"
ADAPTERS: dict[str, dict[str, Any]] = {
    LORA: {"target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]},
    "attention": {"target_modules": ["q_proj", "v_proj", "o_proj"]},
    "dora": {"target_modules": ["q_proj", "down_proj"], "use_dora": True},
    "saved": {"target_modules": ["q_proj", "o_proj"], "modules_to_save": ["lm_head"], "use_rslora": True, "rank_pattern": {"q_proj": 2}},
    "head": {"target_modules": ["q_proj", "lm_head", "embed_tokens"]},
    "experts": {"target_modules": ["o_proj"], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]},
}
"""What is trained where it is not the whole model; of a model of experts 'lora' stands for 'attention'."""
MAX_NORM = 0.5
EFFICIENT = {"memory_efficient_init": True}
RECOMPUTED = {"fsdp_config": {"activation_checkpointing": "full"}}

FORMS: dict[str, tuple[str, dict[str, int] | None, dict[str, Any]]] = {
    "one": ("qwen3", None, {}),
    "one-mesh": ("llama", {"dp_size": 1}, {}),
    "ddp2": ("llama", {"dp_size": 2}, {}),
    "ddp2-no-mesh": ("qwen3", None, {}),
    "ddp4": ("qwen3", {"dp_size": 4}, {}),
    "fsdp2": ("llama", {"fsdp_size": 2}, {}),
    "fsdp2-tied": ("qwen3", {"fsdp_size": 2}, EFFICIENT | RECOMPUTED),
    "fsdp2-moe": ("qwen3_moe", {"fsdp_size": 2}, {}),
    "fsdp4": ("qwen3", {"fsdp_size": 4}, {"fsdp_config": {"reshard_after_forward": False}}),
    "hsdp2x2": ("llama", {"dp_size": 2, "fsdp_size": 2}, {"fsdp_config": {"cpu_offload": True}}),
    "dp2-ulysses2": ("llama", {"dp_size": 2, "ulysses_size": 2}, {}),
    "fsdp2-ulysses2": ("qwen3", {"fsdp_size": 2, "ulysses_size": 2}, EFFICIENT),
    "hsdp2x2-ulysses2": ("qwen3", {"dp_size": 2, "fsdp_size": 2, "ulysses_size": 2}, {}),
    "dp4-ulysses2": ("qwen3", {"dp_size": 4, "ulysses_size": 2}, {}),
    "hsdp2x2-ulysses4": ("llama", {"dp_size": 2, "fsdp_size": 2, "ulysses_size": 4}, RECOMPUTED),
    "ulysses2-moe": ("qwen3_moe", {"fsdp_size": 2, "ulysses_size": 2}, {}),
    "ring2": ("qwen3", {"cp_size": 2}, {}),
    "fsdp2-ring2": ("llama", {"fsdp_size": 2, "cp_size": 2}, {"fsdp_config": {"activation_checkpointing": "selective"}}),
    "dp2-ring2": ("qwen3", {"dp_size": 2, "cp_size": 2}, {}),
    "ring4": ("qwen3", {"cp_size": 4}, {}),
    "ep2": ("qwen3_moe", {"fsdp_size": 2, "ep_size": 2}, RECOMPUTED),
    "ep2-ep_fsdp2": ("qwen3_moe", {"dp_size": 2, "fsdp_size": 2, "ep_size": 2}, EFFICIENT),
    "dp2-ep2": ("qwen3_moe", {"dp_size": 2, "ep_size": 2}, {}),
    "ep4": ("qwen3_moe", {"fsdp_size": 4, "ep_size": 4}, {}),
    "tp2": ("qwen3", {"tp_size": 2}, {}),
    "tp2-untied": ("llama", {"tp_size": 2}, {}),
    "fsdp2-tp2": ("llama", {"fsdp_size": 2, "tp_size": 2}, {}),
    "dp2-tp2": ("qwen3", {"dp_size": 2, "tp_size": 2}, {}),
}
"""Architecture, sizes of the mesh, settings."""
NUM_RANKS = {"one": 1, "ddp2-no-mesh": 2}
FAST = {"one": LORA, "ddp2": FULL, "fsdp2": FULL, "fsdp2-tied": LORA, "fsdp2-ulysses2": LORA, "ring2": FULL, "ep2": FULL, "tp2": FULL}
"""One of each form, for the fast suite."""
MORE = [("fsdp2", "dora"), ("fsdp2", "saved"), ("fsdp2-moe", "experts"), ("tp2-untied", "head")]
CASES = [
    pytest.param(form, trained, id=f"{form}-{trained}", marks=() if FAST.get(form) == trained else SLOW)
    for form, trained in [*((form, trained) for form in FORMS for trained in (FULL, LORA)), *MORE]
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], tuple[Path, Path | None]]:
    """Base model and, for LoRA, adapter, of an architecture."""

    @cache
    def base(architecture: str) -> Path:
        return save_model(tmp_path_factory.mktemp(architecture), architecture)

    @cache
    def adapter(architecture: str, trained: str) -> Path:
        return save_adapter(tmp_path_factory.mktemp(f"{architecture}-{trained}"), base(architecture), **ADAPTERS[trained])

    def both(architecture: str, trained: str) -> tuple[Path, Path | None]:
        trained = "attention" if (architecture, trained) == ("qwen3_moe", LORA) else trained
        return base(architecture), None if trained == FULL else adapter(architecture, trained)

    return both


@pytest.fixture(scope="module")
def expected(folders: Callable[[str, str], tuple[Path, Path | None]]) -> Callable[[str, str], dict[str, dict[str, Any]]]:
    @cache
    def of(architecture: str, trained: str) -> dict[str, dict[str, Any]]:
        return {name: oracle_of_batch(*folders(architecture, trained), name, MAX_NORM) for name in BATCHES}

    return of


@pytest.mark.parametrize(("form", "trained"), CASES)
def test_a_form_gives_the_gradients_of_one_process(form: str, trained: str, folders: Any, expected: Any, tmp_path: Path) -> None:
    architecture, sizes, settings = FORMS[form]
    right = expected(architecture, trained)
    folder, adapter = folders(architecture, trained)
    num_ranks = NUM_RANKS.get(form) or prod(size for name, size in (sizes or {}).items() if name not in ("ulysses_size", "ep_size"))
    got = run_ranks(num_ranks, gradients_of, tmp_path, folder, adapter, sizes, settings, MAX_NORM)
    for name in BATCHES:
        assert right[name]["norm"] > 1.5 * MAX_NORM, "clipping must happen to be tested"
        assert got[0][name]["gradients"]
        for answer in got:
            assert_same(answer[name], right[name])
            assert answer[name]["norm"] == got[0][name]["norm"], "ranks that clip differently drift apart"
