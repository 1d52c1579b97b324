"""JSON values, exactly: all digits of integers, no NaN or infinity, UTF-8 only, no half surrogate pairs.

orjson reads what it reads as the json module does, but for integers past 64 bits, which it rounds to floats. It refuses
invalid UTF-8, half surrogates, NaN and numbers past the range of a float. So its value stands where the text has no run of
19 digits; all else is read by the json module, for the exact value or the exact complaint. Of a key given twice in one
object the last value counts, as in both parsers.
"""

from __future__ import annotations

import json
import math
from typing import Any

import orjson

from twinkle_core.errors import DataError
from twinkle_core.preprocessor.sources.place import Row

BOM = b"\xef\xbb\xbf"
LONG_RUN = b"0" * 19
"""The smallest integer outside of 64 bits, -9223372036854775809, has 19 digits."""

_DIGITS_AS_ZERO = bytes(ord("0") if chr(code).isdecimal() and code < 128 else ord(" ") for code in range(256))
_UNREAD = object()


def has_long_integers(data: bytes) -> bool:
    """Whether `data` holds a run of digits that may not fit 64 bits (ten times as fast as a regular expression)."""
    return LONG_RUN in data.translate(_DIGITS_AS_ZERO)


def parse_json(data: bytes, offset: int = 0) -> Any:
    """The JSON value of UTF-8 `data`, which starts at byte `offset` of its file. Integers keep all their digits; NaN is refused.

    Raises `DataError` with the reason. A half surrogate pair passes, for `row_problem` to tell.
    """
    value = _read_fast(data)
    return _read_exactly(data, offset) if value is _UNREAD else value


def parse_row(data: bytes, offset: int = 0) -> Row:
    """As `parse_json`, for a row. Raises `DataError` with the reason for anything that is no row."""
    value = _read_fast(data)
    if type(value) is dict:
        return value  # proven by the parser
    if value is _UNREAD:
        value = _read_exactly(data, offset)
    if (problem := row_problem(value)) is not None:
        raise DataError(problem)
    row: Row = value
    return row


def row_problem(row: Any) -> str | None:
    """Why a parsed `row` cannot be used at all, or None."""
    if not isinstance(row, dict):
        return f"a row is an object, got {type(row).__name__}"
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        return f"half of a surrogate pair (U+{ord(error.object[error.start]):04X}) in a string; no tokenizer can read it"
    except RecursionError:
        return "nested too deeply"
    return None


def check_no_bom(data: bytes) -> None:
    """Raises `DataError` where a row starts with a byte order mark; that of the file's start is gone by then."""
    if data.startswith(BOM):
        raise DataError("a byte order mark in the middle of the file (two files glued together?); remove it")


def decode_utf8(data: bytes, offset: int = 0) -> str:
    """The text of `data`. Raises `DataError` with the byte and its offset in the file."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        wrong = f"byte 0x{data[error.start]:02x} at byte offset {offset + error.start}"
        raise DataError(f"not UTF-8: {wrong}; convert the file to UTF-8") from None


def _read_fast(data: bytes) -> Any:
    if has_long_integers(data):
        return _UNREAD
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return _UNREAD


def _read_exactly(data: bytes, offset: int) -> Any:
    check_no_bom(data)
    text = decode_utf8(data, offset)
    try:
        return json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise DataError(f"not valid JSON: {error}") from None


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text[:40]} is past the range of a 64-bit float")
    return value
