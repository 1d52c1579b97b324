"""The slow way to place a turn: by rendering the conversation up to its start and up to its end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle_core.errors import DataError
from twinkle_core.template.layout import Render
from twinkle_core.template.outcome import Span
from twinkle_core.template.stops import StopMarks


def span_by_prefixes(
    messages: Sequence[Mapping[str, Any]], turn: int, text: str, render: Render, stops: StopMarks
) -> tuple[Span, bool] | None:
    """Characters of assistant turn `turn` in `text`, the whole rendering, and whether they end with a stop mark.

    None where the template does not print the turn's tool calls. Raises `DataError` where the template renders what stands before the
    turn, or the turn itself, differently once later turns follow.
    """
    start = _start(messages, turn, text, render)
    upto = text if turn == len(messages) - 1 else render(messages[: turn + 1], False)
    if not text.startswith(upto):
        raise DataError(
            f"the chat template renders turn {turn + 1} differently once later turns follow (texts part at {_parting(upto, text)}), so its "
            "tokens cannot be told apart; use a template with {% generation %} tags, or learn='last_turn'"
        )
    written = text[start : len(upto)]
    if any(call["function"]["name"] not in written for call in messages[turn].get("tool_calls") or []):
        return None
    end = stops.last_end(written)
    stopped = end is not None and not written[end:].strip()
    return (start, start + end if stopped and end is not None else len(upto)), stopped


def _start(messages: Sequence[Mapping[str, Any]], turn: int, text: str, render: Render) -> int:
    if turn == 0:
        raise DataError("the first turn is the assistant's and the template rewrites it: no prompt stands before it to place it by")
    prompt = render(messages[:turn], True)
    if not text.startswith(prompt):
        raise DataError(
            f"the chat template renders the turns before turn {turn + 1} differently once that turn is there, so its tokens cannot be told "
            f"apart (texts part at {_parting(prompt, text)}); use a template with {{% generation %}} tags, or learn='last_turn'"
        )
    return len(prompt)


def _parting(one: str, other: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return f"{one[at : at + 20]!r} and {other[at : at + 20]!r}"
