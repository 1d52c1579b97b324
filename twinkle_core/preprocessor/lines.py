"""Trajectories as lines of JSON: what is written, what is read back, and the digest that tells contents apart."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, cast

import orjson

from twinkle_core.errors import DataError
from twinkle_core.preprocessor.sources import parse_json
from twinkle_core.types import Trajectory

# Python's own json takes over where orjson cannot write a value (integers past 64 bits) or would write another one.
_PLAIN = orjson.OPT_PASSTHROUGH_DATETIME | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_SUBCLASS


def read_trajectories(path: Path) -> Iterator[Trajectory]:
    """Trajectories of a file that `preprocess` wrote, in order. Raises `DataError` naming the line of a broken one."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                value = parse_json(line)
            except DataError as error:
                raise DataError(f"{path.name}, line {number}: {error}") from None
            if "user_data" in value:
                value["user_data"] = [(key, text) for key, text in value["user_data"]]
            yield value


def trajectory_line(trajectory: Trajectory) -> bytes:
    """One line of JSON in UTF-8, LF at its end."""
    return line_of(content_of(trajectory), trajectory.get("user_data", []))


def content_digest(trajectory: Trajectory) -> bytes:
    """[16] bytes that are equal for trajectories to learn the same from, whatever else is known of them (`user_data`)."""
    return digest_of(trajectory, content_of(trajectory))


def content_of(trajectory: Trajectory) -> bytes:
    """All but `user_data`, as JSON. Key order is kept: templates print tools and arguments in that order.

    Raises `DataError` for what JSON in UTF-8 cannot hold: NaN, infinity, half of a surrogate pair, dates, bytes.
    """
    return _dumps({key: value for key, value in trajectory.items() if key != "user_data"})


def digest_of(trajectory: Trajectory, content: bytes) -> bytes:
    """[16] bytes: the start of the sha256 of `content_of`, without the weights of turns: they say how to learn, not what."""
    if b'"loss_weight"' in content:
        content = content_of(cast(Trajectory, {key: _unweighted(value) for key, value in trajectory.items()}))
    return hashlib.sha256(content).digest()[:16]


def _unweighted(value: Any) -> Any:
    if not isinstance(value, list):
        return value
    return [{key: inner for key, inner in item.items() if key != "loss_weight"} if isinstance(item, dict) else item for item in value]


def line_of(content: bytes, user_data: Sequence[tuple[str, str]]) -> bytes:
    """The line made of `content_of` and the user data."""
    if not user_data:
        return content + b"\n"
    return b'%s,"user_data":%s}\n' % (content[:-1], _dumps(user_data))


def _dumps(value: Any) -> bytes:
    try:
        made = orjson.dumps(value, option=_PLAIN)
        if b"null" not in made:
            return made
    except (TypeError, RecursionError):  # orjson's own error is a TypeError
        pass
    try:  # orjson writes NaN as null
        text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        half = ord(error.object[error.start])
        raise DataError(f"half of a surrogate pair (U+{half:04X}) in a text; no tokenizer can read it") from None
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(f"a value that JSON cannot hold: {error}") from None
