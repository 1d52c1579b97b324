"""Teaches a model its name and author: fills the placeholders of a self-cognition data set."""

from __future__ import annotations

import re
from typing import Any

from twinkle_core.errors import ConfigError
from twinkle_core.preprocessor.base import Preprocessor
from twinkle_core.preprocessor.fields import Row
from twinkle_core.types import Trajectory

_PLACEHOLDER = re.compile(r"\{\{(name|author)\}\}|\{(name|author)\}", re.IGNORECASE)


class SelfCognitionProcessor(Preprocessor):
    """Replaces {name}, {author}, {{NAME}} and {{AUTHOR}} (any case) in every text of a row of any layout.

    Example: `SelfCognitionProcessor('Brook', 'Hill Labs')({'query': 'Who are you?', 'response': 'I am {name}.'})`
    gives `{'query': 'Who are you?', 'response': 'I am Brook.'}`. `name` and `author` are other names of the arguments.
    """

    def __init__(
        self, model_name: str | None = None, model_author: str | None = None, *, name: str | None = None, author: str | None = None
    ) -> None:
        self.values = {"name": _one("name", model_name, name), "author": _one("author", model_author, author)}

    def __call__(self, row: Row) -> dict[str, Any]:
        """A copy of the row with the placeholders filled."""
        return {key: self._fill(value) for key, value in row.items()}

    def annotate(self, trajectory: Trajectory) -> Trajectory:
        """Adds scorer 'contains' with the name as answer where the last assistant turn says the name."""
        answers = [message["content"] for message in trajectory["messages"] if message["role"] == "assistant"]
        if not answers or self.values["name"] not in answers[-1]:
            return trajectory
        user_data = [*trajectory.get("user_data", []), ("scorer", "contains"), ("answer", self.values["name"])]
        return {**trajectory, "user_data": user_data}

    def _fill(self, value: Any) -> Any:
        if isinstance(value, str):
            return _PLACEHOLDER.sub(lambda match: self.values[(match[1] or match[2]).lower()], value)
        if isinstance(value, list):
            return [self._fill(item) for item in value]
        if isinstance(value, dict):
            return {key: self._fill(item) for key, item in value.items()}
        return value


def _one(key: str, *given: str | None) -> str:
    told = [value for value in given if value is not None]
    if len(told) != 1 or not isinstance(told[0], str) or not told[0].strip():
        what = f"is {told[0]!r}" if len(told) == 1 else ("is missing" if not told else f"is given twice: {told}")
        raise ConfigError(f"SelfCognitionProcessor: '{key}' (or 'model_{key}') {what}; give the text that the model is to say")
    return told[0]
