"""Preprocessors and filters by name."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from twinkle_core.errors import ConfigError
from twinkle_core.preprocessor.base import DataFilter, Preprocessor
from twinkle_core.preprocessor.fields import Row
from twinkle_core.preprocessor.filters import (
    CharRepetitionFilter,
    LengthFilter,
    RefusalFilter,
    RoleOrderFilter,
    SpecialCharacterFilter,
    WordRepetitionFilter,
)
from twinkle_core.preprocessor.instructions import AlpacaProcessor, EmojiDPOProcessor
from twinkle_core.preprocessor.pii import PIIFilter
from twinkle_core.preprocessor.reasoning import (
    CLEVRProcessor,
    CompetitionMathGRPOProcessor,
    CompetitionMathProcessor,
    CountdownProcessor,
    GSM8KProcessor,
    OlympiadBenchProcessor,
)
from twinkle_core.preprocessor.self_cognition import SelfCognitionProcessor
from twinkle_core.preprocessor.trusted_code import load_function, names_user_code
from twinkle_core.types import Trajectory

PREPROCESSORS: dict[str, type[Preprocessor]] = {
    "SelfCognitionProcessor": SelfCognitionProcessor,
    "AlpacaProcessor": AlpacaProcessor,
    "CompetitionMathProcessor": CompetitionMathProcessor,
    "CompetitionMathGRPOProcessor": CompetitionMathGRPOProcessor,
    "CountdownProcessor": CountdownProcessor,
    "GSM8KProcessor": GSM8KProcessor,
    "CLEVRProcessor": CLEVRProcessor,
    "OlympiadBenchProcessor": OlympiadBenchProcessor,
    "EmojiDPOProcessor": EmojiDPOProcessor,
}
FILTERS: dict[str, type[DataFilter]] = {
    "LengthFilter": LengthFilter,
    "CharRepetitionFilter": CharRepetitionFilter,
    "WordRepetitionFilter": WordRepetitionFilter,
    "SpecialCharacterFilter": SpecialCharacterFilter,
    "RefusalFilter": RefusalFilter,
    "RoleOrderFilter": RoleOrderFilter,
    "PIIFilter": PIIFilter,
}

Made = TypeVar("Made")


class FunctionProcessor(Preprocessor):
    """A function of a row, with further arguments."""

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self.function, self.arguments = function, dict(arguments)

    def __call__(self, row: Row) -> dict[str, Any] | Trajectory | None:
        made: dict[str, Any] | None = self.function(row, **self.arguments)
        return made


class FunctionFilter(DataFilter):
    """A function of a trajectory, with further arguments. It has to say True or False."""

    def __init__(self, function: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
        self.function, self.arguments = function, dict(arguments)

    def __call__(self, trajectory: Trajectory) -> bool:
        kept = self.function(trajectory, **self.arguments)
        if not isinstance(kept, bool):
            name = getattr(self.function, "__name__", type(self.function).__name__)
            raise ConfigError(f"filter {name} returned {kept!r}; it has to return True (keep) or False")
        return kept


def build_preprocessor(
    preprocessor: Any, arguments: Mapping[str, Any] | None = None, trusted_code: Path | None = None
) -> Preprocessor | None:
    """What a recipe or a caller means: a name, FILE.py:FUNCTION, a class, an instance, a function; None gives none.

    Raises `ConfigError` for unknown names (naming the known) and arguments that do not fit.
    """
    given = dict(arguments or {})
    if preprocessor is None:
        if given:
            raise ConfigError(f"processor_args {given} are given, but no processor")
        return None
    found = _named(preprocessor, PREPROCESSORS, "processor", trusted_code)
    if isinstance(found, type) and issubclass(found, Preprocessor):
        return _make(found, given)
    if isinstance(found, Preprocessor) and not given:
        return found
    return FunctionProcessor(*_fitting(found, given, "a row"))


def build_filter(filter_: Any, arguments: Mapping[str, Any] | None = None, trusted_code: Path | None = None) -> DataFilter:
    """As `build_preprocessor`, for filters."""
    given = dict(arguments or {})
    found = _named(filter_, FILTERS, "filter", trusted_code)
    if isinstance(found, type) and issubclass(found, DataFilter):
        return _make(found, given)
    if isinstance(found, DataFilter) and not given:
        return found
    return FunctionFilter(*_fitting(found, given, "a trajectory"))


def _named(given: Any, known: Mapping[str, Any], what: str, trusted_code: Path | None) -> Any:
    if not isinstance(given, str):
        return given
    if names_user_code(given):
        return load_function(given, trusted_code)
    if given not in known:
        raise ConfigError(f"unknown {what} {given!r}; known: {', '.join(known)}, or FILE.py:FUNCTION of your own")
    return known[given]


def _make(found: type[Made], arguments: dict[str, Any]) -> Made:
    signature = _signature(found, found.__name__)
    taken = list(signature.parameters)
    if unknown := sorted(set(arguments) - set(taken)):
        raise ConfigError(f"{found.__name__} takes no argument {unknown[0]!r}; it takes {', '.join(taken) or 'none'}")
    if missing := sorted(getattr(found, "__abstractmethods__", ())):
        raise ConfigError(f"{found.__name__} lacks the method {missing[0]}, so it can be called with nothing; define it")
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{found.__name__}: {error}") from None
    return found(**arguments)


def _fitting(function: Any, arguments: dict[str, Any], subject: str) -> tuple[Callable[..., Any], dict[str, Any]]:
    """The function, instance or class to call; raises `ConfigError` when it cannot be called with its subject and the arguments."""
    if isinstance(function, type):
        function, arguments = _make(function, arguments), {}
    if not callable(function):
        raise ConfigError(f"{function!r} cannot be called with {subject}")
    name = getattr(function, "__name__", type(function).__name__)
    signature = _signature(function, name)
    try:
        signature.bind(None, **arguments)
    except TypeError as error:
        raise ConfigError(f"{name} cannot be called with {subject} and the arguments {sorted(arguments)}: {error}") from None
    return function, arguments


def _signature(function: Any, name: str) -> inspect.Signature:
    """What it can be called with; raises `ConfigError` for `dict` and others of Python's own that do not tell."""
    try:
        return inspect.signature(function)
    except (ValueError, TypeError):
        raise ConfigError(f"{name} does not tell what it can be called with; write a function of your own that calls it") from None
