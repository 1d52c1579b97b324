"""Fields of a row, read with their type. A `DataError` names the key and what it holds."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from twinkle_core.errors import DataError

Row = Mapping[str, Any]
MAX_SHOWN = 80
"""Characters of a value shown in an error."""


def short(value: Any) -> str:
    """The value as an error shows it."""
    text = repr(value)
    return text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."


def text(row: Row, key: str) -> str:
    """The text under `key`."""
    value = row.get(key)
    if not isinstance(value, str):
        raise DataError(f"'{key}' must be text, got {short(value)}")
    return value


def optional_text(row: Row, key: str) -> str:
    """The text under `key`, '' where it is missing or null."""
    return "" if row.get(key) is None else text(row, key)


def first_key(row: Row, *keys: str) -> str | None:
    """The first of `keys` that holds something other than null."""
    return next((key for key in keys if row.get(key) is not None), None)


def pairs(row: Row, key: str) -> list[tuple[str, str]]:
    """The (name, text) pairs under `key`, given as a list of pairs or as an object."""
    value = row.get(key)
    items = list(value.items()) if isinstance(value, dict) else value
    if not isinstance(items, list) or not all(
        isinstance(pair, (list, tuple)) and len(pair) == 2 and all(isinstance(part, str) for part in pair) for pair in items
    ):
        raise DataError(f"'{key}' must be a list of [key, value] pairs of text, got {short(value)}")
    return [(name, told) for name, told in items]
