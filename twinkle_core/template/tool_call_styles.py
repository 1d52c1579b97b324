"""Wire formats of tool calls: how a block of each opens, and how it reads. Pure: strings in, values out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Never

ToolCall = dict[str, Any]
"""`{'type': 'function', 'function': {'name': str, 'arguments': dict}}`"""

Parameters = Mapping[str, Mapping[str, Any]]
"""JSON schema of each tool's parameters, by the tool's name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Style:
    """One wire format."""

    opening: re.Pattern[str]
    read: Callable[[re.Match[str], Parameters], tuple[list[ToolCall], int] | None]
    """Calls and end of the block that opens at the match; None where it is no block after all. Raises `BrokenBlock`."""


class BrokenBlock(ValueError):
    """A block that does not read as its style says; the message is the reason."""


def _call(name: str, arguments: dict[str, Any]) -> ToolCall:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(names := dict(pairs)) != len(pairs):
        raise BrokenBlock(f"a key is given twice among {[key for key, _ in pairs]}")
    return names


def _refuse_constant(name: str) -> Never:
    raise BrokenBlock(f"{name} is no JSON")


_SPACE = re.compile(r"\s*")
_JSON = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_refuse_constant)


def _read_json(text: str, position: int) -> tuple[Any, int]:
    """The value that starts at `position` or after white space there, and where it ends."""
    try:
        return _JSON.raw_decode(text, _SPACE.match(text, position).end())  # type: ignore[union-attr]
    except BrokenBlock:
        raise
    except (ValueError, RecursionError) as error:  # RecursionError: nested deeper than Python's stack
        raise BrokenBlock(f"no JSON value: {error}") from None


def _read_object(text: str, position: int) -> tuple[dict[str, Any], int]:
    value, end = _read_json(text, position)
    if not isinstance(value, dict):
        raise BrokenBlock(f"the arguments are no JSON object but {type(value).__name__}")
    return value, end


def _expect(pattern: str | re.Pattern[str], text: str, position: int, what: str) -> re.Match[str]:
    match = re.compile(pattern).match(text, position)
    if match is None:
        raise BrokenBlock(f"expected {what}, got {text[position : position + 20]!r}")
    return match


def _read_hermes(match: re.Match[str], parameters: Parameters) -> tuple[list[ToolCall], int]:
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`; a `<function=` inside is read as Qwen 3 Coder's XML."""
    text = match.string
    if text.startswith("<function=", match.end()):
        return _read_function(match, parameters)
    value, end = _read_json(text, match.end())
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or not name:
        raise BrokenBlock('the call has no "name"')
    arguments = value.get("arguments")
    if isinstance(arguments, str) and arguments.strip():
        arguments, stop = _read_object(arguments, 0)
        if value["arguments"][stop:].strip():
            raise BrokenBlock('"arguments" is a text that is more than one JSON object')
    if arguments is not None and arguments != "" and not isinstance(arguments, dict):
        raise BrokenBlock(f'"arguments" is no JSON object but {type(arguments).__name__}')
    return [_call(name, arguments or {})], _expect(r"\s*</tool_call>", text, end, "</tool_call>").end()


_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>(?=\s*(?:<parameter=|</function>))", re.DOTALL)


def _read_function(match: re.Match[str], parameters: Parameters) -> tuple[list[ToolCall], int]:
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter>…</function></tool_call>`, of which Qwen may leave the outer tags out.

    One line break after a parameter's opening tag and one before its closing tag belong to the tags.
    """
    text = match.string
    head = _expect(r"<function=([^>\n]+)>", text, match.end(), "<function=NAME>")
    name, position = head[1].strip(), head.end()
    properties = parameters.get(name, {}).get("properties", {})
    pairs = []
    while parameter := _PARAMETER.match(text, position):
        key = parameter[1].strip()
        pairs.append((key, _typed(parameter[2], properties.get(key, {}).get("type"))))
        position = parameter.end()
    end = _expect(r"\s*</function>", text, position, "<parameter=KEY>…</parameter> or </function>").end()
    if match[0].startswith("<tool_call>"):
        end = _expect(r"\s*</tool_call>", text, end, "</tool_call>").end()
    return [_call(name, _unique(pairs))], end


def _typed(value: str, declared: Any) -> Any:
    """A text as the type its tool declares; undeclared, as JSON where it is JSON. Qwen writes Python's True, False and None."""
    if declared == "string":
        return value
    if declared is not None and value in ("True", "False", "None"):
        return {"True": True, "False": False, "None": None}[value]
    try:
        parsed, end = _read_json(value, 0)
    except BrokenBlock:
        return value
    return parsed if end == len(value) else value


_ACTION_BRACKETS = re.compile(r"[ \t]*([\w./-]+)[ \t]*\[(.*)\][ \t]*$", re.MULTILINE)
_ACTION_INPUT = re.compile(r"[ \t]*(\S[^\n]*?)[ \t]*\n[ \t]*Action Input[ \t]*:\s*")


def _read_react(match: re.Match[str], parameters: Parameters) -> tuple[list[ToolCall], int]:
    """`Action: NAME`, then `Action Input: {…}`; or `Action: NAME[TEXT]`, argument `input` (https://arxiv.org/abs/2210.03629)."""
    text = match.string
    if brackets := _ACTION_BRACKETS.match(text, match.end()):
        return [_call(brackets[1], {"input": brackets[2]})], brackets.end()
    head = _expect(_ACTION_INPUT, text, match.end(), "NAME, then a line 'Action Input: {…}'")
    arguments, end = _read_object(text, head.end())
    return [_call(head[1], arguments)], _expect(r"[ \t]*(?=\n|\Z)", text, end, "the end of the line").end()


_MARKUP = re.compile(
    "think|answer|tool_call|tool_response|tool_result|tools?|function|parameters?|system|user|assistant|messages?|content|response|output|role|"
    "reasoning_content|html|head|body|p|a|b|i|u|em|strong|div|span|pre|code|[bhdt]r|[uod]l|li|h[1-6]|t(able|head|body|[dh])|d[td]|img|video|"
    "audio|svg|details|summary|section|article|nav|header|footer|form|button|label"
)
"""Tags of chats and of HTML, which are no tools unless `tools` says so."""


def _read_cline(match: re.Match[str], parameters: Parameters) -> tuple[list[ToolCall], int] | None:
    """`<NAME><KEY>VALUE</KEY>…</NAME>`, values being texts; one line break next to a value's tags belongs to the tags.

    A tag is a block where `tools` has it (any tag outside HTML's and the chat's without tools) and another tag follows it directly.
    """
    text, name = match.string, match[1]
    known = name in parameters if parameters else not _MARKUP.fullmatch(name)
    following = re.compile(rf"\s*<(?:[a-z][a-z0-9_]*>|/{name}>)").match(text, match.end())
    if not known or following is None or (not parameters and following[0].endswith(f"/{name}>")):
        return None
    element = re.compile(rf"\s*<([a-z][a-z0-9_]*)>\n?(.*?)\n?</\1>(?=\s*(?:<[a-z][a-z0-9_]*>|</{name}>))", re.DOTALL)
    pairs, position = [], match.end()
    while parameter := element.match(text, position):
        pairs.append((parameter[1], parameter[2]))
        position = parameter.end()
    end = _expect(rf"\s*</{name}>", text, position, f"<KEY>…</KEY> or </{name}>").end()
    return [_call(name, _unique(pairs))], end


_VCP_FIELD = re.compile(r"[\s,]*(\w+)\s*:\s*(?:「始ESCAPE」(.*?)「末ESCAPE」|「始」(.*?)「末」)", re.DOTALL)


def _read_vcp(match: re.Match[str], parameters: Parameters) -> tuple[list[ToolCall], int]:
    """`<<<[TOOL_REQUEST]>>>`, fields `KEY:「始」VALUE「末」`, `<<<[END_TOOL_REQUEST]>>>`; `tool_name` is the tool, values are texts."""
    text, pairs, position = match.string, [], match.end()
    while field := _VCP_FIELD.match(text, position):
        pairs.append((field[1], field[3] if field[2] is None else field[2]))
        position = field.end()
    end = _expect(r"[\s,]*<<<\[END_TOOL_REQUEST\]>>>", text, position, "KEY:「始」VALUE「末」 or <<<[END_TOOL_REQUEST]>>>").end()
    arguments = _unique(pairs)
    name = arguments.pop("tool_name", "").strip()
    if not name:
        raise BrokenBlock("the block has no tool_name")
    return [_call(name, arguments)], end


_DEEPSEEK_CALL = re.compile(r"\s*<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>([^\n]+)\n```json\n|(.+?)<｜tool▁sep｜>)")


def _read_deepseek(match: re.Match[str], parameters: Parameters) -> tuple[list[ToolCall], int]:
    """DeepSeek V3 and R1 (a type, the name, and JSON in a code fence), or V3.1 (the name and JSON), one or more calls.

    The closing marker of the list may be missing: V3's chat template writes none after a single call.
    """
    text, position, calls = match.string, match.end(), []
    while head := _DEEPSEEK_CALL.match(text, position):
        arguments, end = _read_object(text, head.end())
        fence = r"\n```" if head[1] else ""
        position = _expect(rf"\s*{fence}<｜tool▁call▁end｜>", text, end, "<｜tool▁call▁end｜>").end()
        calls.append(_call(head[1] or head[2], arguments))
    if not calls:
        raise BrokenBlock("expected <｜tool▁call▁begin｜>NAME<｜tool▁sep｜>")
    closing = _expect(r"\s*<｜tool▁calls▁end｜>|(?!\s*<｜tool▁call▁begin｜>)", text, position, "<｜tool▁call▁begin｜>NAME<｜tool▁sep｜>")
    return calls, closing.end()


_DSML_INVOKE = re.compile(r'\s*<｜DSML｜invoke name="([^"\n]+)">')
_DSML_PARAMETER = re.compile(
    r'\s*<｜DSML｜parameter name="(.*?)" string="(true|false)">(.*?)</｜DSML｜parameter>(?=\s*</?｜DSML｜)', re.DOTALL
)


def _read_dsml(match: re.Match[str], parameters: Parameters) -> tuple[list[ToolCall], int]:
    """DeepSeek V3.2 (`function_calls`) and V4 (`tool_calls`): invocations whose parameters say whether they are text or JSON."""
    text, position, calls = match.string, match.end(), []
    while head := _DSML_INVOKE.match(text, position):
        pairs, position = [], head.end()
        while parameter := _DSML_PARAMETER.match(text, position):
            key, is_text, value = parameter.groups()
            if is_text == "false":
                value, end = _read_json(parameter[3], 0)
                if parameter[3][end:].strip():
                    raise BrokenBlock(f"parameter {key!r} is more than one JSON value")
            pairs.append((key, value))
            position = parameter.end()
        position = _expect(r"\s*</｜DSML｜invoke>", text, position, "a parameter or </｜DSML｜invoke>").end()
        calls.append(_call(head[1], _unique(pairs)))
    end = _expect(rf"\s*</｜DSML｜{match[1]}>", text, position, f"<｜DSML｜invoke name=…> or </｜DSML｜{match[1]}>").end()
    if not calls:
        raise BrokenBlock("the block makes no call")
    return calls, end


STYLES: dict[str, Style] = {
    "hermes_qwen": Style(opening=re.compile(r"<tool_call>\s*"), read=_read_hermes),
    "qwen3_coder": Style(opening=re.compile(r"<tool_call>\s*|(?<!<tool_call>)(?<!<tool_call>\n)(?=<function=)"), read=_read_function),
    "deepseek": Style(opening=re.compile(r"<｜tool▁calls▁begin｜>"), read=_read_deepseek),
    "dsml": Style(opening=re.compile(r"<｜DSML｜(tool_calls|function_calls)>"), read=_read_dsml),
    "vcp": Style(opening=re.compile(r"<<<\[TOOL_REQUEST\]>>>"), read=_read_vcp),
    "react": Style(opening=re.compile(r"^[ \t]*Action[ \t]*:", re.MULTILINE), read=_read_react),
    "cline": Style(opening=re.compile(r"<([a-z][a-z0-9_]*)>"), read=_read_cline),
}
"""Wire formats by name, those with the plainest markers first (`detect_style` asks in this order)."""
