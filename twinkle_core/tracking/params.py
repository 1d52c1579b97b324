"""Settings as the flat, short texts that trackers take for parameters."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

MAX_PARAM_CHARS = 6000
"""MLflow's limit for a parameter's value; longer ones are cut, and the whole recipe is an artifact."""


def param_text(value: Any) -> str:
    """The value as text, cut at `MAX_PARAM_CHARS`."""
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= MAX_PARAM_CHARS else text[: MAX_PARAM_CHARS - 1] + "…"


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as dotted names: `{'a': {'b': 1}}` gives `{'a.b': 1}`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        flat |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return flat
