"""Where a chat template puts the turns of a conversation, seen from one rendering with marks. Pure: strings in, values out."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle_core.errors import DataError
from twinkle_core.template.marks import Marked
from twinkle_core.template.outcome import Span
from twinkle_core.template.stops import StopMarks

Render = Callable[[Sequence[Mapping[str, Any]], bool], str]
"""(messages, add_generation_prompt) -> text; raises `DataError` where the template refuses."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One message in a layout: from `back` characters before its first mark to `ahead` characters after its last."""

    first: int
    """Position of its first mark among the shown ones."""
    last: int
    back: int
    ahead: int
    stopped: bool
    """It is the assistant's, and ends with a stop mark."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The literal texts between the marks that a template shows, and the turns among them."""

    literals: list[str]
    shown: list[int]
    """The marks between the literals."""
    turns: dict[int, Turn]
    """By message number; without those that the template does not show, and turns whose tool calls it does not print."""
    calls_printed: bool
    """Every tool call of the conversation is printed."""
    stopped: bool
    """Some turn of the assistant ends with a stop mark."""

    def spans(self, places: Sequence[Span], wanted: Iterable[int]) -> dict[int, Span]:
        """Characters of each wanted turn, stop mark included; `places` of the shown marks come from `marks.match`."""
        turns = self.turns
        return {
            number: (places[turn.first][0] - turn.back, places[turn.last][1] + turn.ahead)
            for number in wanted
            if (turn := turns.get(number)) is not None
        }


def lay_out(marked: Marked, stem: str, render: Render, stops: StopMarks) -> Layout | None:
    """The layout of the marked conversation; None where its marks do not show what stands where."""
    try:
        text = render(marked.messages, False)
    except DataError:
        return None  # a template that looks into the texts
    parts = re.split(rf"{stem}x(\d+)x", text)
    literals, shown = parts[::2], [int(part) for part in parts[1::2]]
    if any(mark >= len(marked.texts) for mark in shown):
        return None
    silent = {marked.owners[name] for name in set(marked.names) - set(shown)}
    ends: dict[int, tuple[int, int, int]] = {}
    seen: set[int] = set()
    for position, mark in enumerate(shown):
        if mark in seen:
            if mark not in marked.names:
                return None  # printed twice: which of the two the model writes is not known
            continue  # gpt-oss writes the name of the called function before its result, too
        seen.add(mark)
        first, _, count = ends.get(marked.owners[mark], (position, 0, 0))
        ends[marked.owners[mark]] = (first, position, count + 1)
    prompt, head = _opening(marked.messages, text, literals, ends, render)
    builder = _Builder(marked, stem, text, literals, shown, render, stops)
    turns: dict[int, Turn] = {}
    for number, (first, last, count) in ends.items():
        answers = marked.messages[number]["role"] == "assistant"
        if last - first + 1 != count:
            if answers:
                return None
            continue  # texts of others between its own: it has no one place
        if not answers:
            turns[number] = Turn(first, last, 0, stops.end_after(literals[last + 1], 0) or 0, False)
        elif number not in silent:
            back = _opened_before(literals[first], prompt, head, stops)
            ahead, stopped = builder.end_of_turn(number, last)
            turns[number] = Turn(first, last, back, ahead, stopped)
    return Layout(literals, shown, turns, not silent, any(turn.stopped for turn in turns.values()))


def _opening(
    messages: Sequence[Mapping[str, Any]], text: str, literals: Sequence[str], ends: Mapping[int, tuple[int, int, int]], render: Render
) -> tuple[str, str]:
    """The generation prompt, e.g. '<|im_start|>assistant\\n'; where the template has none, '' and the blanks before an answer (Llama 2).

    Asked of the whole conversation, and of what stands before its last answer, for templates that give no prompt after an answer.
    """
    answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    head = ""
    for end in (len(messages), *answers[-1:]):
        try:
            before, prompted = (text if end == len(messages) else render(messages[:end], False)), render(messages[:end], True)
        except DataError:
            continue
        if prompted.startswith(before) and len(prompted) > len(before):
            return prompted[len(before) :], ""
        if end in ends and text.startswith(before):
            literal = literals[ends[end][0]]
            blanks = literal[len(literal.rstrip()) :]
            head = blanks if text.startswith(blanks, len(before)) else ""
    return "", head


def _opened_before(literal: str, prompt: str, head: str, stops: StopMarks) -> int:
    """Characters at the end of `literal` that are the answer's: what the template adds after the generation prompt."""
    if not prompt:
        return len(head) if literal.endswith(head) else 0
    for opening in (prompt, prompt.partition("<think>")[0]):  # a prompt may open thoughts that earlier turns do not have
        at = literal.rfind(opening) if opening else -1
        if at >= 0:
            added = literal[at + len(opening) :]
            return 0 if stops.eos and stops.eos in added else len(added)
    return 0


@dataclass(frozen=True, slots=True)
class _Builder:
    """What is looked at to see where turns end."""

    marked: Marked
    stem: str
    text: str
    literals: list[str]
    shown: list[int]
    render: Render
    stops: StopMarks

    def end_of_turn(self, number: int, last: int) -> tuple[int, bool]:
        """How far the turn reaches into the literal after its last mark, and whether it ends with a stop mark.

        After a text, to the stop mark that follows. After tool calls, to the one eos token before the next turn's text; where there is
        none, or several, to the end of the conversation rendered up to this turn; where the template looks at later turns, to the first
        stop mark.
        """
        literal, stops = self.literals[last + 1], self.stops
        if not self.marked.messages[number].get("tool_calls"):
            end = stops.end_after(literal, 0)
            return (0, False) if end is None else (end, True)
        is_last = number == len(self.marked.messages) - 1
        followed = last + 1 < len(self.shown) and self.marked.owners[self.shown[last + 1]] == number + 1
        after_eos = literal.find(stops.eos) + len(stops.eos) if stops.eos and stops.eos in literal else None
        if after_eos is not None and literal.count(stops.eos) == 1 and (is_last or followed):
            return after_eos, True
        region = self._written_after(number, last, is_last)
        if region is not None:
            end = stops.last_end(region)
            return (len(region), False) if end is None or region[end:].strip() else (end, True)
        end = after_eos or stops.first_end(literal)
        return (0, False) if end is None else (end, True)

    def _written_after(self, number: int, last: int, is_last: bool) -> str | None:
        """What the conversation up to this turn has after the turn's last mark; None where it is no start of the whole."""
        try:
            upto = self.text if is_last else self.render(self.marked.messages[: number + 1], False)
        except DataError:
            return None
        start = sum(map(len, self.literals[: last + 1])) + sum(len(f"{self.stem}x{mark}x") for mark in self.shown[: last + 1])
        return upto[start:] if self.text.startswith(upto) and len(upto) >= start else None
