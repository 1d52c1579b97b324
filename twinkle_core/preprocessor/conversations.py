"""Rows that hold a conversation or a text, in the layouts in use -> `Trajectory`."""

from __future__ import annotations

from typing import Any

from twinkle_core.errors import DataError
from twinkle_core.preprocessor.fields import Row, first_key, optional_text, short, text
from twinkle_core.preprocessor.media import References, attach_media, refuse_media
from twinkle_core.preprocessor.messages import read_messages
from twinkle_core.types import Message, Trajectory

QUESTIONS = ("prompt", "question", "query", "problem")
"""Keys under which a single question stands, in the order in which they are looked for."""


def read_conversation(row: Row) -> Trajectory:
    """A list of messages under `messages` or `conversations` (tags of both forms, and mixed ones)."""
    found: References = {}
    return with_media(conversation(row, found), row, found)


def read_alpaca(row: Row) -> Trajectory:
    """`instruction`, `input` and `output` (https://github.com/tatsu-lab/stanford_alpaca), with `system` and `history`."""
    return _exchange(row, instruction(row), text(row, "output"))


def read_prompt_completion(row: Row) -> Trajectory:
    """`prompt` and `completion`, both texts or both lists of messages."""
    if isinstance(row.get("prompt"), list) and isinstance(row.get("completion"), list):
        found: References = {}
        messages = [*read_messages(row["prompt"], found, "prompt"), *read_messages(row["completion"], found, "completion")]
        return with_media(with_system(messages, row), row, found)
    return _exchange(row, text(row, "prompt"), text(row, "completion"))


def read_query_response(row: Row) -> Trajectory:
    """`query` and `response`, or `question` and `answer`."""
    query, response = ("query", "response") if row.get("query") is not None else ("question", "answer")
    return _exchange(row, text(row, query), text(row, response))


def read_text(row: Row) -> Trajectory:
    """Plain `text`."""
    refuse_media(row, "text")
    if not text(row, "text"):
        raise DataError("'text' is empty")
    return {"messages": [], "text": row["text"]}


def conversation(row: Row, found: References) -> list[Message]:
    """The messages under `messages` or `conversations`, the row's `system` before them."""
    key = first_key(row, "messages", "conversations") or "messages"
    messages = with_system(read_messages(row.get(key), found, key), row)
    if all(message["role"] == "system" for message in messages):
        raise DataError(f"'{key}' holds no turn but the system's")
    return messages


def with_system(messages: list[Message], row: Row) -> list[Message]:
    """The messages, after the row's `system` where it has one."""
    system = optional_text(row, "system")
    if not system:
        return messages
    if messages and messages[0]["role"] == "system":
        if messages[0]["content"] == system:
            return messages
        raise DataError(f"'system' and the first message are two different system texts: {short(system)}")
    return [{"role": "system", "content": system}, *messages]


def with_media(messages: list[Message], row: Row, found: References) -> Trajectory:
    """A conversation with its references."""
    trajectory: Trajectory = {"messages": messages}
    attach_media(trajectory, row, found)
    return trajectory


def history(row: Row) -> list[Message]:
    """Earlier exchanges under `history`: [[query, response], …]."""
    turns: list[Message] = []
    for number, earlier in enumerate(row.get("history") or [], start=1):
        if not isinstance(earlier, (list, tuple)) or len(earlier) != 2 or not all(isinstance(part, str) for part in earlier):
            raise DataError(f"'history' item {number} must be a [query, response] pair, got {short(earlier)}")
        turns += [{"role": "user", "content": earlier[0]}, {"role": "assistant", "content": earlier[1]}]
    return turns


def instruction(row: Row) -> str:
    """Alpaca's `instruction`, with `input` on the next line where there is one."""
    extra = optional_text(row, "input")
    return f"{text(row, 'instruction')}\n{extra}" if extra else text(row, "instruction")


def asked(row: Row, found: References) -> list[Message]:
    """What stands before the answer, of a row that keeps it apart: messages, an Alpaca instruction, or a question."""
    if first_key(row, "messages", "conversations"):
        return conversation(row, found)
    if row.get("instruction") is not None:
        return with_system([*history(row), {"role": "user", "content": instruction(row)}], row)
    key = first_key(row, *QUESTIONS)
    if key is None:
        raise DataError(f"no messages, instruction or question: one of {', '.join(('messages', 'instruction', *QUESTIONS))} is needed")
    value: Any = row[key]
    if isinstance(value, list):
        return with_system(read_messages(value, found, key), row)
    return with_system([*history(row), {"role": "user", "content": text(row, key)}], row)


def _exchange(row: Row, query: str, response: str) -> Trajectory:
    messages: list[Message] = [{"role": "user", "content": query}, {"role": "assistant", "content": response}]
    if row.get("history"):
        messages = [*history(row), *messages]
    return with_media(with_system(messages, row), row, {})
