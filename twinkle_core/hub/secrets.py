"""Keeping secrets out of what is shown."""

from __future__ import annotations

HIDDEN = "***"


def without_secret(text: str, secret: str | None) -> str:
    """The text with the secret, wherever it stands in it, hidden."""
    return text.replace(secret, HIDDEN) if secret else text
