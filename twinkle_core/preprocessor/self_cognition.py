"""Teaches a model its name and author: fills the placeholders of a self-cognition data set."""

from __future__ import annotations

import re
from typing import Any

from twinkle_core.errors import ConfigError
from twinkle_core.types import Trajectory

_PLACEHOLDER = re.compile(r"\{\{(name|author)\}\}|\{(name|author)\}", re.IGNORECASE)


class SelfCognitionProcessor:
    """Replaces {name}, {author}, {{NAME}} and {{AUTHOR}} (any case) in every text of a row.

    Example: `SelfCognitionProcessor(name='Brook', author='Hill Labs')({'query': 'Who are you?', 'response': 'I am {name}.'})`
    gives `{'query': 'Who are you?', 'response': 'I am Brook.'}`.
    """

    def __init__(self, *, name: str, author: str) -> None:
        for key, value in (("name", name), ("author", author)):
            if not isinstance(value, str) or not value.strip():
                raise ConfigError(f"SelfCognitionProcessor: '{key}' is {value!r}; give the text that the model is to say")
        self.values = {"name": name, "author": author}

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
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


PREPROCESSORS = {"SelfCognitionProcessor": SelfCognitionProcessor}


def build_preprocessor(name: str | None, arguments: dict[str, Any]) -> SelfCognitionProcessor | None:
    """The preprocessor called `name` (None gives none). Raises `ConfigError` for unknown names and arguments."""
    if name is None:
        if arguments:
            raise ConfigError(f"processor_args {arguments} are given, but no processor")
        return None
    if name not in PREPROCESSORS:
        raise ConfigError(f"unknown processor {name!r}; known: {', '.join(PREPROCESSORS)}")
    if set(arguments) != {"name", "author"}:
        raise ConfigError(f"{name} takes exactly the processor_args name and author, got {sorted(arguments)}")
    return PREPROCESSORS[name](name=arguments["name"], author=arguments["author"])
