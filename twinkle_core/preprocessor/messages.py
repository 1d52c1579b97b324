"""One turn of a conversation, in the forms in use -> `Message`. A `DataError` names the turn, counted from 1."""

from __future__ import annotations

import json
import math
from contextlib import suppress
from typing import Any

from twinkle_core.errors import DataError
from twinkle_core.preprocessor.fields import short
from twinkle_core.preprocessor.media import PART_TYPES, References, media_part
from twinkle_core.types import Message

ROLES = {
    "system": "system", "developer": "system",
    "user": "user", "human": "user",
    "assistant": "assistant", "gpt": "assistant", "function_call": "assistant",
    "tool": "tool", "function": "tool", "observation": "tool", "function_response": "tool",
}  # fmt: skip
MESSAGE_KEYS = {
    "role", "from", "content", "value", "tool_calls", "tool_call_id", "name", "reasoning_content", "loss", "loss_weight", "weight",
    "function_call",
}  # fmt: skip
"""Keys of a message that are read."""


def read_messages(items: Any, found: References, key: str = "messages") -> list[Message]:
    """The messages of the list under `key`; references of media parts are added to `found`."""
    if not isinstance(items, list) or not items:
        raise DataError(f"'{key}' must be a list with at least one message, got {short(items)}")
    messages: list[Message] = []
    for number, item in enumerate(items, start=1):
        if not isinstance(item, dict):
            raise DataError(f"turn {number}: a message is an object, got {short(item)}")
        try:
            messages.append(_message(item, found))
        except DataError as error:
            raise DataError(f"turn {number}: {error}") from None
    return messages


def read_tools(tools: Any) -> list[dict[str, Any]]:
    """Tools in OpenAI's form, from a list or its JSON text. Nothing in them is changed: templates print them as they are."""
    if isinstance(tools, str):
        try:
            tools = json.loads(tools) if tools.strip() else []
        except ValueError:
            raise DataError(f"'tools' is text but not JSON: {short(tools)}") from None
    if tools is None:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise DataError(f"'tools' must be a list of objects, got {short(tools)}")
    return [tool if "function" in tool or "type" in tool else {"type": "function", "function": tool} for tool in tools]


def _message(item: dict[str, Any], found: References) -> Message:
    speaker = item.get("role")
    if speaker is None:
        speaker = item.get("from")
    role = ROLES.get(speaker) if isinstance(speaker, str) else None
    if role is None:
        raise DataError(f"unknown role {speaker!r}; known: {', '.join(ROLES)}")
    content = item.get("content")
    if content is None:
        content = item.get("value")
    if type(content) is str and len(item) == 2 and speaker != "function_call":
        return {"role": role, "content": content}
    message: Message = {"role": role, "content": ""}
    if speaker == "function_call":
        message["tool_calls"] = _tool_calls(_decoded(content, "a function_call turn"))
    elif isinstance(content, list):
        _read_parts(content, message, found)
    elif content is not None and not isinstance(content, str):
        raise DataError(f"content must be text or a list of parts, got {short(content)}")
    else:
        message["content"] = content or ""
    if item.get("function_call"):  # OpenAI's older form
        message["tool_calls"] = _tool_calls([item["function_call"]])
    if item.get("tool_calls"):
        message["tool_calls"] = [*message.get("tool_calls", []), *_tool_calls(item["tool_calls"])]
    if "tool_calls" in message and role != "assistant":
        raise DataError(f"tool_calls in a {role} turn")
    if content is None and "tool_calls" not in message:
        raise DataError(f"the {role} turn's content is null and it calls no tool")
    for key in ("tool_call_id", "name", "reasoning_content"):
        if item.get(key) is not None:
            if not isinstance(item[key], str):
                raise DataError(f"'{key}' must be text, got {short(item[key])}")
            message[key] = message.get(key, "") + item[key]
    weight = _loss_weight(item)
    if weight is not None:
        message["loss_weight"] = weight
    return message


def _read_parts(parts: list[Any], message: Message, found: References) -> None:
    """Texts are joined exactly; only where an image, video or audio stands among them does the content stay a list."""
    kept: list[dict[str, Any]] = []
    thoughts: list[str] = []
    for part in parts:
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind in PART_TYPES:
            kept.append(media_part(part, found))
        elif kind == "text":
            kept.append({"type": "text", "text": _part_text(part)})
        elif kind == "reasoning":
            thoughts.append(_part_text(part))
        elif kind == "tool_call":
            value = next((part[key] for key in ("value", "tool_call", "function") if part.get(key) is not None), None)
            calls = _decoded(value, "a tool_call part") if isinstance(value, str) else [value]
            message["tool_calls"] = [*message.get("tool_calls", []), *_tool_calls(calls)]
        else:
            known = ", ".join(["text", "reasoning", "tool_call", *PART_TYPES])
            raise DataError(f"a content part of type {kind!r} is not supported; known: {known}")
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    only_text = all(part["type"] == "text" for part in kept)
    message["content"] = "".join(part["text"] for part in kept) if only_text else kept


def _part_text(part: dict[str, Any]) -> str:
    value = next((part[key] for key in ("text", "value", "reasoning") if part.get(key) is not None), None)
    if not isinstance(value, str):
        raise DataError(f"a {part['type']} part holds {short(value)}, not text")
    return value


def _loss_weight(item: dict[str, Any]) -> float | None:
    """What `loss` (yes or no), `weight` and `loss_weight` say; they have to agree."""
    told: dict[str, float] = {}
    for key in ("loss", "weight", "loss_weight"):
        value = item.get(key)
        if value is None:
            continue
        number = isinstance(value, (int, float)) and (not isinstance(value, bool) or key == "loss")
        if not number or not math.isfinite(value) or value < 0 or (key == "loss" and value not in (0, 1)):
            wanted = "true or false" if key == "loss" else "a number of at least 0"
            raise DataError(f"'{key}' is {short(value)}: it must be {wanted}")
        told[key] = float(value)
    if len(set(told.values())) > 1:
        raise DataError(f"the turn's weights disagree: {told}")
    return next(iter(told.values()), None)


def _decoded(content: Any, where: str) -> list[Any]:
    try:
        value = json.loads(content)
    except (TypeError, ValueError):
        raise DataError(f"{where} holds JSON, got {short(content)}") from None
    return value if isinstance(value, list) else [value]


def _tool_calls(calls: Any) -> list[dict[str, Any]]:
    """Calls in OpenAI's form with arguments as an object (templates print them as JSON; text would be quoted twice)."""
    if not isinstance(calls, list) or not calls:
        raise DataError(f"tool_calls must be a list, got {short(calls)}")
    return [_tool_call(call) for call in calls]


def _tool_call(call: Any) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"a tool call needs a function with a name, got {short(call)}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError):
            arguments = json.loads(arguments) if arguments.strip() else {}
    if not isinstance(arguments, dict):
        raise DataError(f"arguments of tool call {function['name']!r} must be a JSON object, got {short(arguments)}")
    outer = {key: value for key, value in call.items() if key not in ("function", "type")} if "function" in call else {}
    return {**outer, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
