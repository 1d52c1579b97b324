"""What became of one trajectory."""

from __future__ import annotations

from dataclasses import dataclass

from twinkle_core.types import EncodedSample

Span = tuple[int, int]
"""First character, and the one after the last."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Samples, or the one reason why there are none.

    Tokens add up: without `dropped` and `refused`, the samples hold `num_tokens - truncated_tokens` tokens.
    """

    samples: tuple[EncodedSample, ...] = ()
    """One; several where truncation 'split' cut it up; none where it was dropped or refused."""
    dropped: str | None = None
    """Why a rule of the config left it out: 'too_long', or 'no_loss' (no supervised token)."""
    refused: str | None = None
    """Why it cannot be encoded, where `TemplateConfig.on_bad_row` is 'skip'."""
    num_tokens: int = 0
    """Tokens of all its documents before truncation."""
    truncated_tokens: int = 0
    """Tokens of them that are in no sample, though there are samples."""
    unprinted_tools: bool = False
    """The conversation has tools or tool calls that the chat template does not print."""
