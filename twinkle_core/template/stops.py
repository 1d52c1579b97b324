"""Which texts end a turn."""

from __future__ import annotations

import re
from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class StopMarks:
    """Texts of the tokens that can end a turn: the special tokens of the tokenizer."""

    texts: tuple[str, ...]
    eos: str = ""
    """The one that ends a conversation."""
    _pattern: re.Pattern[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        longest_first = sorted(filter(None, {*self.texts, self.eos}), key=len, reverse=True)
        pattern = rf"\s*(?:{'|'.join(map(re.escape, longest_first))})" if longest_first else r"(?!)"
        object.__setattr__(self, "_pattern", re.compile(pattern))

    def end_after(self, text: str, position: int) -> int | None:
        """Where the stop mark that opens at `position` ends; None without one. White space before it belongs to it (as in Llama 2)."""
        match = self._pattern.match(text, position)
        return match.end() if match else None

    def first_end(self, text: str) -> int | None:
        """Where the first stop mark of `text` ends."""
        match = self._pattern.search(text)
        return match.end() if match else None

    def last_end(self, text: str) -> int | None:
        """Where the last stop mark of `text` ends."""
        return max((match.end() for match in self._pattern.finditer(text)), default=None)

    def ends(self, text: str) -> bool:
        """Whether `text` ends with a stop mark."""
        return self.last_end(text[-64:]) == len(text[-64:]) if text else False
