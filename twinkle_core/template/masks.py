"""Which characters of a rendered conversation the model is to learn. Pure: strings in, character spans out.

The conversation is rendered once more with each assistant text replaced by a mark (a sentinel). What stands between the
marks is literal text of the template, and matching it in the true rendering gives the places of the answers: two
renderings, however many turns. A turn with tool calls, or a template that rewrites content, is placed by rendering the
conversation up to the turn's start and end (one pair of renderings per such turn).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from twinkle_core.errors import DataError
from twinkle_core.types import Message

Render = Callable[[Sequence[Message], bool], str]
"""(messages, add_generation_prompt) -> text; raises `DataError` where the template refuses."""

Span = tuple[int, int]

_THINK_TAGS = re.compile(r"(\s*</?think>\s*)")

_STRIPS: tuple[Callable[[str], str], ...] = (
    str.strip,
    str.rstrip,
    str.lstrip,
    lambda text: text.strip("\n"),
    lambda text: text.rstrip("\n"),
    lambda text: text.lstrip("\n"),
)
"""What templates do to the ends of a content."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StopMarks:
    """Texts of the tokens that end a turn: the special tokens of the tokenizer."""

    texts: tuple[str, ...]
    eos: str = ""
    """The one that ends a turn with tool calls, where no rendering shows its end."""
    _pattern: re.Pattern[str] = field(init=False)

    def __post_init__(self) -> None:
        longest_first = sorted(filter(None, self.texts), key=len, reverse=True)
        pattern = rf" *(?:{'|'.join(map(re.escape, longest_first))})" if longest_first else r"(?!)"
        object.__setattr__(self, "_pattern", re.compile(pattern))

    def end_after(self, text: str, position: int) -> int | None:
        """Where the stop mark that opens at `position` ends (blanks before it belong to it, as in Llama 2); None without one."""
        match = self._pattern.match(text, position)
        return match.end() if match else None

    def last_end(self, text: str, start: int, end: int) -> int | None:
        """Where the last stop mark in `text[start:end]` ends."""
        return max((match.end() for match in self._pattern.finditer(text, start, end)), default=None)


def assistant_spans(
    messages: Sequence[Message], text: str, render: Render, stops: StopMarks, *, last_turn_only: bool = False
) -> list[Span]:
    """Character spans of `text`, the full rendering of `messages`, that the assistant wrote, with the stop mark after each.

    In order and apart. A turn that the template leaves out of the rendering, or whose tool calls it does not print,
    has no span. Raises `DataError` naming the template where no way of placing a turn works, or where no turn is followed
    by a stop mark (the model would not learn to stop).
    """
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    turns = turns[-1:] if last_turn_only else turns
    prompt = generation_prompt(messages, text, render)
    matched = _spans_by_sentinels(messages, text, render, prompt)
    spans, stopped = [], False
    for turn in turns:
        span = None
        if matched is None or messages[turn].get("tool_calls"):
            start, end = _span_of_calls(messages, turn, text, render, stops, (matched or {}).get(turn))
            if any(name not in text[start:end] for name in call_names(messages[turn])):
                continue  # the template prints no tool calls: what is left of the turn says nothing, and is not to be learnt
            last = stops.last_end(text, start, end)
            stopped |= last is not None
            span = (start, last if last is not None and not text[last:end].strip() else end)
        elif turn in matched:
            start, end = matched[turn]
            after = stops.end_after(text, end)
            stopped |= after is not None
            span = (start, end if after is None else after)
        if span is not None and span[0] < span[1]:
            spans.append(span)
    if spans and not stopped:
        raise DataError(
            f"the chat template puts no special token after an assistant turn (but {text[spans[-1][1] :][:20]!r}), so the model "
            "would not learn to stop; end assistant turns with eos_token in the template"
        )
    return spans


def call_names(message: Message) -> list[str]:
    """Names of the functions that the message calls."""
    return [call["function"]["name"] for call in message.get("tool_calls") or []]


def generation_prompt(messages: Sequence[Message], text: str, render: Render) -> str:
    """What the template writes before an answer, e.g. '<|im_start|>assistant\\n'; '' where it writes nothing."""
    prompted = render(messages, True)
    return prompted[len(text) :] if prompted.startswith(text) else ""


def start_of_turn(messages: Sequence[Message], turn: int, text: str, render: Render) -> int:
    """Where the answer of message `turn` starts in `text`. Raises `DataError` where the prompt before it is no prefix of `text`."""
    if turn == 0:
        raise DataError(
            "the first turn is an assistant turn with tool calls or rewritten content: no prompt stands before it to place it by"
        )
    prompt = render(messages[:turn], True)
    if not text.startswith(prompt):
        raise DataError(
            f"the chat template renders the turns before turn {turn + 1} differently once that turn is there, so its tokens cannot be told "
            f"apart (texts part at {_parting(prompt, text)}); use a template with {{% generation %}} tags, or learn='last_turn'"
        )
    return len(prompt)


def _span_by_prefixes(messages: Sequence[Message], turn: int, text: str, render: Render) -> Span:
    start = start_of_turn(messages, turn, text, render)
    upto = text if turn == len(messages) - 1 else render(messages[: turn + 1], False)
    if not text.startswith(upto):
        raise DataError(
            f"the chat template renders turn {turn + 1} differently once later turns follow (texts part at {_parting(upto, text)}), so its "
            "tokens cannot be told apart; use a template with {% generation %} tags, or learn='last_turn'"
        )
    return start, len(upto)


def _span_of_calls(messages: Sequence[Message], turn: int, text: str, render: Render, stops: StopMarks, matched: Span | None) -> Span:
    """By prefixes; where the template looks at later turns (Qwen 3), from the matched start to the first eos token after the last call."""
    try:
        return _span_by_prefixes(messages, turn, text, render)
    except DataError:
        end = text.find(stops.eos, matched[1]) if matched and stops.eos else -1
        if matched is None or end < 0:
            raise
        return matched[0], end + len(stops.eos)


def _parting(one: str, other: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    return f"{one[at : at + 20]!r} and {other[at : at + 20]!r}"


def _spans_by_sentinels(messages: Sequence[Message], text: str, render: Render, prompt: str) -> dict[int, Span] | None:
    """Span of each assistant turn that shows in `text`, by message number; None where the literals do not match."""
    marked, pieces = _mark(messages, text)
    try:
        rendering = render(marked, False)
    except DataError:
        return None  # a template that looks into the content
    places = sorted((match.start(), int(match[1])) for match in _mark_pattern(text).finditer(rendering))
    shown = [piece for _, piece in places]
    if len(set(shown)) != len(shown):
        return None  # printed twice: which of the two the model writes is not known
    literals = _mark_pattern(text).split(rendering)[::2]
    gaps = _match(literals, [pieces[piece][1] for piece in shown], text)
    if gaps is None:
        return None
    spans: dict[int, Span] = {}
    for number, (piece, (start, end)) in enumerate(zip(shown, gaps, strict=True)):
        turn = pieces[piece][0]
        if turn in spans:
            spans[turn] = (spans[turn][0], end)
            continue
        literal = literals[number]
        at = literal.rfind(prompt) if prompt else -1
        opened_by = len(literal) if at < 0 else at + len(prompt)  # what the template adds after the prompt is the answer's
        spans[turn] = (start - (len(literal) - opened_by), end)
    return spans


def _mark_stem(text: str) -> str:
    stem = "MARK"
    while stem in text:
        stem += "K"
    return stem


def _mark_pattern(text: str) -> re.Pattern[str]:
    return re.compile(rf"{_mark_stem(text)}x(\d+)x")


def _mark(messages: Sequence[Message], text: str) -> tuple[list[Message], list[tuple[int, str]]]:
    """The conversation with marks for the assistant's texts, and (message number, text) of each mark.

    Tags <think> and </think> stay, with the white space around them: templates look for them and cut there.
    """
    stem, pieces = _mark_stem(text), []

    def mark(turn: int, piece: str) -> str:
        pieces.append((turn, piece))
        return f"{stem}x{len(pieces) - 1}x"

    def mark_content(turn: int, content: str) -> str:
        parts = _THINK_TAGS.split(content)
        last = len(parts) - 1
        return "".join(part if i % 2 or (not part and i < last) else mark(turn, part) for i, part in enumerate(parts))

    marked: list[Message] = []
    for turn, message in enumerate(messages):
        if message["role"] != "assistant":
            marked.append(message)
            continue
        changed: dict[str, Any] = {**message}
        calls = message.get("tool_calls")
        if message.get("reasoning_content"):
            changed["reasoning_content"] = mark(turn, message["reasoning_content"])
        if message["content"] or not calls:  # templates set calls apart from content, where there is any
            changed["content"] = mark_content(turn, message["content"])
        if calls:
            changed["tool_calls"] = [
                {**call, "function": {**call["function"], "name": mark(turn, call["function"]["name"])}} for call in calls
            ]
        marked.append(changed)  # type: ignore[arg-type]
    return marked, pieces


def _match(literals: list[str], contents: list[str], text: str) -> list[Span] | None:
    """Places of `contents` in `text`, which must read literal, content, literal, …, literal. A content may have its ends stripped."""
    if not text.startswith(literals[0]):
        return None
    position, gaps = len(literals[0]), []
    for content, literal in zip(contents, literals[1:], strict=True):
        forms = [content, *(strip(content) for strip in _STRIPS)]
        form = next((form for form in forms if text.startswith(form + literal, position)), None)
        if form is None:
            return None
        gaps.append((position, position + len(form)))
        position += len(form) + len(literal)
    return gaps if position == len(text) else None
