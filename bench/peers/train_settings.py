"""What all programs of bench/train_step.py train alike. Needs nothing but Python."""

import json
from typing import Any

LR, RANK, ALPHA, MAX_NORM = 1e-4, 8, 16, 1.0
PADDED_ROWS, ROW_LENGTH = 4, 1024
"""Tokens of a step: four padded rows of GSM8K (about 870 tokens that are no padding), or a packed row (about 1,010)."""


def conversations(path: str) -> list[dict[str, Any]]:
    with open(path, encoding="utf-8") as lines:
        return [{"messages": json.loads(line)["messages"]} for line in lines]


def lora_config() -> Any:
    from peft import LoraConfig

    return LoraConfig(r=RANK, lora_alpha=ALPHA, lora_dropout=0.0, target_modules="all-linear", task_type="CAUSAL_LM")
