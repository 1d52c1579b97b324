"""Digests: of values through their canonical bytes, and of bytes, files and folders. All are sha256 in hex."""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from storage.errors import NotFoundError, StorageError
from storage.uri import check_key

_MAX_DEPTH = 100


def canonical_bytes(value: Any) -> bytes:
    """JSON text with sorted keys and no spaces: equal values give equal bytes, different ones different bytes.

    Types count, so 1, 1.0 and True differ though Python calls them equal; 0.0 and -0.0 do not, nor do a list and a tuple.
    Text is exact (no Unicode normalisation). Only None, bool, int, float, str, list, tuple and dict themselves have a
    canonical form; a subclass (an enum, a numpy float), a callable, a set, bytes, a path, any other object, NaN, an
    infinity, a lone surrogate and a key that is no str raise TypeError naming the path of the offending value.
    """
    pieces: list[str] = []
    _write(value, "value", 0, pieces)
    return "".join(pieces).encode()


def fingerprint(value: Any) -> str:
    """sha256 of `canonical_bytes(value)`."""
    return digest_bytes(canonical_bytes(value))


def _write(value: Any, path: str, depth: int, pieces: list[str]) -> None:
    kind = type(value)
    if depth > _MAX_DEPTH:
        raise TypeError(f"{path} is nested deeper than {_MAX_DEPTH}, or holds itself")
    if value is None or kind in (bool, int, str):
        pieces.append(_scalar(value, path))
    elif kind is float:
        if not math.isfinite(value):
            raise TypeError(f"{path} is {value!r}, which has no canonical form: use a finite number or None")
        pieces.append(repr(value + 0.0))  # -0.0 + 0.0 is 0.0, which it equals
    elif kind in (list, tuple):
        pieces.append("[")
        for index, item in enumerate(value):
            pieces.append("," if index else "")
            _write(item, f"{path}[{index}]", depth + 1, pieces)
        pieces.append("]")
    elif kind is dict:
        for key in value:
            if type(key) is not str:
                raise TypeError(f"{path} has the key {key!r} of type {type(key).__name__}: keys must be str")
        pieces.append("{")
        for index, key in enumerate(sorted(value)):
            pieces.append(("," if index else "") + _scalar(key, f"key {key!r} of {path}") + ":")
            _write(value[key], f"{path}[{key!r}]", depth + 1, pieces)
        pieces.append("}")
    else:
        raise TypeError(f"{path} is a {kind.__module__}.{kind.__qualname__}, which has no canonical form: pass plain values in its place")


def _scalar(value: bool | int | str | None, path: str) -> str:
    try:
        text = json.dumps(value, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError as error:  # a pair of lone surrogates would collide with the letter it spells
        raise TypeError(f"{path} holds a lone surrogate, which has no canonical form: decode the text properly") from error
    except ValueError as error:  # Python refuses to print an int of more than 4,300 digits
        raise TypeError(f"{path} is an integer too long to print: pass it as text") from error
    return text


def digest_bytes(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def digest_file(path: Path) -> str:
    """Streams the file; NotFoundError when it is not there."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError as error:
        raise NotFoundError(f"no file {str(path)!r} to take the digest of") from error


def digest_folder(path: Path, names: Iterable[str] | None = None) -> str:
    """Digest of the sorted pairs (relative name, digest) of the named files, or of every file below `path`.

    A link to a file counts as the file (Hugging Face's cache is made of such); a link to a folder is refused.
    """
    chosen = folder_files(path) if names is None else sorted({check_key(name, what="file name") for name in names})
    return fingerprint([[name, digest_file(path / name)] for name in chosen])


def folder_files(path: Path) -> list[str]:
    """Relative names ('a/b.txt') of all files below `path`, sorted. NotFoundError without the folder."""
    if not path.is_dir():
        raise NotFoundError(f"no folder {str(path)!r}")
    names: list[str] = []
    for folder, subfolders, files in os.walk(path, onerror=_raise):
        for name in subfolders:
            if os.path.islink(os.path.join(folder, name)):
                raise StorageError(
                    f"{os.path.join(folder, name)!r} is a link to a folder and would be passed over: put the folder itself there"
                )
        names.extend((Path(folder) / name).relative_to(path).as_posix() for name in files)
    return sorted(names)


def _raise(error: OSError) -> None:
    raise error  # os.walk passes over an unreadable folder without this
