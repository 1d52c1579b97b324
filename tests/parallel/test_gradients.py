"""The law of every form: losses, norm and gradients are those of one process, whatever the cut, and nothing hangs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.bodies import gradients_of
from tests.parallel.models import assert_same, oracle, packed_micro_batches, save_model, several_row_micro_batches
from tests.parallel.ranks import run_ranks
from twinkle_core.model.parallel.fully_sharded import ShardingSettings
from twinkle_core.model.parallel.layout import Layout

ONE_CALL = [packed_micro_batches(5)]
"""An uneven end: 5 micro-batches over 2 or 4 shares."""
THREE_CALLS = [several_row_micro_batches(3), packed_micro_batches(2), packed_micro_batches(1)]
"""Accumulation over calls, some of which leave ranks without any micro-batch."""
SLOW = pytest.mark.slow

FORMS: list[Any] = [
    pytest.param("llama", {"fsdp": 2}, {}, ONE_CALL, id="fsdp2"),
    pytest.param("qwen3", {"fsdp": 2}, {"activation_checkpointing": "full", "memory_efficient_init": True}, THREE_CALLS, id="fsdp2-tied"),
    pytest.param("llama", {"dp": 2}, {"cpu_offload": True}, THREE_CALLS, id="dp2"),
    pytest.param("qwen3", {"fsdp": 2, "ulysses": 2}, {}, THREE_CALLS, id="fsdp2-ulysses2"),
    pytest.param("qwen3", {"cp": 2}, {}, THREE_CALLS, id="ring2"),
    pytest.param("qwen3", {"tp": 2}, {}, THREE_CALLS, id="tp2"),
    pytest.param("qwen3_moe", {"fsdp": 2, "ep": 2}, {"activation_checkpointing": "full"}, THREE_CALLS, id="ep2"),
    pytest.param("llama", {"fsdp": 2, "tp": 2}, {}, THREE_CALLS, id="fsdp2-tp2", marks=SLOW),
    pytest.param("qwen3", {"dp": 2, "tp": 2}, {"memory_efficient_init": True}, ONE_CALL, id="dp2-tp2", marks=SLOW),
    pytest.param("qwen3_moe", {"dp": 2, "fsdp": 2, "ep": 2}, {"memory_efficient_init": True}, THREE_CALLS, id="ep2-ep_fsdp2", marks=SLOW),
    pytest.param("qwen3_moe", {"fsdp": 4, "ep": 4}, {}, ONE_CALL, id="ep4", marks=SLOW),
    pytest.param("llama", {"dp": 2, "fsdp": 2}, {"cpu_offload": True}, THREE_CALLS, id="hsdp2x2", marks=SLOW),
    pytest.param("qwen3", {"fsdp": 4}, {"reshard_after_forward": False}, ONE_CALL, id="fsdp4", marks=SLOW),
    pytest.param("llama", {"dp": 2, "fsdp": 2, "ulysses": 4}, {"activation_checkpointing": "full"}, ONE_CALL, id="ulysses4", marks=SLOW),
    pytest.param("qwen3", {"dp": 4, "ulysses": 2}, {}, THREE_CALLS, id="dp4-ulysses2", marks=SLOW),
    pytest.param("llama", {"fsdp": 2, "cp": 2}, {"activation_checkpointing": "selective"}, THREE_CALLS, id="fsdp2-ring2", marks=SLOW),
    pytest.param("qwen3", {"cp": 4}, {}, ONE_CALL, id="ring4", marks=SLOW),
]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def folder(architecture: str) -> Path:
        if architecture not in made:
            made[architecture] = save_model(tmp_path_factory.mktemp(architecture), architecture)
        return made[architecture]

    return folder


@pytest.mark.parametrize(("architecture", "sizes", "settings", "calls"), FORMS)
def test_a_form_gives_the_gradients_of_one_process(
    architecture: str, sizes: dict[str, int], settings: dict[str, Any], calls: Any, model_folder: Callable[[str], Path], tmp_path: Path
) -> None:
    folder, layout = model_folder(architecture), Layout.from_sizes(**sizes)
    expected = oracle(folder, [rows for micro_batches in calls for rows in micro_batches], max_norm=1.0)
    assert expected["norm"] > 1.5, "clipping must happen to be tested"
    got = run_ranks(layout.world_size, gradients_of, tmp_path, folder, layout, ShardingSettings(**settings), calls, 1.0)
    assert got[0]["gradients"]
    for answer in got:
        assert_same(answer, expected)
        assert answer["norm"] == got[0]["norm"], "ranks that clip differently drift apart"
