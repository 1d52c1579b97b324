"""Rows of the usual layouts -> `Trajectory`. Pure; a `DataError` says the reason, the caller adds file and line.

What would change the meaning and is not supported (images, preference pairs, per-message weights, null content) is
refused. Keys that are only not needed are left out and listed by `unused_keys`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from twinkle_core.errors import DataError
from twinkle_core.types import Message, Trajectory

Row = Mapping[str, Any]

ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "function_call": "assistant",
    "tool": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip

_MESSAGE_KEYS = {
    "role", "from", "content", "value", "tool_calls", "tool_call_id", "name", "reasoning_content", "loss_weight", "weight",
}  # fmt: skip
_REFUSED = {
    "images": "images are not supported by this text-only pipeline",
    "videos": "videos are not supported by this text-only pipeline",
    "audios": "audio is not supported by this text-only pipeline",
    "chosen": "this is a preference pair, not an example to imitate",
    "rejected": "this is a preference pair, not an example to imitate",
}


def detect(row: Row) -> str:
    """Name of the format whose keys the row has. Raises `DataError` listing the keys when there is none."""
    for name, needed in (
        ("messages", ("messages",)),
        ("sharegpt", ("conversations",)),
        ("alpaca", ("instruction", "output")),
        ("prompt_completion", ("prompt", "completion")),
        ("query_response", ("query", "response")),
        ("query_response", ("question", "answer")),
    ):
        if all(row.get(key) is not None for key in needed):
            return name
    raise DataError(f"no known format has the keys {sorted(row)}; known formats: {', '.join(FORMATS)}")


def convert(row: Row, format_name: str) -> Trajectory:
    """The row as a `Trajectory`. Raises `DataError` with the reason, naming the turn where there is one."""
    for key, reason in _REFUSED.items():
        if row.get(key):
            raise DataError(f"key '{key}': {reason}")
    if isinstance(row.get("label"), bool):
        raise DataError("key 'label': rows judged good or bad (KTO) are not examples to imitate")
    messages = [_message(item, number) for number, item in enumerate(FORMATS[format_name](row), start=1)]
    if not any(message["role"] == "assistant" for message in messages):
        raise DataError(f"no assistant turn among {len(messages)} messages, so there is nothing to learn")
    trajectory: Trajectory = {"messages": messages}
    if tools := _tools(row.get("tools")):
        trajectory["tools"] = tools
    if row.get("user_data"):
        trajectory["user_data"] = _user_data(row["user_data"])
    return trajectory


def unused_keys(row: Row, format_name: str) -> list[str]:
    """Keys of the row, and of its messages as 'messages[].key', that conversion does not read."""
    keys = [key for key in row if key not in _ROW_KEYS[format_name] and key not in _COMMON_KEYS]
    for item in (row.get("messages") or row.get("conversations") or []) if format_name in ("messages", "sharegpt") else []:
        keys += [f"messages[].{key}" for key in item if key not in _MESSAGE_KEYS]
    return sorted(set(keys))


def _conversation(first: str, second: str) -> Callable[[Row], list[Any]]:
    def read(row: Row) -> list[Any]:
        found = row.get(first) if row.get(first) is not None else row.get(second)
        if not isinstance(found, list) or not found:
            raise DataError(f"'{first}' must be a list with at least one message, got {_short(found)}")
        if isinstance(row.get("system"), str) and row["system"]:
            return [{"role": "system", "content": row["system"]}, *found]
        return found

    return read


def _alpaca(row: Row) -> list[Any]:
    instruction, extra = _text(row, "instruction"), row.get("input") or ""
    if not isinstance(extra, str):
        raise DataError(f"'input' must be text, got {_short(extra)}")
    return _pair(row, f"{instruction}\n{extra}" if extra else instruction, _text(row, "output"))


def _query_response(row: Row) -> list[Any]:
    query, response = ("query", "response") if row.get("query") is not None else ("question", "answer")
    return _pair(row, _text(row, query), _text(row, response))


def _prompt_completion(row: Row) -> list[Any]:
    prompt, completion = row.get("prompt"), row.get("completion")
    if isinstance(prompt, list) and isinstance(completion, list):
        return [*prompt, *completion]
    return _pair(row, _text(row, "prompt"), _text(row, "completion"))


def _pair(row: Row, query: str, response: str) -> list[Any]:
    turns = [{"role": "system", "content": row["system"]}] if row.get("system") else []
    for number, earlier in enumerate(row.get("history") or [], start=1):
        if not isinstance(earlier, (list, tuple)) or len(earlier) != 2:
            raise DataError(f"'history' item {number} must be a [query, response] pair, got {_short(earlier)}")
        turns += [{"role": "user", "content": earlier[0]}, {"role": "assistant", "content": earlier[1]}]
    return [*turns, {"role": "user", "content": query}, {"role": "assistant", "content": response}]


def _text(row: Row, key: str) -> str:
    if not isinstance(row.get(key), str):
        raise DataError(f"'{key}' must be text, got {_short(row.get(key))}")
    return str(row[key])


FORMATS: dict[str, Callable[[Row], list[Any]]] = {
    "messages": _conversation("messages", "conversations"),
    "sharegpt": _conversation("conversations", "messages"),
    "alpaca": _alpaca,
    "prompt_completion": _prompt_completion,
    "query_response": _query_response,
}
_COMMON_KEYS = {"system", "tools", "user_data", *_REFUSED}
_ROW_KEYS = {
    "messages": {"messages", "conversations"},
    "sharegpt": {"messages", "conversations"},
    "alpaca": {"instruction", "input", "output", "history"},
    "prompt_completion": {"prompt", "completion", "history"},
    "query_response": {"query", "response", "question", "answer", "history"},
}


def _message(item: Any, number: int) -> Message:
    if not isinstance(item, dict):
        raise DataError(f"turn {number}: a message is an object, got {_short(item)}")
    speaker = item.get("role") if item.get("role") is not None else item.get("from")
    role = ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise DataError(f"turn {number}: unknown role {speaker!r}; known: {', '.join(ROLES)}")
    for key in ("loss_weight", "weight"):
        if item.get(key) is not None and item[key] != (role == "assistant"):
            raise DataError(f"turn {number}: '{key}' {item[key]!r} of a {role} turn is not supported (assistant turns weigh 1, others 0)")
    content = item.get("content") if item.get("content") is not None else item.get("value")
    if speaker == "function_call":
        return {"role": role, "content": "", "tool_calls": _tool_calls(_decoded(content, number), number)}
    message: Message = {"role": role, "content": ""}
    if item.get("tool_calls"):
        if role != "assistant":
            raise DataError(f"turn {number}: tool_calls in a {role} turn")
        message["tool_calls"] = _tool_calls(item["tool_calls"], number)
    if content is None and "tool_calls" not in message:
        raise DataError(f"turn {number}: the {role} turn's content is null and it calls no tool")
    message["content"] = "" if content is None else _content(content, number)
    for key in ("tool_call_id", "name", "reasoning_content"):
        if item.get(key) is not None:
            if not isinstance(item[key], str):
                raise DataError(f"turn {number}: '{key}' must be text, got {_short(item[key])}")
            message[key] = item[key]  # type: ignore[literal-required]
    return message


def _content(content: Any, number: int) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"turn {number}: content must be text or a list of text parts, got {_short(content)}")
    texts = []
    for part in content:
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise DataError(f"turn {number}: a content part of type {kind!r} is not supported; this pipeline reads text parts only")
        text = part.get("text") if part.get("text") is not None else part.get("value")
        if not isinstance(text, str):
            raise DataError(f"turn {number}: a text part holds {_short(text)}, not text")
        texts.append(text)
    return "".join(texts)


def _decoded(content: Any, number: int) -> Any:
    try:
        value = json.loads(content)
    except (TypeError, ValueError):
        raise DataError(f"turn {number}: a function_call turn holds JSON, got {_short(content)}") from None
    return value if isinstance(value, list) else [value]


def _tool_calls(calls: Any, number: int) -> list[dict[str, Any]]:
    """Calls in OpenAI's form with arguments as an object (templates print them as JSON; text would be quoted twice)."""
    if not isinstance(calls, list) or not calls:
        raise DataError(f"turn {number}: tool_calls must be a list, got {_short(calls)}")
    return [_tool_call(call, number) for call in calls]


def _tool_call(call: Any, number: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"turn {number}: a tool call needs a function with a name, got {_short(call)}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise DataError(f"turn {number}: arguments of tool call {function['name']!r} must be a JSON object, got {_short(arguments)}")
    outer = {key: value for key, value in call.items() if key not in ("function", "type")} if "function" in call else {}
    return {**outer, "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _tools(tools: Any) -> list[dict[str, Any]]:
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else []
        except ValueError:
            raise DataError(f"'tools' is text but not JSON: {_short(tools)}") from None
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"'tools' must be a list of objects, got {_short(tools)}")
    return [tool if "function" in tool or "type" in tool else {"type": "function", "function": tool} for tool in tools]


def _user_data(pairs: Any) -> list[tuple[str, str]]:
    items = list(pairs.items()) if isinstance(pairs, dict) else pairs
    if not isinstance(items, list) or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(part, str) for part in pair) for pair in items
    ):
        raise DataError(f"'user_data' must be a list of [key, value] pairs of text, got {_short(pairs)}")
    return [(pair[0], pair[1]) for pair in items]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
