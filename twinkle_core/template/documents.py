"""Trajectories -> the texts to tokenize, and the weight of each of their characters in the loss."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from twinkle_core.errors import DataError
from twinkle_core.template.message_form import MessageForm
from twinkle_core.template.spans import SpanFinder
from twinkle_core.types import DocumentKind, Trajectory, kind_of

Learn = Literal["assistant", "last_turn", "all"]


@dataclass(frozen=True, slots=True)
class Document:
    """One text to tokenize. A span is (first character, the one after the last, weight)."""

    text: str
    kind: DocumentKind = DocumentKind.PLAIN
    spans: Sequence[tuple[int, int, float]] = ()
    base: float = 0.0
    """Weight of what no span covers."""
    head: int = 0
    """So many characters at its start recur in other conversations."""
    plain: bool = False
    """Gets the tokenizer's own special tokens (a chat template writes its own), and the end of a text to learn."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The documents of one trajectory."""

    documents: tuple[Document, ...]
    unprinted_tools: bool = False


class Planner:
    """Plans trajectories for one tokenizer's chat templates."""

    def __init__(
        self, default: SpanFinder, tool_use: SpanFinder | None, form: MessageForm, learn: Learn, default_system: str | None
    ) -> None:
        self._default = default
        self._tool_use = tool_use
        self._form = form
        self._learn = learn
        self._default_system = default_system

    def plan(self, trajectory: Trajectory) -> Plan:
        """Raises `DataError` where the trajectory cannot be rendered, or its turns cannot be told apart."""
        kind = kind_of(trajectory)
        if kind == "text":
            return Plan((Document(trajectory["text"], base=1.0, plain=True),))
        if kind == "embedding":
            return Plan(_embedding(trajectory))
        if kind == "prompt":
            return self.plan_prompt(trajectory)
        _refuse_media(trajectory)
        if kind == "preference":
            return self._preference(trajectory)
        if kind == "judged":
            good = DocumentKind.DESIRABLE if trajectory["desirable"] else DocumentKind.UNDESIRABLE
            document, unprinted = self._conversation(trajectory, trajectory["messages"], good, "last_turn")
        else:
            document, unprinted = self._conversation(trajectory, trajectory["messages"], DocumentKind.PLAIN, self._learn)
        return Plan((document,), unprinted)

    def plan_prompt(self, trajectory: Trajectory) -> Plan:
        """All messages, to be answered. Raises `DataError` where they cannot be rendered, or are none."""
        _refuse_media(trajectory)
        if not trajectory["messages"]:
            raise DataError(f"a {kind_of(trajectory)} without messages cannot be answered")
        messages, tools = self._form.messages(self.messages(trajectory["messages"])), trajectory.get("tools")
        text = self._finder(tools).template.render(messages, tools, add_generation_prompt=True)
        return Plan((Document(text, DocumentKind.PROMPT),))

    def messages(self, messages: Sequence[Mapping[str, Any]]) -> Sequence[Mapping[str, Any]]:
        """With the default system message where there is none."""
        if self._default_system is None or any(message["role"] == "system" for message in messages):
            return messages
        return [{"role": "system", "content": self._default_system}, *messages]

    def formatted(self, messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The messages as the chat template gets them."""
        return self._form.messages(messages)

    def _finder(self, tools: Any) -> SpanFinder:
        return self._default if tools is None or self._tool_use is None else self._tool_use

    def _preference(self, trajectory: Trajectory) -> Plan:
        chosen, rejected = trajectory["messages"], trajectory["rejected_messages"]
        shared = next((i for i, (a, b) in enumerate(zip(chosen, rejected, strict=False)) if a != b), min(len(chosen), len(rejected)))
        if shared == len(chosen) or shared == len(rejected):
            raise DataError(f"nothing is preferred: the chosen and the rejected conversation agree in all {shared} turns of the shorter")
        one, unprinted = self._conversation(trajectory, chosen, DocumentKind.CHOSEN, "assistant", shared)
        other, also = self._conversation(trajectory, rejected, DocumentKind.REJECTED, "assistant", shared)
        return Plan((one, other), unprinted or also)

    def _conversation(
        self, trajectory: Trajectory, messages: Sequence[Mapping[str, Any]], kind: DocumentKind, learn: Learn, first: int = 0
    ) -> tuple[Document, bool]:
        """Only turns from message `first` on are learnt."""
        given = self.messages(messages)
        first += len(given) - len(messages)
        weights = _weights(given, learn, first)
        tools = trajectory.get("tools")
        rendered = self._finder(tools).find(self._form.messages(given), tools, weights)
        spans = [(start, end, weights[number]) for number in rendered.turns for start, end in rendered.turns[number]]
        base = 1.0 if learn == "all" else 0.0
        return Document(rendered.text, kind, spans, base, rendered.head), rendered.unprinted_tools


def _weights(messages: Sequence[Mapping[str, Any]], learn: Learn, first: int) -> dict[int, float]:
    """The turns whose place has to be known, with their weights: a turn's own, else what `learn` says."""
    weights: dict[int, float] = {}
    last = None
    for number, message in enumerate(messages):
        own = message.get("loss_weight")
        if own is not None:
            if isinstance(own, bool) or not isinstance(own, (int, float)) or not math.isfinite(own) or own < 0:
                raise DataError(f"turn {number + 1}: loss_weight is {own!r}; it must be a number of at least 0")
            if number >= first and (own or learn == "all"):
                weights[number] = float(own)
        if message["role"] == "assistant":
            last = number
            if own is None and number >= first and learn == "assistant":
                weights[number] = 1.0
    if learn == "last_turn" and last is not None and messages[last].get("loss_weight") is None:
        weights[last] = 1.0
    if learn == "all":
        return weights
    return dict(sorted(weights.items()))


def _embedding(trajectory: Trajectory) -> tuple[Document, ...]:
    pair = trajectory["embedding"]
    return (
        Document(pair["anchor"], DocumentKind.ANCHOR, plain=True),
        Document(pair["positive"], DocumentKind.POSITIVE, plain=True),
        *(Document(text, DocumentKind.NEGATIVE, plain=True) for text in pair.get("negatives", [])),
    )


def _refuse_media(trajectory: Trajectory) -> None:
    for key in ("images", "videos", "audios"):
        if trajectory.get(key):
            raise DataError(f"the conversation has {key}, which this template does not take: it encodes text only")
