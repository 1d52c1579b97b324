"""Which layout a row has, and the row as a `Trajectory`. Pure; a `DataError` says the reason, the caller adds file and row.

What would change the meaning and cannot be read is refused. Keys that are only not needed are left out and listed by
`unused_keys`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

from twinkle_core.errors import DataError
from twinkle_core.preprocessor.conversations import (
    QUESTIONS,
    read_alpaca,
    read_conversation,
    read_prompt_completion,
    read_query_response,
    read_text,
)
from twinkle_core.preprocessor.fields import Row, first_key, pairs, short
from twinkle_core.preprocessor.judged_rows import (
    LABELS,
    TRUTHS,
    judgement,
    read_embedding,
    read_judged,
    read_preference,
    read_prompt,
)
from twinkle_core.preprocessor.media import ROW_KEYS
from twinkle_core.preprocessor.messages import MESSAGE_KEYS, read_messages, read_tools
from twinkle_core.types import Trajectory

COMMON_KEYS = {"system", "tools", "user_data", *ROW_KEYS}
JUDGEMENTS = frozenset({"chosen", *LABELS})
LISTS = {"messages", "conversations"}
"""Keys whose items are messages."""
TRAJECTORY_KEYS = set(Trajectory.__annotations__)
SEVERAL_POSITIVES = "pos[1:]"
"""What `unused_keys` calls the positives of an embedding row that are left out."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """One way to write a row."""

    read: Callable[[Row], Trajectory]
    keys: set[str]
    """Keys that are read, beside `COMMON_KEYS`."""
    imitated: bool = False
    """The row is an example to imitate: a judgement in it would be lost, so it is refused."""


def read_trajectory(row: Row) -> Trajectory:
    """A row that is a `Trajectory` already, as a processor returns it."""
    if row.get("text") is not None:
        return read_text(row)
    if row.get("embedding") is not None:
        if not isinstance(row["embedding"], dict):
            raise DataError(f"'embedding' must be an object, got {short(row['embedding'])}")
        return read_embedding(row["embedding"])
    trajectory = read_conversation(row)
    if row.get("rejected_messages") is not None:
        pair = {**row, "messages": None, "chosen": row["messages"], "rejected": row["rejected_messages"]}
        return read_preference(pair)
    if row.get("desirable") is not None:
        return read_judged(row)
    if row.get("prompt_only"):
        trajectory["prompt_only"] = True
    return trajectory


FORMATS: dict[str, Layout] = {
    "messages": Layout(read=read_conversation, keys=LISTS, imitated=True),
    "sharegpt": Layout(read=read_conversation, keys=LISTS, imitated=True),
    "alpaca": Layout(read=read_alpaca, keys={"instruction", "input", "output", "history"}, imitated=True),
    "prompt_completion": Layout(read=read_prompt_completion, keys={"prompt", "completion", "history"}, imitated=True),
    "query_response": Layout(read=read_query_response, keys={"query", "response", "question", "answer", "history"}, imitated=True),
    "text": Layout(read=read_text, keys={"text"}),
    "preference": Layout(
        read=read_preference, keys={"chosen", "rejected", "instruction", "input", "history", *LISTS, *QUESTIONS}
    ),
    "judged": Layout(
        read=read_judged,
        keys={"completion", "response", "output", "answer", "instruction", "input", "history", *LABELS, *LISTS, *QUESTIONS},
    ),
    "prompt": Layout(
        read=read_prompt, keys={"instruction", "input", "history", "scorer", "reward_model", *TRUTHS, *LISTS, *QUESTIONS}
    ),
    "embedding": Layout(read=read_embedding, keys={"anchor", "query", "positive", "pos", "negative", "negatives", "neg"}),
    "trajectory": Layout(read=read_trajectory, keys=TRAJECTORY_KEYS),
}  # fmt: skip


def detect(row: Row) -> str:
    """Name of the layout whose keys the row has. Raises `DataError` listing the keys when there is none.

    A question with an answer is an exchange to learn from ('query_response'); name the layout 'prompt' to have the
    answer as ground truth of a prompt instead.
    """
    has = {key for key in row if row[key] is not None}
    judged = any(isinstance(row.get(key), bool) or str(row.get(key)).lower() in ("true", "false") for key in LABELS)
    if "messages" in has and (
        has & {"rejected_messages", "desirable", "embedding", "prompt_only"} or (not row["messages"] and "text" in has)
    ):
        return "trajectory"
    if {"chosen", "rejected"} <= has:
        return "preference"
    if judged and (has & LISTS or {"prompt", "completion"} <= has):
        return "judged"
    if has & {"anchor", "query"} and has & {"positive", "pos"}:
        return "embedding"
    if has & LISTS:
        if has & {*TRUTHS, "reward_model"} and _ends_with_a_question(row):
            return "prompt"
        return "messages" if "messages" in has else "sharegpt"
    for name, needed in (
        ("alpaca", {"instruction", "output"}),
        ("prompt_completion", {"prompt", "completion"}),
        ("query_response", {"query", "response"}),
        ("query_response", {"question", "answer"}),
    ):
        if needed <= has:
            return name
    if has & set(QUESTIONS) and (has & {*TRUTHS, "reward_model"} or has == {"prompt"}):
        return "prompt"
    if "text" in has:
        return "text"
    raise DataError(f"no known format has the keys {sorted(row)}; known formats: {', '.join(FORMATS)} (`columns` renames keys)")


def convert(row: Row, format_name: str) -> Trajectory:
    """The row as a `Trajectory`. Raises `DataError` with the reason, naming the turn where there is one."""
    layout = FORMATS.get(format_name)
    if layout is None:
        raise DataError(f"unknown format {format_name!r}; known: {', '.join(FORMATS)}")
    if layout.imitated and not row.keys().isdisjoint(JUDGEMENTS):
        _refuse_judgements(row, format_name)
    trajectory = layout.read(row)
    if row.get("tools") and (tools := read_tools(row["tools"])):
        trajectory["tools"] = tools
    if row.get("user_data"):
        given = pairs(row, "user_data")
        names = {name for name, _ in given}
        trajectory["user_data"] = [*given, *(pair for pair in trajectory.get("user_data", []) if pair[0] not in names)]
    return trajectory


def unused_keys(row: Row, format_name: str) -> list[str]:
    """Keys of the row, and of its messages as 'messages[].key', that conversion does not read."""
    keys = _unused(tuple(row), format_name)
    lists = [row[key] for key in ("messages", "conversations") if key in row and key in FORMATS[format_name].keys]
    extra = {f"messages[].{key}" for items in lists for item in items or () for key in _unused_in_message(tuple(item))}
    if format_name == "embedding" and isinstance(row.get("pos"), list) and len(row["pos"]) > 1:
        extra.add(SEVERAL_POSITIVES)
    return sorted({*keys, *extra}) if extra else keys


@lru_cache(maxsize=1024)
def _unused(keys: tuple[str, ...], format_name: str) -> list[str]:
    read = FORMATS[format_name].keys | COMMON_KEYS
    numbered = "negative_" if format_name == "embedding" else "\0"
    return sorted(key for key in keys if key not in read and not key.startswith(numbered))


@lru_cache(maxsize=1024)
def _unused_in_message(keys: tuple[str, ...]) -> list[str]:
    return [key for key in keys if key not in MESSAGE_KEYS]


def _refuse_judgements(row: Row, format_name: str) -> None:
    if row.get("chosen") is not None and row.get("rejected") is not None:
        raise DataError(f"'chosen' and 'rejected': a preference pair, not a row of layout '{format_name}'")
    for key in LABELS:
        if judgement(row.get(key)) is not None:
            raise DataError(
                f"'{key}' {short(row[key])}: a row judged good or bad (layout 'judged') is not one to imitate (layout '{format_name}'); "
                "set format: judged, or rename the column (`columns`) if it is no judgement"
            )


def _ends_with_a_question(row: Row) -> bool:
    items: Any = row[cast(str, first_key(row, "messages", "conversations"))]
    return bool(read_messages(items, {})[-1]["role"] != "assistant")
