"""A .json file: an array of objects, read item by item, or one object of arrays of one length, its columns.

Memory is bounded by the largest item of an array; an object of arrays is held whole, up to `MAX_OBJECT_BYTES`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any, BinaryIO

from twinkle_core.errors import DataError
from twinkle_core.preprocessor.sources.data_file import BLOCK_BYTES, DataFile, UnreadableFileError
from twinkle_core.preprocessor.sources.json_values import BOM, parse_json, parse_row, row_problem
from twinkle_core.preprocessor.sources.lines import json_lines
from twinkle_core.preprocessor.sources.place import OnBadRow, Place, Row

MAX_OBJECT_BYTES = 2 << 30
FORMS = "a .json file holds an array of objects, or one object of arrays of one length"

_SPACE = re.compile(rb"[ \t\r\n]*+")
_SCALAR = re.compile(rb"[^,\]\s]++")
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)
_TO_BRACKET = re.compile(rb'(?:[^"{}\[\]]++|' + _STRING.pattern + rb")*+[{}\[\]]", re.DOTALL)
"""Up to the next bracket that is in no string; no match where that is not there yet."""


def json_document(file: DataFile, refuse: OnBadRow) -> Iterator[tuple[Place, Row]]:
    """Rows in order, numbered from 1. Raises `UnreadableFileError` where the file as a whole has another form; none for an empty file."""
    with file.reading() as stream:
        text = _Window(stream)
        first = text.skip_space()
        try:
            if first == b"[":
                yield from _array_rows(text, file.name, refuse)
            elif first == b"{":
                value = text.take_value()
                if text.skip_space() == b"{" and file.loose_json:
                    yield from json_lines(file, refuse)
                else:
                    yield from _column_rows(value, text, file.name, refuse)
            elif first:
                raise _Malformed(f"{FORMS}; this one starts with {first!r}")
        except _Malformed as error:
            raise UnreadableFileError(f"{file.name}: {error}") from None


class _Malformed(DataError):
    """The file has not the form of its name."""


class _Window:
    """The bytes from `position` on that have been read so far; `offset` is where `data` starts in the file."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.data = stream.read(BLOCK_BYTES)
        self.position = len(BOM) if self.data.startswith(BOM) else 0
        self.offset = 0

    def more(self) -> bool:
        """Reads on, as much again as is held, and forgets what lies before `position`. False at the end of the file."""
        held = self.data[self.position :]
        read = self._stream.read(max(BLOCK_BYTES, len(held)))
        self.offset += self.position
        self.data, self.position = held + read, 0
        return bool(read)

    def skip_space(self) -> bytes:
        """The next byte that is no white space, b'' at the end; `position` is there."""
        while True:
            self.position = _SPACE.match(self.data, self.position).end()  # type: ignore[union-attr]
            if self.position < len(self.data):
                return self.data[self.position : self.position + 1]
            if not self.more():
                return b""

    def take_value(self) -> bytes:
        """The bytes of the value at `position`, which is moved behind it. Raises where the file ends inside it."""
        first = self.data[self.position : self.position + 1]
        end = self._nested_end() if first in (b"{", b"[") else self._string_end() if first == b'"' else self._scalar_end()
        value = self.data[self.position : end]
        self.position = end
        return value

    def _nested_end(self) -> int:
        depth, length = 0, 0
        while True:
            while found := _TO_BRACKET.match(self.data, self.position + length):
                length = found.end() - self.position
                depth += 1 if self.data[found.end() - 1] in b"{[" else -1
                if depth == 0:
                    return found.end()
            self._more_of_value()

    def _string_end(self) -> int:
        while (found := _STRING.match(self.data, self.position)) is None:
            self._more_of_value()
        return found.end()

    def _more_of_value(self) -> None:
        if not self.more():
            raise _Malformed(f"ends inside the value that starts at byte offset {self.offset + self.position}; is it cut off?")

    def _scalar_end(self) -> int:
        while True:
            found = _SCALAR.match(self.data, self.position)
            end = found.end() if found else self.position
            if end < len(self.data) or not self.more():
                return end


def _array_rows(text: _Window, name: str, refuse: OnBadRow) -> Iterator[tuple[Place, Row]]:
    text.position += 1
    number = 0
    after = text.skip_space()
    while after != b"]":
        number += 1
        place, offset = Place(name, "row", number), text.offset + text.position
        value = text.take_value()
        if not value:
            raise _Malformed(f"expected row {number} at byte offset {offset}")
        after = text.skip_space()
        row = _row(value, offset, place, refuse)
        if row is not None:
            yield place, row
        if after == b",":
            text.position += 1
            after = text.skip_space()
            if after == b"]":
                raise _Malformed(f"a comma after the last row, before byte offset {text.offset + text.position}")
        elif after != b"]":
            what = f"{after!r} at byte offset {text.offset + text.position}" if after else "the end of the file"
            raise _Malformed(f"expected ',' or ']' after row {number}, got {what}")
    text.position += 1
    if rest := text.skip_space():
        raise _Malformed(f"{FORMS}, and nothing behind it; got {rest!r} at byte offset {text.offset + text.position}")


def _row(value: bytes, offset: int, place: Place, refuse: OnBadRow) -> Row | None:
    try:
        return parse_row(value, offset)
    except DataError as error:
        refuse(place, str(error))
        return None


def _column_rows(value: bytes, text: _Window, name: str, refuse: OnBadRow) -> Iterator[tuple[Place, Row]]:
    if len(value) > MAX_OBJECT_BYTES:
        raise _Malformed(
            f"one object of {len(value)} bytes is more than the {MAX_OBJECT_BYTES} that are held in memory; write it as .jsonl"
        )
    if rest := text.skip_space():
        raise _Malformed(
            f"{FORMS}; got {rest!r} behind the first object, at byte offset {text.offset + text.position}: "
            "name the file .jsonl when it has one object a line"
        )
    columns = _columns(value)
    for number, values in enumerate(zip(*columns.values(), strict=True), 1):
        place, row = Place(name, "row", number), dict(zip(columns, values, strict=True))
        if (problem := row_problem(row)) is not None:
            refuse(place, problem)
        else:
            yield place, row


def _columns(data: bytes) -> dict[str, list[Any]]:
    try:
        value: dict[str, list[Any]] = parse_json(data)
    except DataError as error:
        raise _Malformed(str(error)) from None
    if not value:
        raise _Malformed(f"{FORMS}; this one is an empty object")
    for key, column in value.items():
        if not isinstance(column, list):
            raise _Malformed(f"{FORMS}; the value of key {key!r} is a {type(column).__name__}, not an array")
    lengths = {key: len(column) for key, column in value.items()}
    if len(set(lengths.values())) > 1:
        raise _Malformed(f"{FORMS}; the arrays have the lengths {lengths}")
    return value
