"""Tool calls that a model wrote as text -> calls in OpenAI's form. Pure: strings in, values out.

A *block* is what opens with a style's marker. It either reads as the style says, to its end, or it is broken and carries the
reason; a broken block is never taken for text without calls. The whole text is searched: cut a think block off before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle_core.errors import ConfigError, DataError
from twinkle_core.template.tool_call_styles import STYLES, BrokenBlock, ToolCall


@dataclass(frozen=True, kw_only=True, slots=True)
class ToolCallBlock:
    """`text[start:end]`, with the calls it makes."""

    start: int
    end: int
    """Of a broken block: where its opening marker ends."""
    calls: tuple[ToolCall, ...] = ()
    broken: str | None = None
    """Why it cannot be read; then it has no calls."""


def parse_tool_calls(text: str, style: str, *, tools: Sequence[Mapping[str, Any]] = (), strict: bool = True) -> list[ToolCall]:
    """The calls in `text`, in order; [] where no block opens.

    tools: the conversation's tools in OpenAI's form. Styles without types (`qwen3_coder`, `hermes_qwen` with XML inside) read a
    parameter that is declared a string as it stands, and others as JSON where they are JSON; `cline` takes only these tools' tags.

    Raises `DataError` for a broken block (`strict=False` leaves it out; `scan_tool_calls` tells why), `ConfigError` for an unknown style.
    """
    blocks = scan_tool_calls(text, style, tools=tools)
    for number, block in enumerate(blocks, start=1):
        if strict and block.broken is not None:
            raise DataError(
                f"tool call block {number} ({style}, at character {block.start}) is broken: {block.broken}; it starts "
                f"{text[block.start : block.start + 60]!r}; strict=False leaves broken blocks out"
            )
    return [call for block in blocks for call in block.calls]


def clean_tool_calls(text: str, style: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> str:
    """The text without the blocks that `parse_tool_calls` reads, and without white space at the end where one was cut.

    Broken blocks stay, so that nothing is lost between the two.
    """
    kept, position = [], 0
    for block in scan_tool_calls(text, style, tools=tools):
        if block.broken is None:
            kept.append(text[position : block.start])
            position = block.end
    return "".join([*kept, text[position:]]).rstrip() if kept else text


def scan_tool_calls(text: str, style: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> list[ToolCallBlock]:
    """Every block of `text`, broken ones too, in order and apart. Raises `ConfigError` for an unknown style."""
    if style not in STYLES:
        raise ConfigError(f"unknown tool call style {style!r}; known: {', '.join(STYLES)}")
    opening, read = STYLES[style].opening, STYLES[style].read
    parameters = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in tools}
    blocks, position = [], 0
    while match := opening.search(text, position):
        position = max(match.end(), match.start() + 1)
        try:
            found = read(match, parameters)
        except BrokenBlock as error:
            blocks.append(ToolCallBlock(start=match.start(), end=match.end(), broken=str(error)))
            continue
        if found is not None:
            calls, position = found
            blocks.append(ToolCallBlock(start=match.start(), end=position, calls=tuple(calls)))
    return blocks


def detect_style(text: str, *, tools: Sequence[Mapping[str, Any]] = ()) -> str | None:
    """The first of `STYLES` with a block in `text`, broken or not; None without any."""
    return next((style for style in STYLES if scan_tool_calls(text, style, tools=tools)), None)


__all__ = ["STYLES", "ToolCall", "ToolCallBlock", "clean_tool_calls", "detect_style", "parse_tool_calls", "scan_tool_calls"]
