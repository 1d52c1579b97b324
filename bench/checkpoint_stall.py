"""How long the training loop stands still for a checkpoint, as a share of an optimizer step, and what the save behind it costs the steps.

    .venv/bin/python bench/checkpoint_stall.py            # small models, a folder and an S3 on this machine (moto): a few minutes
    .venv/bin/python bench/checkpoint_stall.py --large    # and SmolLM2-135M's shape, all parameters: 1.6 GB of state

Random weights, all parameters trained in float32. `stall` is the time inside `begin_save`, by the clock and as CPU time of the loop's
thread (which another load on the machine does not lengthen); `behind` is from then until the files are in the store. Beside it, the same
bytes in the library's way: new memory for each copy, and safetensors' own writer. `still` is the longest time for which other Python
code could not run meanwhile, the shortest of several tries.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peers.side_by_side import ROOT
from safetensors.torch import save_file as their_save_file
from transformers import LlamaConfig

from twinkle_core.model import TransformersModel
from twinkle_core.model.checkpoint_files import detach
from twinkle_core.model.host_copies import HostCopies
from twinkle_core.model.tensor_file import save_file
from twinkle_core.types import IGNORE, PackedRow

TOKENS = 512
SAVES = 4
TRIES = 5
SHAPES: dict[str, dict[str, int]] = {
    "1M": {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 2048},
    "30M": {"hidden_size": 384, "intermediate_size": 1024, "num_hidden_layers": 8, "vocab_size": 32000},
    "135M": {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152},
}


def build(shape: Mapping[str, int]) -> TransformersModel:
    heads = shape["hidden_size"] // 64 or 1
    config = LlamaConfig(num_attention_heads=heads, num_key_value_heads=heads, tie_word_embeddings=True, **shape)
    model = TransformersModel(config=config, mixed_precision="no")
    model.set_optimizer("AdamW", lr=1e-4)
    return model


def row(vocabulary: int, seed: int) -> PackedRow:
    ids = np.random.default_rng(seed).integers(3, vocabulary, TOKENS).astype(np.int32)
    labels = np.roll(ids, -1)
    labels[-1] = IGNORE
    return PackedRow(input_ids=ids, labels=labels, seq_lens=np.array([TOKENS], dtype=np.int32), sample_ids=np.array([seed], dtype=np.int64))


def step(model: TransformersModel, seed: int, vocabulary: int) -> tuple[float, float]:
    """Seconds, and CPU seconds of this thread."""
    began = time.perf_counter(), time.thread_time()
    model.forward_backward([row(vocabulary, seed)])
    model.clip_grad_and_step()
    return time.perf_counter() - began[0], time.thread_time() - began[1]


@contextmanager
def still() -> Iterator[Callable[[], float]]:
    """Gives the longest time, in seconds, between two turns of another Python thread that sleeps a millisecond at a time."""
    longest, is_over = 0.0, False

    def tick() -> None:
        nonlocal longest
        last = time.perf_counter()
        while not is_over:
            time.sleep(0.001)
            now = time.perf_counter()
            longest, last = max(longest, now - last), now

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        yield lambda: longest
    finally:
        is_over = True
        thread.join()


def measure(name: str, store_url: str) -> dict[str, Any]:
    vocabulary = SHAPES[name]["vocab_size"]
    model = build(SHAPES[name])
    alone = [step(model, seed, vocabulary) for seed in range(6)][2:]
    stalls: list[tuple[float, float]] = []
    behind, beside = [], []
    for number in range(SAVES):
        began = time.perf_counter(), time.thread_time()
        model.begin_save(store_url, f"{name}/{uuid.uuid4().hex}")
        stalls.append((time.perf_counter() - began[0], time.thread_time() - began[1]))
        while model.end_save(False) is None:
            beside.append(step(model, 100 * number + len(beside), vocabulary)[0])
        behind.append(time.perf_counter() - began[0])
    clock, cpu = (statistics.median(seconds[kind] for seconds in alone) for kind in (0, 1))
    stall, stall_cpu = (statistics.median(seconds[kind] for seconds in stalls[1:]) for kind in (0, 1))
    return {
        "step": clock, "step cpu": cpu, "first": stalls[0][0], "stall": stall, "stall cpu": stall_cpu,
        "behind": statistics.median(behind), "beside": statistics.median(beside) if beside else float("nan"),
    }  # fmt: skip


def writers(name: str) -> dict[str, float]:
    """Copy and write of the same state, in both ways."""
    model = build(SHAPES[name])
    step(model, 0, SHAPES[name]["vocab_size"])
    state: Any = model._group._worker.state()  # type: ignore[attr-defined]
    live = {**state.parameters, **{f"optimizer.{key}": tensor for key, tensor in state.ready()[0].tensors().items()}}
    copies = HostCopies()
    copies.take("state", live)
    found: dict[str, float] = {"bytes": sum(tensor.numel() * tensor.element_size() for tensor in live.values())}
    with tempfile.TemporaryDirectory() as folder:
        began = time.thread_time()
        copied = copies.take("state", live)
        found["copy"] = time.thread_time() - began
        began = time.thread_time()
        theirs = detach(live)
        found["their copy"] = time.thread_time() - began
        ours, library = [], []
        for _ in range(TRIES):
            with still() as longest:
                save_file(copied, Path(folder) / "ours", {"format": "pt"})
                ours.append(longest())
            with still() as longest:
                their_save_file(theirs, Path(folder) / "theirs", {"format": "pt"})
                library.append(longest())
        found |= {"still": min(ours), "their still": min(library)}
    return found


@contextmanager
def s3() -> Iterator[str]:
    """The address of a bucket of an S3 on this machine."""
    sys.path.insert(0, str(ROOT))
    from tests.servers import create_bucket, s3_server

    with s3_server() as environment:
        os.environ.update(environment)
        create_bucket(environment, "bench")
        yield "s3://bench/runs"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--large", action="store_true")
    parser.add_argument("--threads", type=int, default=1, help="of torch; with more than there are idle cores, steps wait for each other")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    names = [name for name in SHAPES if name != "135M" or given.large]
    print(f"load {os.getloadavg()[0]:.1f}, torch threads {torch.get_num_threads()}, {TOKENS} tokens a step\n")
    print("| model | store | step s (CPU s) | stall s, first | stall s (CPU s) | of a step (of its CPU) | behind s | step beside it |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- |")
    with tempfile.TemporaryDirectory() as folder, s3() as bucket:
        for name in names:
            for kind, url in (("folder", folder), ("S3", bucket)):
                m = measure(name, url)
                print(
                    f"| {name} | {kind} | {m['step']:.3f} ({m['step cpu']:.3f}) | {m['first']:.4f} "
                    f"| {m['stall']:.4f} ({m['stall cpu']:.4f}) "
                    f"| {m['stall'] / m['step']:.1%} ({m['stall cpu'] / m['step cpu']:.1%}) | {m['behind']:.2f} "
                    f"| {m['beside'] / m['step']:.2f} of alone |",
                    flush=True,
                )
    print("\n| model | state MB | copy, CPU s | copy to new memory, CPU s | still, ours s | still, safetensors' s |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name in names:
        w = writers(name)
        print(
            f"| {name} | {w['bytes'] / 1e6:.0f} | {w['copy']:.4f} | {w['their copy']:.4f} | {w['still']:.4f} | {w['their still']:.4f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
