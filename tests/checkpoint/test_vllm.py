"""An exported folder in vLLM: the log-probabilities of a prompt are those of the live model. Needs vllm (see CONTRIBUTING.md)."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.model.tiny_models import packed_row, save_model
from twinkle_core.checkpoint.export import export
from twinkle_core.config import ExportConfig, LoraConfig
from twinkle_core.model import TransformersModel

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vllm is not installed: no export is loaded in it"),
]
SCORE = """
import json, sys
from vllm import LLM, SamplingParams
folder, adapter, ids = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
llm = LLM(folder, skip_tokenizer_init=True, enforce_eager=True, dtype="float32", gpu_memory_utilization=0.1, max_model_len=64,
          enable_lora=bool(adapter), max_lora_rank=8)
request = None
if adapter:
    from vllm.lora.request import LoRARequest
    request = LoRARequest("mine", 1, adapter)
asked = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0, detokenize=False)
answer = llm.generate([{"prompt_token_ids": ids}], asked, lora_request=request)[0]
print("SCORES", json.dumps([next(iter(found.values())).logprob for found in answer.prompt_logprobs[1:]]))
"""
IN_PROCESS = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def scores(folder: Path, ids: list[int], adapter: Path | None = None) -> list[float]:
    """Log-probability of each token after the first. A process of its own: vLLM keeps what it takes."""
    command = [sys.executable, "-c", SCORE, str(folder), str(adapter or ""), json.dumps(ids)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **IN_PROCESS}, timeout=280)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("SCORES ")] or [done.stderr[-3000:]]
    found: list[float] = json.loads(line.removeprefix("SCORES "))
    return found


@pytest.mark.parametrize("name", ["llama", "qwen2"])
@pytest.mark.parametrize("form", ["merged", "adapter", "full"])
def test_an_export_in_vllm_scores_a_prompt_as_the_live_model_does(name: str, form: str, tmp_path: Path) -> None:
    base = save_model(tmp_path / "base", name, hidden_size=128, head_dim=32)  # vLLM's attention on a CPU takes heads of 32 and more
    model = TransformersModel(base, seed=1)
    if form != "full":
        model.add_adapter_to_model("default", LoraConfig(rank=8, alpha=32))
    model.set_optimizer(lr=2e-2)
    row = packed_row(14, seed=5)
    before = model.forward_only([row], return_logps=True)[0]["logps"]
    for _ in range(3):
        model.forward_backward([row])
        model.clip_grad_and_step()
    live = model.forward_only([row], return_logps=True)[0]["logps"]
    assert np.abs(live - before).max() > 0.1, "it learnt something"
    summary = export(
        base,
        model.save("last", tmp_path),
        ExportConfig(form="adapter" if form == "adapter" else "merged", dtype="float32"),
        tmp_path / "out",
        base_name="org/base",
        shard_bytes=100_000,
    )
    assert form == "adapter" or "model.safetensors.index.json" in summary["files"]
    ids = row.input_ids.tolist()
    found = scores(base, ids, tmp_path / "out") if form == "adapter" else scores(tmp_path / "out", ids)
    # The first token is a prompt: the score of the second, which it predicts, is not among the learnt ones.
    np.testing.assert_allclose(found[1:], live, atol=1e-3)
