"""Which files an address means: one file, a folder, or a glob, locally or in a store.

A name that exists is taken as it is written, so brackets and stars in it are no pattern; part by part the same holds inside a
glob. In a glob `*`, `?` and `[…]` match within one part of a path, and `**` any number of folders; hidden names only where they are
written out. Files come in order of names.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

from storage.store import Store, open_store
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.preprocessor.sources.data_file import DataFile, LocalContent, StoredContent, file_type, typed

_MAGIC = re.compile(r"[*?\[]")
_PASSED_OVER = re.compile(
    r"[._].*|(readme|licen[cs]e|notice|changelog|citation)(\..*)?|.*\.(md|rst|cff)|(dataset_infos?|dataset_dict|state)\.json", re.IGNORECASE
)
"""Names in a folder that are no data: hidden ones, markers such as _SUCCESS, and what tells people and `datasets` about the data."""


def find_files(source: str, uri: str) -> list[DataFile]:
    """The files of one address, at least one. Raises `DataError` where nothing is there and `ConfigError` for a file of unknown type.

    Of a folder or glob, hidden files, names with '_' in front, and documents (README, LICENSE, *.md) are passed over.
    """
    scheme, separator, rest = uri.partition("://")
    if separator and scheme != "file":
        bucket, _, key = rest.partition("/")
        return _find(source, uri, _StoredTree(open_store(f"{scheme}://{bucket}")), key.strip("/"))
    path = Path(rest if separator else uri)
    return _find(source, uri, _LocalTree(Path(path.anchor or ".")), str(path.relative_to(path.anchor)))


def check_address(source: str, uri: str) -> None:
    """Raises `ConfigError` for the address of one file whose type is not known. Looks at nothing that is far away."""
    scheme, separator, rest = uri.partition("://")
    local = Path(rest if scheme == "file" else uri)
    if local.suffix and not _MAGIC.search(local.name) and (not separator or scheme == "file") and not local.is_dir():
        typed(source, local.name)


class _Tree(ABC):
    """Files and folders under names with '/' between the parts; '' is the top."""

    @abstractmethod
    def is_file(self, name: str) -> bool: ...

    @abstractmethod
    def is_folder(self, name: str) -> bool: ...

    @abstractmethod
    def children(self, name: str) -> list[str]:
        """Sorted last parts of what lies right in the folder `name`; [] for no folder."""

    @abstractmethod
    def subfolders(self, name: str) -> list[str]:
        """Sorted full names of the folders right in the folder `name`."""

    @abstractmethod
    def below(self, name: str) -> list[str]:
        """Sorted full names of all that is no folder below the folder `name`."""

    @abstractmethod
    def content(self, name: str) -> LocalContent | StoredContent: ...


class _LocalTree(_Tree):
    def __init__(self, top: Path) -> None:
        self._top = top

    def is_file(self, name: str) -> bool:
        return (self._top / name).is_file()

    def is_folder(self, name: str) -> bool:
        return (self._top / name).is_dir()

    def children(self, name: str) -> list[str]:
        folder = self._top / name
        return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []

    def subfolders(self, name: str) -> list[str]:
        found = [inside for child in self.children(name) if self.is_folder(inside := _join(name, child))]
        for inside in found:
            if (self._top / inside).is_symlink():
                raise DataError(f"{self._top / inside} is a link to a folder, which may hold itself: name the folder that it leads to")
        return found

    def below(self, name: str) -> list[str]:
        files = [inside for child in self.children(name) if not self.is_folder(inside := _join(name, child))]
        return sorted([*files, *(inside for folder in self.subfolders(name) for inside in self.below(folder))])

    def content(self, name: str) -> LocalContent:
        return LocalContent(self._top / name)


class _StoredTree(_Tree):
    """A store, where a folder is what keys have in common. Nothing is listed above the first part that is a pattern."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._listings: dict[str, list[str]] = {}

    def is_file(self, name: str) -> bool:
        if (listing := self._listing_with(name)) is not None:
            return listing[bisect_left(listing, name) :][:1] == [name]
        return bool(name) and self._store.exists(name)

    def is_folder(self, name: str) -> bool:
        return bool(self.below(name))

    def children(self, name: str) -> list[str]:
        return sorted({key.split("/")[0] for key in self._relative(name)})

    def subfolders(self, name: str) -> list[str]:
        return sorted({_join(name, key.split("/")[0]) for key in self._relative(name) if "/" in key})

    def below(self, name: str) -> list[str]:
        listing = self._listing_with(name)
        if listing is None:
            listing = self._listings[name] = [info.key for info in self._store.list(name)]
        return [key for key in listing if not name or key.startswith(name + "/")]

    def _relative(self, name: str) -> list[str]:
        return [key[len(name) + 1 if name else 0 :] for key in self.below(name)]

    def _listing_with(self, name: str) -> list[str] | None:
        return next((keys for top, keys in self._listings.items() if not top or name.startswith(top + "/")), None)

    def content(self, name: str) -> StoredContent:
        return StoredContent(self._store, name)


def _find(source: str, uri: str, tree: _Tree, name: str) -> list[DataFile]:
    name = "" if name == "." else name
    if tree.is_file(name):
        last = name.rpartition("/")[2]
        return [DataFile(last, tree.content(name), typed(source, last))]
    if tree.is_folder(name):
        names, base = tree.below(name), name
    elif _MAGIC.search(name):
        base = _literal_base(tree, name)
        names = sorted(set(_expand(tree, base, name[len(base) :].strip("/").split("/"))))
    else:
        raise DataError(f"source '{source}': there is no file and no folder {uri}")
    start = len(base) + 1 if base else 0
    files = []
    for found in names:
        relative = found[start:]
        if any(_PASSED_OVER.fullmatch(part) for part in relative.split("/")):
            continue
        if not tree.is_file(found):
            raise DataError(f"source '{source}': {relative} in {uri} is no file (a link to nothing, or a pipe); take it away or mend it")
        kind = file_type(relative)
        if kind is None:
            raise ConfigError(
                f"source '{source}': {uri} holds {relative}, which is of no known type; take it away, or name the files, e.g. {uri}/*.jsonl"
            )
        files.append(DataFile(relative, tree.content(found), kind))
    if not files:
        raise DataError(f"source '{source}': no data file in {uri}; give files of a known type, or correct the address")
    return files


def _literal_base(tree: _Tree, pattern: str) -> str:
    """The longest folder in front of the pattern's first part that is not there by that very name."""
    base = ""
    for part in pattern.split("/")[:-1]:
        if _MAGIC.search(part) and not tree.is_folder(_join(base, part)):
            break
        base = _join(base, part)
    return base


def _expand(tree: _Tree, base: str, parts: list[str]) -> Iterator[str]:
    """Names below `base` that match the parts, of all that is no folder."""
    part, rest = parts[0], parts[1:]
    if part == "**":
        yield from _expand(tree, base, rest or ["*"])
        for folder in tree.subfolders(base):
            if not folder.rpartition("/")[2].startswith("."):
                yield from _expand(tree, folder, parts)
        return
    children = tree.children(base)
    matches = [part] if part in children else [child for child in children if fnmatchcase(child, part)]
    for name in (_join(base, child) for child in matches):
        if rest:
            yield from _expand(tree, name, rest)
        elif tree.is_file(name) or not tree.is_folder(name):
            yield name


def _join(folder: str, name: str) -> str:
    return f"{folder}/{name}" if folder else name
