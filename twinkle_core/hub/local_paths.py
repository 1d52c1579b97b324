"""Paths of this machine in what is about to be published."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# A whole value: '/scratch/u/base', '~/x', 'file:///x', 'C:\x'. Two parts at least, since '/' alone or '/think' may be a token.
_VALUE = re.compile(r"(?:(?:/[\w.@+-]+){2,}/?|~/.*|file:/.*|[A-Za-z]:[\\/].*)")
# Inside prose: roots under which people's files lie. A URL's path does not count.
_PROSE = re.compile(
    r"(?<![\w/:.-])(?:/(?:home|root|tmp|scratch|mnt|media|Users|var|data|work|workspace|opt|srv|private)/[\w.@+-]+|~/[\w.]|file:/|[A-Za-z]:\\\w)"
)
_NOT_READ = ("tokenizer.json", "vocab.json")
"""Vocabularies hold pieces of paths that are nobody's."""


def find_local_paths(folder: Path) -> list[str]:
    """One sentence for each path of a machine in the folder's JSON and Markdown files; [] when there is none."""
    problems = []
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix == ".json" and path.name not in _NOT_READ:
            found = [value for value in _strings(json.loads(path.read_text(encoding="utf-8"))) if _VALUE.fullmatch(value)]
        elif path.suffix == ".md":
            found = local_paths_in_text(path.read_text(encoding="utf-8"))
        else:
            continue
        problems += [f"{name} holds the local path {value!r}" for value in found]
    return problems


def local_paths_in_text(text: str) -> list[str]:
    return [match.group(0) for match in _PROSE.finditer(text)]


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list):
        for item in value:
            yield from _strings(item)
