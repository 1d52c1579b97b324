"""The texts of a trajectory, and the words of a text, in any language."""

from __future__ import annotations

import json
import re
from typing import Any

from twinkle_core.types import Message, Trajectory

# Han, kana and Hangul are written without spaces between words: each of their characters counts as a word.
_UNSPACED = r"\u1100-\u11ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff\U00020000-\U0003ffff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W{_UNSPACED}]+")


def words(text: str) -> list[str]:
    """The words of a text, in lower case; of a script without spaces its characters."""
    return _WORD.findall(text.lower())


def message_text(message: Message) -> str:
    """What the message says, without images and calls."""
    content = message["content"]
    return content if isinstance(content, str) else "\n".join(part["text"] for part in content if part["type"] == "text")


def all_text(trajectory: Trajectory, *, calls: bool = False) -> str:
    """Every text of the trajectory, one after the other on lines of their own; with `calls` what is handed to tools as well."""
    if "text" in trajectory:
        return trajectory["text"]
    if "embedding" in trajectory:
        pair = trajectory["embedding"]
        return "\n".join([pair["anchor"], pair["positive"], *pair.get("negatives", [])])
    messages = [*trajectory["messages"], *trajectory.get("rejected_messages", [])]
    parts = [part for message in messages for part in (message.get("reasoning_content", ""), message_text(message)) if part]
    if calls:
        handed: list[Any] = [call for message in messages for call in message.get("tool_calls", [])]
        parts += [json.dumps(call, ensure_ascii=False) for call in handed]
    return "\n".join(parts)


def answers(trajectory: Trajectory) -> list[str]:
    """What the assistant says, turn by turn."""
    return [message_text(message) for message in trajectory["messages"] if message["role"] == "assistant"]
