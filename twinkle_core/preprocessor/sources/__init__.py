"""Where rows come from: files of many types, locally or in a store, datasets of two hubs, reasoning_gym's generators, lists in memory.

A source has a digest of its content, which enters the preprocess stage's key, and rows with their place in the source.
"""

from __future__ import annotations

from pathlib import Path

from storage.errors import StorageError
from storage.uri import parse
from twinkle_core.config import SourceConfig
from twinkle_core.errors import ConfigError
from twinkle_core.preprocessor.sources.data_file import KNOWN_ENDINGS
from twinkle_core.preprocessor.sources.file_source import FileSource
from twinkle_core.preprocessor.sources.generated import ReasoningGymSource
from twinkle_core.preprocessor.sources.hubs import HubSource
from twinkle_core.preprocessor.sources.json_values import parse_json, row_problem
from twinkle_core.preprocessor.sources.memory_rows import RowsSource
from twinkle_core.preprocessor.sources.place import OnBadRow, Place, Row, Source

SELF_COGNITION = Path(__file__).parents[1] / "data" / "self_cognition.jsonl"

__all__ = [
    "SELF_COGNITION",
    "FileSource",
    "HubSource",
    "OnBadRow",
    "Place",
    "ReasoningGymSource",
    "Row",
    "RowsSource",
    "Source",
    "open_source",
    "parse_json",
    "row_problem",
]


def open_source(config: SourceConfig, *, cache: Path | None = None) -> Source:
    """The source behind `config.uri`; a tuple names files, folders and globs that are read one after the other.

    Nothing is read or asked yet. `cache` is where files of a hub are put (None: the hub libraries' own cache).
    Raises `ConfigError` for an address that is not understood.
    """
    if isinstance(config.uri, tuple):
        if not config.uri:
            raise ConfigError(f"source '{config.name}': uri is an empty list; name at least one file")
        for uri in config.uri:
            _check_file(config.name, uri)
        return FileSource(config.name, *config.uri)
    scheme, separator, rest = config.uri.partition("://")
    if separator and scheme in ("hf", "ms"):
        return HubSource.parse(config.name, config.uri, cache)
    if separator and scheme == "reasoning_gym":
        return ReasoningGymSource.parse(config.uri)
    if separator and scheme == "builtin" and rest == "self_cognition":
        return FileSource(config.name, str(SELF_COGNITION))
    _check_file(config.name, config.uri)
    return FileSource(config.name, config.uri)


def _check_file(source: str, uri: str) -> None:
    scheme, separator, _ = uri.partition("://") if "://" in uri else ("", "", uri)
    if separator and scheme not in ("file", "s3", "memory"):
        raise ConfigError(
            f"source '{source}': uri {uri!r} is not known; use a file, a list of files, a folder or a glob ({KNOWN_ENDINGS}), local or "
            "s3://bucket/key; hf://org/name@revision or ms://org/name@revision (not in a list); reasoning_gym://NAME?size=…&seed=…; "
            "or builtin://self_cognition"
        )
    try:
        if scheme in ("s3", "memory"):
            parse(uri)  # a local path may well go up by '..'
        elif not uri or uri.startswith("~") or (separator and not uri.startswith("file:///")):
            raise ConfigError(f"source '{source}': uri {uri!r} is no path: write it in full, without '~'; file:// takes three slashes")
    except StorageError as error:
        raise ConfigError(f"source '{source}': {error}") from None
