"""Filters of whole trajectories. Each looks at all texts of one (`texts.all_text`) unless it says otherwise."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from math import isqrt

from twinkle_core.errors import ConfigError
from twinkle_core.preprocessor.base import DataFilter
from twinkle_core.preprocessor.texts import all_text, answers, words
from twinkle_core.types import Trajectory


class LengthFilter(DataFilter):
    """Keeps trajectories with a number of characters, and of turns, inside the bounds (both ends allowed).

    Of a preference pair both conversations count as characters and the chosen one as turns; a plain text has no turns.
    """

    def __init__(self, min_chars: int = 0, max_chars: int | None = None, min_turns: int = 0, max_turns: int | None = None) -> None:
        for name, low, high in (("chars", min_chars, max_chars), ("turns", min_turns, max_turns)):
            if low < 0 or (high is not None and high < low):
                raise ConfigError(f"LengthFilter: min_{name} {low} and max_{name} {high} leave nothing")
        self.min_chars, self.max_chars, self.min_turns, self.max_turns = min_chars, max_chars, min_turns, max_turns

    def __call__(self, trajectory: Trajectory) -> bool:
        chars, turns = len(all_text(trajectory)), len(trajectory["messages"])
        return _inside(chars, self.min_chars, self.max_chars) and _inside(turns, self.min_turns, self.max_turns)


class CharRepetitionFilter(DataFilter):
    """Leaves out texts made of few character n-grams over and over.

    The ratio is the share, among all n-grams of the text, of the sqrt(D) most frequent of its D different ones, those
    that occur once aside: the measure of ROOTS (https://arxiv.org/abs/2303.03915) and of data-juicer's
    character_repetition_filter (https://arxiv.org/abs/2309.02033).
    """

    def __init__(self, max_ratio: float = 0.5, n: int = 10) -> None:
        self.max_ratio, self.n = _ratio("CharRepetitionFilter", max_ratio), _size("CharRepetitionFilter", n)

    def __call__(self, trajectory: Trajectory) -> bool:
        text = all_text(trajectory)
        grams = [text[start : start + self.n] for start in range(len(text) - self.n + 1)]
        different = len(set(grams))
        if len(grams) - different + isqrt(different) <= self.max_ratio * len(grams):
            return True  # even if all repetitions were of the most frequent ones
        counts = Counter(grams)
        repeated = sum(1 for count in counts.values() if count > 1)
        most = [count for _, count in counts.most_common(min(isqrt(different), repeated))]
        return sum(most) <= self.max_ratio * len(grams)


class WordRepetitionFilter(DataFilter):
    """Leaves out texts with a large share of word n-grams that occur more than once.

    data-juicer's word_repetition_filter (https://arxiv.org/abs/2309.02033) and, at other n, the repetition rules of
    Gopher (https://arxiv.org/abs/2112.11446, table A1), which counts characters instead of n-grams.
    """

    def __init__(self, max_ratio: float = 0.5, n: int = 10) -> None:
        self.max_ratio, self.n = _ratio("WordRepetitionFilter", max_ratio), _size("WordRepetitionFilter", n)

    def __call__(self, trajectory: Trajectory) -> bool:
        found = words(all_text(trajectory))
        counts = Counter(zip(*(found[start:] for start in range(self.n)), strict=False))
        return sum(count for count in counts.values() if count > 1) <= self.max_ratio * counts.total()


class SpecialCharacterFilter(DataFilter):
    """Leaves out texts with a large share of characters that are no letter, mark, digit or white space of any script.

    data-juicer's special_characters_filter (https://arxiv.org/abs/2309.02033) counts digits and white space as well.
    """

    def __init__(self, max_ratio: float = 0.25) -> None:
        self.max_ratio = _ratio("SpecialCharacterFilter", max_ratio)

    def __call__(self, trajectory: Trajectory) -> bool:
        counts = Counter(all_text(trajectory))
        special = sum(count for char, count in counts.items() if unicodedata.category(char)[0] not in "LMNZ" and not char.isspace())
        return special <= self.max_ratio * counts.total()


REFUSALS = (
    r"\bas an ai( language)? (model|assistant)\b",
    r"\bi( am|'m|\u2019m) (sorry|afraid),? (but )?(i|as)\b.{0,60}\b(can ?not|can't|can\u2019t|unable|not able)\b",
    r"\bi (can ?not|can't|can\u2019t|won't|won\u2019t|am unable to|am not able to) (assist|help|comply|fulfil|fulfill|provide|do that)\b",
    r"作为(一个|一名)?\s*(人工智能|AI)",
    r"(很抱歉|对不起|抱歉)，?我(无法|不能)",
)


class RefusalFilter(DataFilter):
    """Leaves out conversations in which the assistant refuses: one of the patterns is found in one of its turns.

    `patterns` are regular expressions, looked for whatever the case; without any, a few English and Chinese ones.
    """

    def __init__(self, patterns: Sequence[str] | str = REFUSALS) -> None:
        self.patterns = [patterns] if isinstance(patterns, str) else list(patterns)
        try:
            for pattern in self.patterns:
                re.compile(pattern, re.IGNORECASE)
        except (re.error, TypeError) as error:
            raise ConfigError(f"RefusalFilter: patterns {self.patterns} are not regular expressions: {error}") from None
        if not self.patterns:
            raise ConfigError("RefusalFilter: no pattern is given")

    def __call__(self, trajectory: Trajectory) -> bool:
        return not any(re.search(pattern, answer, re.IGNORECASE) for answer in answers(trajectory) for pattern in self.patterns)


class RoleOrderFilter(DataFilter):
    """Keeps conversations whose turns make sense: at most one system turn, and first; then the user; the assistant after the
    user or a tool; a tool only after a turn that calls one, or after another tool; never two user or assistant turns in a row.

    Trajectories without messages pass.
    """

    FOLLOWS = {"start": {"system", "user"}, "system": {"user"}, "user": {"assistant"}, "assistant": {"user", "tool"},
               "tool": {"tool", "assistant"}}  # fmt: skip

    def __call__(self, trajectory: Trajectory) -> bool:
        for messages in (trajectory["messages"], trajectory.get("rejected_messages", [])):
            before, calls = "start", False
            for message in messages:
                role = message["role"]
                called = calls if role == "tool" else bool(message.get("tool_calls"))
                if (
                    role not in self.FOLLOWS[before]
                    or (role == "tool" and not calls)
                    or (before == "assistant" and calls and role != "tool")
                ):
                    return False
                before, calls = role, called
        return True


def _inside(value: int, low: int, high: int | None) -> bool:
    return low <= value and (high is None or value <= high)


def _ratio(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise ConfigError(f"{name}: max_ratio {value} is not between 0 and 1")
    return value


def _size(name: str, value: int) -> int:
    if value < 1:
        raise ConfigError(f"{name}: n {value} is less than 1")
    return value
