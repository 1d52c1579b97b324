"""Rows for the tests of datasets."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

FRAME_TOKENS = len("#user\n#\n#assistant\n#\n")
"""Tokens of a one-turn conversation of empty texts: one for each byte, and for each special token (#)."""


def chat(question: str, answer: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def chats(lengths: Iterable[int], start: int = 0) -> list[dict[str, Any]]:
    """Conversations with answers of these lengths, each with its own question."""
    return [chat(f"{number:03}", "x" * length) for number, length in enumerate(lengths, start=start)]


def plain(features: Iterable[Any]) -> list[Any]:
    """Features (or rows) that `==` compares."""
    return [{key: value.tolist() if isinstance(value, np.ndarray) else value for key, value in feature.items()} for feature in features]


def ids(features: Iterable[Any]) -> list[list[int]]:
    return [feature["input_ids"].tolist() for feature in features]
