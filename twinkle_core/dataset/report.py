"""What became of the rows of each source: counted, and the refused ones listed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from twinkle_core.template import Outcome

MAX_LISTED = 20
"""Refused rows that are listed, per source; all are counted."""


@dataclass(kw_only=True)
class SourceReport:
    """Counts of one source. Once all rows are encoded, `rows == filtered + refused + dropped + encoded`, in rows."""

    rows: int = 0
    """Rows read."""
    filtered: int = 0
    """Rows that a filter left out."""
    refused: int = 0
    """Rows that cannot be encoded, where they are to be skipped."""
    refused_rows: list[dict[str, str]] = field(default_factory=list)
    """The first of them: {'row': where it lies, 'reason': …}."""
    dropped: dict[str, int] = field(default_factory=lambda: {"too_long": 0, "no_loss": 0})
    """Rows that truncation 'delete' leaves out, by reason."""
    encoded: int = 0
    """Rows that became samples."""
    samples: int = 0
    """More than `encoded` where truncation 'split' cuts rows."""
    tokens: int = 0
    supervised_tokens: int = 0
    truncated: int = 0
    """Rows of which tokens were cut off."""
    truncated_tokens: int = 0
    unprinted_tools: int = 0
    """Rows with tools or tool calls that the chat template does not print."""

    def refuse(self, where: str, reason: str) -> None:
        """Counts a row that is left out, and lists it while there is room."""
        self.refused += 1
        if len(self.refused_rows) < MAX_LISTED:
            self.refused_rows.append({"row": where, "reason": reason})

    def count(self, outcome: Outcome) -> None:
        """Counts a row that was encoded or dropped."""
        self.unprinted_tools += outcome.unprinted_tools
        if outcome.dropped is not None:
            self.dropped[outcome.dropped] = self.dropped.get(outcome.dropped, 0) + 1
            return
        self.encoded += 1
        self.samples += len(outcome.samples)
        self.tokens += sum(len(sample.input_ids) for sample in outcome.samples)
        self.supervised_tokens += sum(sample.num_loss_tokens for sample in outcome.samples)
        self.truncated += outcome.truncated_tokens > 0
        self.truncated_tokens += outcome.truncated_tokens

    def plain(self) -> dict[str, Any]:
        """As plain JSON values; `SourceReport(**plain)` gives it back."""
        return asdict(self)


def total(sources: Mapping[str, SourceReport]) -> dict[str, Any]:
    """The counts of all sources together, and those of each under 'sources'."""
    parts = {name: report.plain() for name, report in sources.items()}
    numbers = {key for key, value in SourceReport().plain().items() if isinstance(value, int)}
    sums: dict[str, Any] = {key: sum(part[key] for part in parts.values()) for key in SourceReport().plain() if key in numbers}
    dropped = {reason: sum(part["dropped"][reason] for part in parts.values()) for reason in SourceReport().dropped}
    return {**sums, "dropped": dropped, "sources": parts}
