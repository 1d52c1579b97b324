"""A conversation with its texts replaced by marks, so that a rendering shows where the template puts which text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_THINK_TAGS = re.compile(r"(\s*</?think>\s*)")
STEM = "MARK"


@dataclass(frozen=True, slots=True)
class Marked:
    """Marks are `STEMx0x`, `STEMx1x`, … in the order of the conversation."""

    messages: list[dict[str, Any]]
    """What is rendered."""
    shape: tuple[str, ...]
    """All that `messages` holds: equal shapes have equal renderings."""
    texts: list[str]
    """What stands behind each mark."""
    owners: list[int]
    """Number of the message that each mark is in."""
    names: list[int]
    """The marks that are names of called functions."""


def mark(messages: Sequence[Mapping[str, Any]], stem: str, takes: Callable[[int], bool] | None = None) -> Marked:
    """Marks the assistant's texts, reasoning and tool calls, and the texts of other messages that `takes` names (None: all).

    Tags <think> and </think> of the assistant stay, with the white space around them: templates look for them and cut there. Texts of
    others that are empty or blank stay, and so does the content of a turn with tool calls: templates ask whether there is one.
    """
    writer = _Writer(stem)
    marked: list[dict[str, Any]] = []
    shape: list[str] = []
    for turn, message in enumerate(messages):
        role, content = message["role"], message["content"]
        writer.turn = turn
        if role == "assistant":
            if len(message) == 2 and "think>" not in content:
                marked.append({"role": role, "content": writer.put(content)})
                shape.append("assistant")
                continue
            message = writer.assistant(message)
        elif content and not content.isspace() and (takes is None or takes(turn)):
            if len(message) == 2:
                marked.append({"role": role, "content": writer.put(content)})
                shape.append(role)
                continue
            message = {**message, "content": writer.put(content)}
        marked.append(message)  # type: ignore[arg-type]
        shape.append(repr(message))
    return Marked(marked, tuple(shape), writer.texts, writer.owners, writer.names)


class _Writer:
    """Gives out marks."""

    def __init__(self, stem: str) -> None:
        self.stem = stem
        self.turn = 0
        self.texts: list[str] = []
        self.owners: list[int] = []
        self.names: list[int] = []

    def put(self, text: str) -> str:
        self.texts.append(text)
        self.owners.append(self.turn)
        return f"{self.stem}x{len(self.texts) - 1}x"

    def assistant(self, message: Mapping[str, Any]) -> dict[str, Any]:
        changed = dict(message)
        calls = message.get("tool_calls")
        reasoning = message.get("reasoning_content")
        if isinstance(reasoning, str) and reasoning and not reasoning.isspace():
            changed["reasoning_content"] = self.put(reasoning)
        if message["content"] or not calls:
            changed["content"] = self._content(message["content"])
        if calls:
            changed["tool_calls"] = [{**call, "function": self._function(call["function"])} for call in calls]
        return changed

    def _content(self, content: str) -> str:
        parts = _THINK_TAGS.split(content)
        last = len(parts) - 1
        return "".join(part if i % 2 or (not part and i < last) else self.put(part) for i, part in enumerate(parts))

    def _function(self, function: Mapping[str, Any]) -> dict[str, Any]:
        self.names.append(len(self.texts))
        return {**function, "name": self.put(function["name"]), "arguments": self._value(function.get("arguments", {}))}

    def _value(self, value: Any) -> Any:
        """Arguments with a mark for each text in them; names as keys, numbers and blank texts stay."""
        if isinstance(value, str):
            return self.put(value) if value and not value.isspace() else value
        if isinstance(value, Mapping):
            return {self._key(key): self._value(item) for key, item in value.items()}
        return [self._value(item) for item in value] if isinstance(value, list) else value

    def _key(self, key: Any) -> Any:
        """A key that is no name may hold a stop mark."""
        return self.put(key) if isinstance(key, str) and key.strip() and not key.isidentifier() else key


_STRIPS: tuple[Callable[[str], str], ...] = (
    str.strip,
    str.rstrip,
    str.lstrip,
    lambda text: text.strip("\n"),
    lambda text: text.rstrip("\n"),
    lambda text: text.lstrip("\n"),
    lambda text: json.dumps(text, ensure_ascii=False)[1:-1],
    lambda text: json.dumps(text)[1:-1],
)
"""What templates do to a text: strip its ends, print it as JSON."""


def match(literals: Sequence[str], texts: Sequence[str], rendering: str) -> list[tuple[int, int]] | None:
    """Places of `texts` in `rendering`, which must read literal, text, literal, …, literal, to its end; None where it does not."""
    position = len(literals[0])
    if not rendering.startswith(literals[0]):
        return None
    places: list[tuple[int, int]] = []
    for number, text in enumerate(texts, start=1):
        literal = literals[number]
        end = position + len(text)
        if not (rendering.startswith(text, position) and rendering.startswith(literal, end)):
            form = next((form for form in (strip(text) for strip in _STRIPS) if rendering.startswith(form + literal, position)), None)
            if form is None:
                return None
            end = position + len(form)
        places.append((position, end))
        position = end + len(literal)
    return places if position == len(rendering) else None
