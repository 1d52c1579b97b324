import json
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from tests.families import table
from tests.families.checks import CHECKS, build, family_folder, live, outcome, rows
from tests.families.families import FAMILIES, REFUSED, Refused, save_family
from twinkle_core.errors import ConfigError
from twinkle_core.kernel.packed_attention import check_supported
from twinkle_core.model.base_config import load_config

SAMPLE = ("qwen3", "qwen3_moe", "qwen3_5", "gpt_oss")
"""Dense and tied, experts, recurrent layers, windows with sinks: what the fast suite looks at."""
RUNS = [
    pytest.param(name, check, id=f"{name}-{check}", marks=() if name in SAMPLE else pytest.mark.slow)
    for name in FAMILIES
    for check in CHECKS
    if check != "experts" or FAMILIES[name].experts
]


@pytest.mark.parametrize(("name", "check"), RUNS)
def test_a_family_holds(name: str, check: str) -> None:
    assert outcome(name, check) is None


def test_the_committed_table_has_the_rows_of_the_sample_and_a_row_for_each_family() -> None:
    lines = table.PAGE.read_text(encoding="utf-8").splitlines()
    assert not [name for name in SAMPLE if table.row(name) not in lines]
    assert len([line for line in lines if line.startswith("| ")]) == 4 + len(FAMILIES) + len(REFUSED)


@pytest.mark.slow
def test_the_committed_table_is_the_generated_one() -> None:
    """With the checks of this file in the same process, nothing is computed twice."""
    assert table.PAGE.read_text(encoding="utf-8") == table.page()


def refuse(folder: Path) -> None:
    """As before training, without reading weights."""
    config = load_config(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    check_supported(type(model), config)


@pytest.mark.parametrize("refused", [pytest.param(one, id=name) for name, one in REFUSED.items()])
def test_what_cannot_be_had_is_refused_with_the_reason(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(dict(refused.config)))
    with pytest.raises(ConfigError, match=refused.error):
        refuse(tmp_path)


def test_the_routers_auxiliary_loss_is_off_whatever_the_config_says(tmp_path: Path) -> None:
    """The loss and the gradient are those of the tokens alone."""
    on = save_family("qwen3_moe", tmp_path / "on")
    settings = json.loads((on / "config.json").read_text())
    (on / "config.json").write_text(json.dumps(settings | {"output_router_logits": True, "router_aux_loss_coef": 5.0}))
    results = []
    for folder in (on, Path(family_folder("qwen3_moe").name)):
        model = build(folder, None)
        results.append((model.forward_backward(rows()).loss, model.clip_grad_and_step()))
    assert live(build(on, None)).config.output_router_logits is True
    assert results[0] == results[1]


def test_files_hold_the_tensor_names_of_the_published_models() -> None:
    """What vLLM and others read: each expert by itself (Qwen, DeepSeek), or all in one tensor (gpt-oss)."""
    expected = {
        "qwen3": "model.layers.1.self_attn.q_norm.weight",
        "qwen2_moe": "model.layers.1.mlp.experts.3.gate_proj.weight",
        "qwen3_moe": "model.layers.1.mlp.experts.3.down_proj.weight",
        "deepseek_v3": "model.layers.1.mlp.experts.3.up_proj.weight",
        "gpt_oss": "model.layers.1.mlp.experts.gate_up_proj",
    }
    for name, tensor in expected.items():
        with safe_open(Path(family_folder(name).name) / "model.safetensors", "pt") as file:
            assert tensor in file.keys(), name  # noqa: SIM118  # no dict
            assert not [key for key in file.keys() if re.search(r"\.default\.|base_layer", key)]  # noqa: SIM118
