"""A training step of `TransformersModel` on one GPU: random weights of Qwen3 shapes, bf16, packed rows of 8192, 16,384 tokens a step.

    PYTHONPATH=. python bench/gpu_step.py                       # the table, each line in a process of its own
    PYTHONPATH=. python bench/gpu_step.py --only 1.7B-full --profile

All that a machine with a GPU has to show, in one call (about 10 minutes; tests first):

    PYTHONPATH=. python -m pytest tests/gpu -m gpu -q; PYTHONPATH=. python bench/gpu_step.py

A step is `forward_backward` and `clip_grad_and_step` as a user calls them, on rows that lie ready. 'idle' is the share of a profiled
step in which no kernel ran: whatever the GPU waited for, the host and the loader included. '-kernels' lines are a loop of the same
kernels without the model's interface around it. Tokens are those of documents (no row has padding). Model FLOPs of a step, useful
work only, recomputation not counted:

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
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from twinkle_core.kernel.bf16_adamw import Bf16AdamW
from twinkle_core.kernel.fused_head import supervised_loss
from twinkle_core.kernel.layers import prepare_layers
from twinkle_core.kernel.packed_attention import document_boundaries, register
from twinkle_core.model import TransformersModel
from twinkle_core.types import IGNORE, PackedRow

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
    moments: str = "float32"
    """Type of AdamW's moments. Values are float32, held as bf16 and the rest."""
    rows: int = 2
    """Rows of a micro-batch."""
    checkpointing: str = "none"
    kernel: str = "flash2"
    deterministic: bool = False
    only_kernels: bool = False


SETTINGS = {
    "1.7B-full": Setting(shape="1.7B"),
    "1.7B-full-kernels": Setting(shape="1.7B", only_kernels=True),
    "1.7B-full-deterministic": Setting(shape="1.7B", deterministic=True),
    "1.7B-full-2-micro-batches": Setting(shape="1.7B", rows=1),
    "1.7B-full-checkpointed": Setting(shape="1.7B", checkpointing="full"),
    "1.7B-full-eager": Setting(shape="1.7B", compiled=False),
    "4B-full": Setting(shape="4B", rows=1, moments="bf16"),
    "8B-lora": Setting(shape="8B", lora=True, rows=1),
    "0.6B-full": Setting(shape="0.6B"),
    "1.7B-full-flash4": Setting(shape="1.7B", kernel="flash4"),
    "4B-full-flash4": Setting(shape="4B", rows=1, moments="bf16", kernel="flash4"),
    "8B-lora-flash4": Setting(shape="8B", lora=True, rows=1, kernel="flash4"),
}


def config_of(shape: str) -> Any:
    from transformers import Qwen3Config

    hidden, layers, heads, key_heads, wide, tied = SHAPES[shape]
    return Qwen3Config(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=HEAD_SIZE,
        intermediate_size=wide, vocab_size=VOCABULARY, tie_word_embeddings=tied, max_position_embeddings=ROW, use_cache=False,
    )  # fmt: skip


def packed_rows(count: int, seed: int = 0) -> list[list[int]]:
    """Lengths of the documents of `count` rows: lognormal, mean about 600 tokens, first fit into rows of 8192."""
    rng = np.random.default_rng(seed)
    rows: list[list[int]] = []
    for length in np.clip(rng.lognormal(np.log(600) - 0.5, 1.0, count * 20).astype(int), 16, ROW).tolist():
        row = next((row for row in rows if sum(row) + length <= ROW), None)
        rows.append([length]) if row is None else row.append(length)
    assert all(sum(row) > 0.99 * ROW for row in rows[:count]), "more documents are needed"
    return rows[:count]


def row_of(lengths: list[int], seed: int) -> PackedRow:
    """Random documents; all tokens but the last of each predict the next one."""
    ids = np.random.default_rng(seed).integers(0, VOCABULARY, sum(lengths)).astype(np.int32)
    labels = np.roll(ids, -1)
    labels[np.cumsum(lengths) - 1] = IGNORE
    return PackedRow(
        input_ids=ids, labels=labels, seq_lens=np.array(lengths, dtype=np.int32), sample_ids=np.arange(len(lengths), dtype=np.int64)
    )


def model_flops(setting: Setting, rows: Sequence[PackedRow]) -> float:
    hidden, layers, heads, key_heads, wide, _ = SHAPES[setting.shape]
    per_layer = hidden * HEAD_SIZE * (2 * heads + 2 * key_heads) + 3 * hidden * wide
    tokens = sum(len(row.input_ids) for row in rows)
    supervised = sum(row.num_loss_tokens for row in rows)
    pairs = sum(int(length) * (int(length) + 1) / 2 for row in rows for length in row.seq_lens)
    times = 4 if setting.lora else 6
    return times * (per_layer * layers * tokens + hidden * VOCABULARY * supervised) + 12 * layers * heads * HEAD_SIZE * pairs


class Trainer:
    """A user's loop."""

    def __init__(self, setting: Setting) -> None:
        import peft

        self.rows = setting.rows
        self.model = TransformersModel(
            config=config_of(setting.shape), mixed_precision="bf16", deterministic=setting.deterministic, attention_kernel=setting.kernel,
            activation_checkpointing=setting.checkpointing, compile_layers=setting.compiled,
        )  # fmt: skip
        if setting.lora:
            lora = peft.LoraConfig(task_type="CAUSAL_LM", r=16, lora_alpha=32, lora_dropout=0.0, target_modules="all-linear")
            self.model.add_adapter_to_model("default", lora)
        more = {} if setting.moments == "float32" else {"moments": setting.moments}
        self.model.set_optimizer("AdamW", lr=1e-5, betas=(0.9, 0.95), **more)

    def step(self, rows: Sequence[PackedRow]) -> Any:
        output = self.model.forward_backward(rows, micro_batch_size=self.rows)
        self.model.clip_grad_and_step(1.0)
        return output


class Kernels:
    """The same step by the kernels alone: what `Trainer` could reach. Full fine-tuning, one micro-batch."""

    def __init__(self, setting: Setting) -> None:
        from transformers import Qwen3ForCausalLM

        config = config_of(setting.shape)
        config._attn_implementation = register()
        with torch.device("cuda"):
            self.model = Qwen3ForCausalLM(config).to(torch.bfloat16).train()
        prepare_layers(self.model, compiled=setting.compiled)
        self.adamw = Bf16AdamW(dict(self.model.named_parameters()), lr=1e-5, betas=(0.9, 0.95))

    def step(self, rows: Sequence[PackedRow]) -> torch.Tensor:
        """Gives the mean loss, on the GPU, without waiting for it."""
        lengths = [int(length) for row in rows for length in row.seq_lens]
        joined = torch.from_numpy(np.concatenate([np.stack([row.input_ids, row.labels]) for row in rows], axis=1).astype(np.int64))
        positions = (joined[1] != IGNORE).nonzero()[:, 0]
        places = torch.cat([torch.arange(length) for length in lengths])
        host = (joined[:1], joined[1][positions], positions, places[None])
        ids, labels, positions, places = (tensor.contiguous().pin_memory().to("cuda", non_blocking=True) for tensor in host)
        inputs = {"input_ids": ids, "position_ids": places, **document_boundaries(lengths, ids.device)}
        loss = supervised_loss(self.model, inputs, positions, labels) / len(labels)
        loss.backward()
        gradients = [parameter.grad for parameter in self.model.parameters() if parameter.grad is not None]
        norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float32)
        self.adamw.step(grad_factor=(1.0 / (torch.linalg.vector_norm(torch.stack(norms)) + 1e-6)).clamp(max=1.0))
        self.model.zero_grad()
        return loss.detach()


def measure(setting: Setting, steps: int, warm_up: int, profile: bool) -> dict[str, Any]:
    trainer = Kernels(setting) if setting.only_kernels else Trainer(setting)
    made = [row_of(lengths, seed) for seed, lengths in enumerate(packed_rows((steps + warm_up) * STEP_TOKENS // ROW))]
    batches = [made[start : start + STEP_TOKENS // ROW] for start in range(0, len(made), STEP_TOKENS // ROW)]
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
    tokens = [sum(len(row.input_ids) for row in step) / ms * 1e3 for step, ms in zip(batches[warm_up:], times, strict=True)]
    found = {
        "tokens_per_second": statistics.median(tokens), "flops": statistics.median(rates), "step_ms": statistics.median(times),
        "slowest_ms": max(times), "host_ms": host * 1e3, "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "warm_seconds": warm_seconds, "graphs": graphs,
        "graphs_in_timed_steps": torch._dynamo.utils.counters["stats"]["unique_graphs"] - graphs,
        "first_loss": float(getattr(losses[0], "loss", losses[0])), "last_loss": float(getattr(losses[-1], "loss", losses[-1])),
        "idle": profiled(trainer, batches[-2:], profile),
    }  # fmt: skip
    return found


def profiled(trainer: Trainer | Kernels, batches: Sequence[Sequence[PackedRow]], show: bool) -> float:
    """The share of the steps' time in which the GPU did nothing. `show` prints kinds of kernels, then the 28 most costly."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for rows in batches:
            trainer.step(rows)
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
    idle = (span - sum(kinds.values())) / span
    if not show:
        return idle
    print(
        f"{len(batches)} steps: span {span:.1f} ms, idle {span - sum(kinds.values()):.1f} ms;",
        {kind: round(ms, 1) for kind, ms in sorted(kinds.items())},
    )
    for name, times in sorted(each.items(), key=lambda pair: -sum(pair[1]))[:28]:
        print(f"{sum(times):8.2f} ms {len(times):5} x {name[:150]}")
    return idle


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
        ends = f"{found['idle']:.1%} | {found['peak_gib']:.1f} | {found['graphs_in_timed_steps']}"
        lines.append(f"| {name} | {found['tokens_per_second']:,.0f} | {found['step_ms']:.0f} | {shares} | {ends} |")
    print("| setting | tokens/s | step ms | MFU of 989 | of the measured product | idle | peak GiB | compilations in timed steps |")
    print("| --- " * 8 + "|", *lines, sep="\n")


if __name__ == "__main__":
    main()
