"""A training step on one GPU, random weights of Qwen3 shapes, bf16, packed rows of 8192, 16,384 tokens a step.

    PYTHONPATH=. python bench/gpu_step.py                       # the table, each line in a process of its own
    PYTHONPATH=. python bench/gpu_step.py --only 1.7B-full --profile

Tokens are those of documents (no row has padding). Model FLOPs of a step, useful work only, recomputation not counted:

    6 P_layers T + 6 P_head S + 12 L A sum(l (l + 1) / 2)       full;   4 instead of 6 for LoRA, whose base is frozen

P_layers: matrix parameters of the decoder layers; P_head: of the output head; T tokens, S supervised ones (all but the
last of each document here); L layers, A heads times head size, l the documents' lengths. Adapters are not counted.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from twinkle_core.kernel.bf16_adamw import Bf16AdamW
from twinkle_core.kernel.fused_head import supervised_loss
from twinkle_core.kernel.layers import prepare_layers
from twinkle_core.kernel.packed_attention import document_boundaries, register

ROW, STEP_TOKENS, VOCABULARY = 8192, 16384, 151936
PEAK = 989e12
"""Dense bf16 operations a second of an H100 SXM, by its data sheet."""
SHAPES = {  # hidden, layers, heads, key heads, feed-forward, tied
    "0.6B": (1024, 28, 16, 8, 3072, True),
    "1.7B": (2048, 28, 16, 8, 6144, True),
    "4B": (2560, 36, 32, 8, 9728, True),
    "8B": (4096, 36, 32, 8, 12288, False),
}
HEAD_SIZE = 128


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One line of the table."""

    shape: str
    lora: bool = False
    compiled: bool = True
    optimizer: str = "bf16"
    """bf16: parameters and moments; split: float32 values and moments; split-bf16: float32 values, bf16 moments."""
    rows: int = 2
    """Rows of a micro-batch."""
    checkpointing: str = "none"
    every: int = 1
    kernel: str = "flash2"


SETTINGS = {
    "0.6B-full": Setting(shape="0.6B", optimizer="split"),
    "1.7B-eager": Setting(shape="1.7B", compiled=False),
    "1.7B-full": Setting(shape="1.7B"),
    "1.7B-split": Setting(shape="1.7B", optimizer="split"),
    "4B-full": Setting(shape="4B", rows=1),
    "4B-split": Setting(shape="4B", rows=1, optimizer="split-bf16"),
    "8B-lora": Setting(shape="8B", lora=True, rows=1, optimizer="split"),
    "0.6B-full-flash4": Setting(shape="0.6B", optimizer="split", kernel="flash4"),
    "1.7B-full-flash4": Setting(shape="1.7B", kernel="flash4"),
    "1.7B-split-flash4": Setting(shape="1.7B", optimizer="split", kernel="flash4"),
    "4B-full-flash4": Setting(shape="4B", rows=1, kernel="flash4"),
    "4B-split-flash4": Setting(shape="4B", rows=1, optimizer="split-bf16", kernel="flash4"),
    "8B-lora-flash4": Setting(shape="8B", lora=True, rows=1, optimizer="split", kernel="flash4"),
}


def make_model(shape: str) -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    hidden, layers, heads, key_heads, wide, tied = SHAPES[shape]
    config = Qwen3Config(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=HEAD_SIZE,
        intermediate_size=wide, vocab_size=VOCABULARY, tie_word_embeddings=tied, max_position_embeddings=ROW, use_cache=False,
    )  # fmt: skip
    config._attn_implementation = register()
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model = Qwen3ForCausalLM(config)
    torch.set_default_dtype(before)
    return model.train()


def packed_rows(count: int, seed: int = 0) -> list[list[int]]:
    """Lengths of the documents of `count` rows: lognormal, mean about 600 tokens, first fit into rows of 8192."""
    rng = np.random.default_rng(seed)
    rows: list[list[int]] = []
    for length in np.clip(rng.lognormal(np.log(600) - 0.5, 1.0, count * 20).astype(int), 16, ROW).tolist():
        row = next((row for row in rows if sum(row) + length <= ROW), None)
        rows.append([length]) if row is None else row.append(length)
    assert all(sum(row) > 0.99 * ROW for row in rows[:count]), "more documents are needed"
    return rows[:count]


def micro_batch(rows: list[list[int]], seed: int) -> dict[str, Any]:
    """Inputs, positions and labels of rows laid end to end, made before the clock starts."""
    lengths = [length for row in rows for length in row]
    rng = np.random.default_rng(seed)
    ids = torch.from_numpy(rng.integers(0, VOCABULARY, sum(lengths)))
    ends = np.cumsum(lengths)
    kept = np.ones(sum(lengths), dtype=bool)
    kept[ends - 1] = False
    positions = torch.from_numpy(np.flatnonzero(kept))
    places = torch.cat([torch.arange(length) for length in lengths])
    sent = [tensor.pin_memory() for tensor in (ids[None], places[None], positions, ids[positions + 1])]
    return {"lengths": lengths, "host": sent}


def loss_of(model: Any, batch: dict[str, Any], factor: float, kernel: Any) -> torch.Tensor:
    ids, places, positions, labels = (tensor.to("cuda", non_blocking=True) for tensor in batch["host"])
    inputs = {"input_ids": ids, "position_ids": places, **document_boundaries(batch["lengths"], ids.device, kernel)}
    return supervised_loss(model, inputs, positions, labels)[0] * factor


def model_flops(setting: Setting, batches: list[dict[str, Any]]) -> float:
    hidden, layers, heads, key_heads, wide, _ = SHAPES[setting.shape]
    per_layer = hidden * HEAD_SIZE * (2 * heads + 2 * key_heads) + 3 * hidden * wide
    tokens = sum(sum(batch["lengths"]) for batch in batches)
    supervised = sum(len(batch["host"][2]) for batch in batches)
    pairs = sum(length * (length + 1) / 2 for batch in batches for length in batch["lengths"])
    times = 4 if setting.lora else 6
    return times * (per_layer * layers * tokens + hidden * VOCABULARY * supervised) + 12 * layers * heads * HEAD_SIZE * pairs


class Trainer:
    def __init__(self, setting: Setting) -> None:
        self.kernel = setting.kernel
        self.model = make_model(setting.shape)
        if setting.lora:
            import peft

            config = peft.LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear")
            peft.get_peft_model(self.model, config, autocast_adapter_dtype=False)
        prepare_layers(self.model, compiled=setting.compiled, checkpointing=setting.checkpointing, every=setting.every)
        self.named = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
        if setting.lora:
            for name, parameter in self.named.items():
                assert "lora_" in name and parameter.dtype == torch.bfloat16
        moments = "float32" if setting.optimizer == "split" else "bf16"
        keep = setting.optimizer != "bf16"
        self.adamw = Bf16AdamW(self.named, lr=1e-5, betas=(0.9, 0.95), moments=moments, keep_float32=keep)

    def step(self, batches: list[dict[str, Any]]) -> torch.Tensor:
        """One optimizer step without waiting for the GPU; gives the loss, on it."""
        supervised = sum(len(batch["host"][2]) for batch in batches)
        total = torch.zeros((), device="cuda")
        for batch in batches:
            loss = loss_of(self.model, batch, 1.0 / supervised, self.kernel)
            loss.backward()
            total += loss.detach()
        gradients = [parameter.grad for parameter in self.named.values() if parameter.grad is not None]
        factor = (1.0 / (torch.nn.utils.get_total_norm(gradients, foreach=True).float() + 1e-6)).clamp(max=1.0)
        self.adamw.step(grad_factor=factor)
        for parameter in self.named.values():
            parameter.grad = None
        return total


def measure(setting: Setting, steps: int, warm_up: int, profile: bool) -> dict[str, Any]:
    torch.backends.cuda.matmul.allow_tf32 = True
    trainer = Trainer(setting)
    rows = packed_rows((steps + warm_up) * STEP_TOKENS // ROW)
    per_step = STEP_TOKENS // ROW
    micro = [rows[i : i + setting.rows] for i in range(0, len(rows), setting.rows)]
    made = [micro_batch(part, seed) for seed, part in enumerate(micro)]
    per_step = per_step // setting.rows
    batches = [made[i : i + per_step] for i in range(0, len(made), per_step)]
    began = time.perf_counter()
    for step in batches[:warm_up]:
        trainer.step(step)
    torch.cuda.synchronize()
    warm_seconds = time.perf_counter() - began
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    torch.cuda.reset_peak_memory_stats()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(steps + 1)]
    marks[0].record()
    losses = []
    host = time.perf_counter()
    for step, mark in zip(batches[warm_up:], marks[1:], strict=True):
        losses.append(trainer.step(step))
        mark.record()
    host = (time.perf_counter() - host) / steps
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)]
    rates = [model_flops(setting, step) / ms * 1e3 for step, ms in zip(batches[warm_up:], times, strict=True)]
    tokens = [sum(sum(b["lengths"]) for b in step) / ms * 1e3 for step, ms in zip(batches[warm_up:], times, strict=True)]
    found = {
        "tokens_per_second": statistics.median(tokens), "flops": statistics.median(rates), "step_ms": statistics.median(times),
        "slowest_ms": max(times), "host_ms": host * 1e3, "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "warm_seconds": warm_seconds, "graphs": graphs,
        "graphs_in_timed_steps": torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs,
        "first_loss": float(losses[0]), "last_loss": float(losses[-1]),
    }  # fmt: skip
    if profile:
        print_profile(trainer, batches[-1])
    return found


def print_profile(trainer: Trainer, batches: list[dict[str, Any]]) -> None:
    """Where the time of one step goes on the GPU: kinds of kernels, then the 28 most costly."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        trainer.step(batches)
        torch.cuda.synchronize()
    kernels = [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    kinds: dict[str, float] = {}
    each: dict[str, list[float]] = {}
    marks = {
        "matrix products": ("gemm", "nvjet", "cutlass", "xmma"), "attention": ("flash", "attn"), "compiled pointwise": ("triton_",),
        "copies": ("memcpy", "memset", "copy"),
    }  # fmt: skip
    for event in kernels:
        kind = next((kind for kind, words in marks.items() if any(word in event.name.lower() for word in words)), "other")
        kinds[kind] = kinds.get(kind, 0.0) + event.device_time / 1e3
        each.setdefault(event.name, []).append(event.device_time / 1e3)
    span = (max(e.time_range.end for e in kernels) - min(e.time_range.start for e in kernels)) / 1e3
    print(f"span {span:.1f} ms, idle {span - sum(kinds.values()):.1f} ms;", {kind: round(ms, 1) for kind, ms in sorted(kinds.items())})
    for name, times in sorted(each.items(), key=lambda pair: -sum(pair[1]))[:28]:
        print(f"{sum(times):8.2f} ms {len(times):5} x {name[:150]}")


def matmul_rate() -> float:
    """Operations a second of 8192^3 bf16 products on random data, the median of 5 times 10."""
    a, b = torch.randn(2, 8192, 8192, device="cuda", dtype=torch.bfloat16).unbind()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(6)]
    for _ in range(5):
        a @ b
    for index, mark in enumerate(marks):
        mark.record()
        for _ in range(10 if index < 5 else 0):
            a @ b
    torch.cuda.synchronize()
    return 20 * 8192**3 / statistics.median(x.elapsed_time(y) for x, y in zip(marks, marks[1:], strict=False)) * 1e3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=SETTINGS, default=[])
    parser.add_argument("--one", choices=SETTINGS, help="measure in this process and print JSON")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--warm-up", type=int, default=4)
    parser.add_argument("--profile", action="store_true")
    asked = parser.parse_args()
    if asked.one:
        print(json.dumps(measure(SETTINGS[asked.one], asked.steps, asked.warm_up, asked.profile)))
        return
    rate = matmul_rate()
    torch.cuda.empty_cache()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; 8192^3 bf16 product: {rate / 1e12:.0f} TFLOP/s")
    lines = []
    for name in asked.only or SETTINGS:
        command = [sys.executable, __file__, "--one", name, "--steps", str(asked.steps), "--warm-up", str(asked.warm_up)]
        run = subprocess.run(command + ["--profile"] * asked.profile, capture_output=True, text=True, check=False)
        *said, last = run.stdout.strip().splitlines() or [""]
        print(f"== {name} {asdict(SETTINGS[name])}", *said, sep="\n", flush=True)
        if run.returncode:
            print(last, run.stderr[-1500:], flush=True)
            lines.append(f"| {name} | failed |")
            continue
        found = json.loads(last)
        print({key: round(value, 3) for key, value in found.items()}, flush=True)
        shares = f"{found['flops'] / PEAK:.1%} | {found['flops'] / rate:.1%}"
        ends = f"{found['peak_gib']:.1f} | {found['graphs_in_timed_steps']}"
        lines.append(f"| {name} | {found['tokens_per_second']:,.0f} | {found['step_ms']:.0f} | {shares} | {ends} |")
    print("| setting | tokens/s | step ms | MFU of 989 | of the measured product | peak GiB | compilations in timed steps |")
    print("| --- " * 7 + "|", *lines, sep="\n")


if __name__ == "__main__":
    main()
