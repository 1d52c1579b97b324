"""Messages in the form that one chat template takes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle_core.errors import DataError
from twinkle_core.template.chat_template import ChatTemplate

_PROBE = "probe_function"


@dataclass(frozen=True, kw_only=True, slots=True)
class MessageForm:
    """How a chat template wants a turn with tool calls. Found by `probe`."""

    empty_content: str | None = ""
    """Content of a turn that only calls tools: DeepSeek V3 prints the calls where it is None, others print the word None."""
    argument_objects: bool = True
    """The template prints arguments that are an object."""
    argument_texts: bool = True
    """The template prints arguments that are JSON text, and does not quote them again."""

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages with plain text as content, without `loss_weight`. Raises `DataError` naming the turn (from 1) that is none."""
        return [
            message if len(message) == 2 and type(message.get("content")) is str else self._message(number, message)  # type: ignore[misc]
            for number, message in enumerate(messages, start=1)
        ]

    def _message(self, number: int, message: Mapping[str, Any]) -> dict[str, Any]:
        changed = {key: value for key, value in message.items() if key != "loss_weight"}
        calls = message.get("tool_calls")
        content = _text(number, message.get("content"))
        if content is None and not calls:
            raise DataError(f"turn {number} ({message['role']}) has no content and calls no tool")
        changed["content"] = self.empty_content if calls and not content else content
        if calls:
            changed["tool_calls"] = [self._call(number, call) for call in calls]
        return changed

    def _call(self, number: int, call: Any) -> dict[str, Any]:
        try:
            function = call["function"]
            name, arguments = function["name"], function.get("arguments", {})
        except (TypeError, KeyError):
            raise DataError(f"turn {number}: a tool call needs a function with a name and arguments, got {str(call)[:80]!r}") from None
        if not isinstance(name, str):
            raise DataError(f"turn {number}: the name of a tool call is {name!r}, no text")
        if isinstance(arguments, str) and not self.argument_texts:
            try:
                arguments = json.loads(arguments)
            except ValueError:
                raise DataError(f"turn {number}: the arguments of the call of {name!r} are no JSON: {arguments[:80]!r}") from None
        elif not isinstance(arguments, str) and not self.argument_objects:
            arguments = json.dumps(arguments, ensure_ascii=False)
        return {**call, "function": {**function, "arguments": arguments}}


def probe(template: ChatTemplate) -> MessageForm:
    """The form that `template` takes, seen from how it prints one call. The default form where it prints none."""
    for empty_content in ("", None):
        takes_objects = "probe_key" in _printed_call(template, empty_content, {"probe_key": "probe"})
        takes_texts = '{"probe_key": "probe"}' in _printed_call(template, empty_content, '{"probe_key": "probe"}')
        if takes_objects or takes_texts:
            return MessageForm(empty_content=empty_content, argument_objects=takes_objects, argument_texts=takes_texts)
    return MessageForm()


def _printed_call(template: ChatTemplate, content: str | None, arguments: Any) -> str:
    """What is printed of a turn with one call; '' where the call is not, or where the template refuses it."""
    call = {"id": "abcdefghi", "type": "function", "function": {"name": _PROBE, "arguments": arguments}}
    messages: list[dict[str, Any]] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": content, "tool_calls": [call]}]
    try:
        text = template.render(messages, None)
    except DataError:
        return ""
    return text if _PROBE in text and (content is not None or "None" not in text) else ""


def _text(number: int, content: Any) -> str | None:
    """The content's text; texts of several parts are joined as they are."""
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(f"turn {number}: content is {str(content)[:80]!r}; it must be text or a list of parts")
    for part in content:
        kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
        if kind != "text" or not isinstance(part.get("text"), str):
            raise DataError(f"turn {number} has a part of type {kind!r}, which this template does not take: it encodes text only")
    return "".join(part["text"] for part in content)
