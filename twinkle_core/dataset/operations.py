"""What `map` and `filter` are given, as functions of one row."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from twinkle_core.errors import ConfigError, DataError
from twinkle_core.preprocessor.formats import TRAJECTORY_KEYS, convert, detect
from twinkle_core.types import Trajectory

Row = dict[str, Any]
RowFunction = Callable[[Row], Row | None]
"""The row that comes of a row, or None where it is left out."""


@dataclass(frozen=True, kw_only=True)
class Operation:
    """One `map` or `filter`, for the rows of some sources."""

    kind: Literal["map", "filter"]
    name: str
    """For messages, e.g. 'map(add_system)'."""
    function: RowFunction
    sources: frozenset[int]
    """Numbers of the sources whose rows it is for."""
    after_mix: bool


def apply_all(operations: Iterable[Operation], source: int, where: str, row: Row) -> Row | None:
    """The row of source number `source` after all operations that are for it; None where one leaves it out. Errors name `where`."""
    for operation in operations:
        if source not in operation.sources:
            continue
        try:
            result = operation.function(row)
        except DataError as error:
            raise DataError(f"{where}: {operation.name}: {error}") from error
        except Exception as error:
            error.add_note(f"in {operation.name} of {where}")
            raise
        if result is None:
            return None
        row = result
    return row


def to_trajectory(row: Row) -> Trajectory:
    """The row as a `Trajectory`, by the layout that its keys show. Raises `DataError` with the reason."""
    is_trajectory = "messages" in row and row.keys() <= TRAJECTORY_KEYS
    return convert(row, "trajectory" if is_trajectory else detect(row))


def map_function(given: Any, init_args: Mapping[str, Any] | None) -> tuple[str, RowFunction]:
    """(name, function) for what `map` was given: a function, or a preprocessor by name, class or instance.

    A name is one of `PREPROCESSORS`: no string is imported. Raises `ConfigError` for an unknown name and wrong `init_args`.
    """
    from twinkle_core.preprocessor.registry import FunctionProcessor, build_preprocessor

    built = build_preprocessor(given, init_args)
    if built is None:
        raise ConfigError("map needs a function or a preprocessor, got None")

    def preprocess(row: Row) -> Row | None:
        result = built(row)
        return None if result is None else dict(built.annotate(to_trajectory(dict(result))))

    def mapped(row: Row) -> Row:
        result = built(row)
        if not isinstance(result, Mapping):
            raise DataError(f"the function returned {type(result).__name__}; it is to return the row as a dict (filter leaves rows out)")
        return dict(result)

    return _name(given), mapped if isinstance(built, FunctionProcessor) else preprocess


def filter_function(given: Any, init_args: Mapping[str, Any] | None) -> tuple[str, RowFunction]:
    """(name, function) for what `filter` was given: a function of the row, or one of `FILTERS` by name, class or instance."""
    from twinkle_core.preprocessor.registry import FunctionFilter, build_filter

    built = build_filter(given, init_args)

    def filtered(row: Row) -> Row | None:
        result = built.apply(to_trajectory(row))
        return None if result is None else dict(result)

    def kept(row: Row) -> Row | None:
        return row if built(row) else None  # type: ignore[arg-type]  # a user's function is given the row as it is

    return _name(given), kept if isinstance(built, FunctionFilter) else filtered


def _name(given: Any) -> str:
    return given if isinstance(given, str) else getattr(given, "__name__", type(given).__name__)
