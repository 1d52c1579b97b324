"""Names of places. `parse` reads a location, `join` builds one, `resolve_inside` is the one resolver of paths.

The text is taken exactly as written, as fsspec does: nothing is percent-decoded, expanded or normalised.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, cast

from storage.errors import StorageError

Scheme = Literal["file", "s3", "memory"]

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")


@dataclass(frozen=True, kw_only=True)
class Location:
    """Where a store lives. `Location(scheme='s3', root='bucket/prefix').url == 's3://bucket/prefix'`."""

    scheme: Scheme
    root: str  # file: absolute path; s3: bucket or bucket/prefix; memory: name or name/prefix. No slash at the end

    @property
    def url(self) -> str:
        return f"{self.scheme}://{self.root}"


def parse(uri: str) -> Location:
    """'file:///abs', '/abs', 'rel/path' (made absolute), 's3://bucket/prefix' or 'memory://name'; StorageError for all else."""
    scheme, separator, rest = uri.partition("://")
    if not separator:
        scheme, rest = "file", uri
    if scheme not in ("file", "s3", "memory"):
        raise StorageError(f"unknown scheme {scheme!r} in {uri!r}: use file://, s3://, memory:// or a plain path")
    root = rest.rstrip("/")
    if scheme == "file":
        return Location(scheme="file", root=_absolute(uri, rest, has_scheme=bool(separator)))
    check_key(root, what=f"location {uri!r}")
    bucket = root.split("/")[0]
    if scheme == "s3" and not _BUCKET.fullmatch(bucket):
        raise StorageError(f"{bucket!r} in {uri!r} is no bucket name: 3 to 63 lower-case letters, digits, '.' and '-'")
    return Location(scheme=cast(Scheme, scheme), root=root)


def _absolute(uri: str, path: str, *, has_scheme: bool) -> str:
    if not path or "\0" in path or ".." in path.split("/"):
        raise StorageError(f"location {uri!r} is empty or holds '..' or a NUL: write the folder in full")
    if path.startswith("~"):
        raise StorageError(f"location {uri!r} starts with '~', which is not expanded: write the folder in full")
    if has_scheme and not path.startswith("/"):
        raise StorageError(f"location {uri!r} is not absolute: write file:///folder (three slashes), or a plain path without a scheme")
    return str(Path(path).absolute())


def check_key(key: str, what: str = "key") -> str:
    """The key itself when it is a plain relative one: parts between single slashes, none of them '.' or '..'; else StorageError."""
    parts = key.split("/")
    if any(part in ("", ".", "..") for part in parts) or "\\" in key or any(ord(letter) < 32 for letter in key):
        raise StorageError(
            f"{what} {key!r} is refused: no '..', '.', empty parts, leading or trailing '/', backslashes or control characters"
        )
    return key


def join(base: str, *parts: str) -> str:
    """`join('s3://bucket/a', 'b', 'c/d') == 's3://bucket/a/b/c/d'`; parts are checked as keys are, an empty base is none."""
    tail = "/".join(check_key(part, what="part") for part in parts)
    if not base or not tail:
        return base or tail
    return f"{base.rstrip('/')}/{tail}"


def resolve_inside(root: Path, relative: str) -> Path:
    """Absolute path of `relative` under `root`, symlinks followed; StorageError where that leaves `root`."""
    inside = root.resolve()
    path = (inside / check_key(relative, what="path")).resolve()
    if not path.is_relative_to(inside):
        raise StorageError(f"path {relative!r} leaves {str(root)!r} by a symbolic link, to {str(path)!r}: put the file itself there")
    return path
