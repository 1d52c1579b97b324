"""A chat template, rendered as transformers renders it, without importing transformers.

The environment is that of `transformers.utils.chat_template_utils`
(https://github.com/huggingface/transformers/blob/v5.19.0/src/transformers/utils/chat_template_utils.py): immutable sandbox, blocks
trimmed, loop controls, its `tojson`, `raise_exception` and `{% generation %}`. `strftime_now` gives the fixed day 26 Jul 2024
(the default of Llama 3's template), so that rendering is a pure function.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from twinkle_core.errors import ConfigError, DataError
from twinkle_core.template.outcome import Span

_GENERATION_TAG = re.compile(r"\{%-?\s*generation\s*-?%\}")
_FAULTS = (TemplateError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError)
"""What a template raises for a conversation that it was not written for."""


class ChatTemplate:
    """One Jinja chat template with the variables that every rendering gets (special tokens, `enable_thinking`). Pickles."""

    def __init__(self, source: str, variables: Mapping[str, Any]) -> None:
        """Raises `ConfigError` where `source` is not valid Jinja."""
        self.source = source
        self.variables = dict(variables)
        self.tagged = _GENERATION_TAG.search(source) is not None
        """Whether the template marks what the assistant wrote."""
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTags, loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_fixed_date)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise ConfigError(f"the chat template is not valid Jinja: line {error.lineno}: {error.message}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return ChatTemplate, (self.source, self.variables)

    def render(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, *, add_generation_prompt: bool = False) -> str:
        """The conversation as text. Raises `DataError` where the template refuses it."""
        return "".join(self._pieces(messages, tools, add_generation_prompt, None))

    def render_tagged(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None) -> tuple[str, list[Span] | None]:
        """The text, and the spans of it inside {% generation %}, empty ones too; None where a block stands elsewhere."""
        blocks = _Blocks()
        text = "".join(self._pieces(messages, tools, False, blocks))
        if any(text[start : start + len(block)] != block for start, block in blocks.found):
            return text, None  # the block was rendered into a variable, and printed elsewhere
        return text, [(start, start + len(block)) for start, block in blocks.found]

    def _pieces(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Any] | None, add_generation_prompt: bool, blocks: _Blocks | None
    ) -> list[str]:
        given = {"messages": messages, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
        context = self._template.new_context({**given, **self.variables, _BLOCKS: blocks})
        try:
            if blocks is None:
                return list(self._template.root_render_func(context))
            for piece in self._template.root_render_func(context):
                blocks.append(piece)
            return blocks.pieces
        except _FAULTS as error:
            raise DataError(f"the chat template refuses the conversation: {error}") from error


_BLOCKS = "_generation_blocks"


class _Blocks:
    """What is rendered so far, and the {% generation %} blocks of it."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.length = 0
        self.found: list[tuple[int, str]] = []

    def append(self, piece: str) -> None:
        self.pieces.append(piece)
        self.length += len(piece)


class _GenerationTags(Extension):
    """{% generation %} … {% endgeneration %}: notes where its body was rendered."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = self.call_method("_render_block", [nodes.ContextReference()])
        return nodes.CallBlock(call, [], [], body).set_lineno(line)

    def _render_block(self, context: Any, caller: Macro) -> str:
        block = str(caller())
        blocks = context.get(_BLOCKS)
        if blocks is not None:
            blocks.found.append((blocks.length, block))
        return block


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:  # its arguments are what templates may say
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _fixed_date(form: str) -> str:
    return datetime(2024, 7, 26).strftime(form)
