"""Which characters of a rendered conversation belong to which turn."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from twinkle_core.errors import DataError
from twinkle_core.template.chat_template import ChatTemplate
from twinkle_core.template.layout import Layout, Render, lay_out
from twinkle_core.template.marks import STEM, Marked, mark, match
from twinkle_core.template.outcome import Span
from twinkle_core.template.prefixes import span_by_prefixes
from twinkle_core.template.stops import StopMarks

CACHED_LAYOUTS = 512

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Rendered:
    """One conversation as text, and its turns in it."""

    text: str
    turns: dict[int, list[Span]]
    """Characters of each turn asked for, stop mark included, by message number; none of a turn that the template does not show."""
    unprinted_tools: bool
    head: int = 0
    """So many characters at its start are the same in all conversations of this shape."""


class SpanFinder:
    """Renders conversations of one chat template and finds their turns. Three ways, the next where one fails:

    1. One rendering. The layout of the conversation's shape (roles, keys, think tags, tools) is kept, and the rendering must read
       literal, text, literal, … to its end.
    2. A layout of this conversation alone, whose other texts stay: for templates that look into what users write.
    3. The conversation rendered up to each turn: for templates that rewrite texts.
    """

    def __init__(self, template: ChatTemplate, stops: StopMarks) -> None:
        self.template = template
        self.stops = stops
        self._layouts: dict[tuple[Any, ...], Layout | None] = {}
        self._stop_in_block = template.tagged and _stop_in_block(template, stops)

    def __reduce__(self) -> tuple[Any, ...]:
        return SpanFinder, (self.template, self.stops)

    def find(self, messages: Messages, tools: Any, wanted: Mapping[int, float]) -> Rendered:
        """The conversation with the turns in `wanted`, which gives their weights.

        Raises `DataError` where the template refuses it, a turn cannot be told apart, or no assistant turn is followed by a stop mark (the
        model would not learn to stop).
        """
        if self.template.tagged:
            text, blocks = self.template.render_tagged(messages, tools)
            if blocks is not None:
                return self._tagged(messages, tools, text, blocks, wanted)
        else:
            text = self.template.render(messages, tools)
        found = self._by_layout(messages, tools, text, wanted)
        if found is None:
            return self._by_prefixes(messages, tools, text, wanted)
        layout, spans, unprinted = found
        turns = {number: [spans[number]] for number in wanted if number in spans}
        if turns and not layout.stopped and any(messages[number]["role"] == "assistant" for number in turns):
            raise _no_stop(text, turns)
        return Rendered(text, turns, unprinted, len(layout.literals[0]))

    def _by_layout(
        self, messages: Messages, tools: Any, text: str, wanted: Mapping[int, float]
    ) -> tuple[Layout, dict[int, Span], bool] | None:
        marked = mark(messages, STEM)
        layout = self._kept_layout(marked, tools)
        places = _places(layout, marked, text)
        if layout is None or places is None:
            stem = STEM
            while stem in text:
                stem += "K"
            marked = mark(messages, stem, wanted.__contains__)
            layout = lay_out(marked, stem, self._render(tools), self.stops)
            places = _places(layout, marked, text)
            if layout is None or places is None:
                return None
            return layout, layout.spans(places, wanted), not layout.calls_printed or self._leaves_tools_out(messages, tools, text)
        unprinted = not layout.calls_printed
        if tools and not unprinted:
            without = self._kept_layout(marked, None)
            unprinted = without is not None and without.literals == layout.literals
        return layout, layout.spans(places, wanted), unprinted

    def _kept_layout(self, marked: Marked, tools: Any) -> Layout | None:
        key = marked.shape if not tools else (*marked.shape, repr(tools))
        try:
            return self._layouts[key]
        except KeyError:
            pass
        layout = lay_out(marked, STEM, self._render(tools), self.stops)
        if len(self._layouts) >= CACHED_LAYOUTS:
            del self._layouts[next(iter(self._layouts))]
        self._layouts[key] = layout
        return layout

    def _by_prefixes(self, messages: Messages, tools: Any, text: str, wanted: Mapping[int, float]) -> Rendered:
        turns: dict[int, list[Span]] = {}
        any_stopped = False
        for number in wanted:
            if messages[number]["role"] != "assistant":
                raise _cannot_place(number, messages[number]["role"])
            found = span_by_prefixes(messages, number, text, self._render(tools), self.stops)
            if found is not None:
                turns[number] = [found[0]]
                any_stopped |= found[1]
        if turns and not any_stopped:
            raise _no_stop(text, turns)
        return Rendered(text, turns, self._leaves_tools_out(messages, tools, text))

    def _tagged(self, messages: Messages, tools: Any, text: str, blocks: list[Span], wanted: Mapping[int, float]) -> Rendered:
        """Turns of a template with {% generation %} tags: its blocks, each with the stop mark after it."""
        spans = [(start, end if self._stop_in_block else self.stops.end_after(text, end) or end) for start, end in blocks]
        if (0, len(text)) in spans and any(message["role"] != "assistant" for message in messages):
            raise DataError(
                "the {% generation %} tags of the chat template mark the whole conversation, prompts included, as the assistant's"
            )
        if spans and not any(self.stops.ends(text[start:end]) for start, end in spans):
            raise _no_stop(text, {0: spans})
        answers = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
        turns = {number: [span] for number, span in zip(answers, spans, strict=False)} if len(spans) == len(answers) else {}
        if not turns and set(wanted) == set(answers) and len(set(wanted.values())) == 1:
            turns = {number: spans if number == answers[0] else [] for number in answers}
        if not turns.keys() >= set(wanted):
            turns |= self._placed(messages, tools, text, spans, set(wanted) - turns.keys())
        for number in answers:
            written = "".join(text[start:end] for start, end in turns.get(number, []))
            if any(call["function"]["name"] not in written for call in messages[number].get("tool_calls") or []):
                turns[number] = []  # calls that are not printed: what is left of the turn says nothing, and is not to be learnt
        shown = {number: [span for span in turns[number] if span[0] < span[1]] for number in wanted}
        return Rendered(text, shown, self._leaves_tools_out(messages, tools, text))

    def _placed(self, messages: Messages, tools: Any, text: str, blocks: list[Span], wanted: set[int]) -> dict[int, list[Span]]:
        """Which of a tagged template's blocks are in which turn, and where other turns are."""
        found = self._by_layout(messages, tools, text, dict.fromkeys(wanted, 1.0))
        if found is None:
            number = min(wanted)
            raise _cannot_place(number, messages[number]["role"])
        turns: dict[int, list[Span]] = {number: [] for number in wanted}
        for number, (start, end) in found[1].items():
            answers = messages[number]["role"] == "assistant"
            turns[number] = [block for block in blocks if block[0] < end and block[1] > start] if answers else [(start, end)]
        return turns

    def _render(self, tools: Any) -> Render:
        def render(messages: Messages, add_generation_prompt: bool) -> str:
            return self.template.render(messages, tools, add_generation_prompt=add_generation_prompt)

        return render

    def _leaves_tools_out(self, messages: Messages, tools: Any, text: str) -> bool:
        """Whether the rendering is the same without the conversation's tools, or without its tool calls."""
        if tools and self.template.render(messages, None) == text:
            return True
        if not any(message.get("tool_calls") for message in messages):
            return False
        without = [{key: value for key, value in message.items() if key != "tool_calls"} for message in messages]
        try:
            return self.template.render(without, tools) == text
        except DataError:
            return False


def _stop_in_block(template: ChatTemplate, stops: StopMarks) -> bool:
    """Whether a turn's last {% generation %} block holds the stop mark, seen from the shortest conversation."""
    try:
        text, blocks = template.render_tagged([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}], None)
    except DataError:
        return False
    return stops.ends(text[slice(*blocks[-1])]) if blocks else False


def _places(layout: Layout | None, marked: Marked, text: str) -> list[Span] | None:
    if layout is None:
        return None
    return match(layout.literals, [marked.texts[shown] for shown in layout.shown], text)


def _no_stop(text: str, turns: Mapping[int, Sequence[Span]]) -> DataError:
    end = max(span[1] for spans in turns.values() for span in spans)
    return DataError(
        f"the chat template puts no special token after an assistant turn (but {text[end:][:20]!r}), so the model would not learn to "
        "stop; end assistant turns with eos_token in the template"
    )


def _cannot_place(number: int, role: str) -> DataError:
    return DataError(
        f"the chat template rewrites texts, so the tokens of turn {number + 1} ({role}) cannot be told apart from others; learn the "
        "assistant's turns without loss_weight, or use a template that prints texts as they are"
    )
