"""Text formats of one row a line: JSON Lines and plain text.

A line ends at LF alone (a CR before it is dropped); U+2028 or a form feed inside a string ends nothing. Files are read in
blocks, so memory is bounded by the longest line. Lines of white space are no rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, BinaryIO

import orjson

from twinkle_core.errors import DataError
from twinkle_core.preprocessor.sources.data_file import BLOCK_BYTES, DataFile
from twinkle_core.preprocessor.sources.json_values import BOM, check_no_bom, decode_utf8, has_long_integers, parse_row
from twinkle_core.preprocessor.sources.place import OnBadRow, Place, Row


def line_blocks(stream: BinaryIO) -> Iterator[tuple[bytes, int, int]]:
    """(whole lines without the last LF, number of the first line from 1, its byte offset). A byte order mark at the start is dropped."""
    number, offset = 1, 0
    pending: list[bytes] = []
    while data := stream.read(BLOCK_BYTES):
        cut = data.rfind(b"\n")
        if cut < 0:
            pending.append(data)
            continue
        block = b"".join([*pending, data[:cut]])
        pending = [data[cut + 1 :]]
        yield _without_bom(block, number, offset)
        number += block.count(b"\n") + 1
        offset += len(block) + 1
    if rest := b"".join(pending):
        yield _without_bom(rest, number, offset)


def _without_bom(block: bytes, number: int, offset: int) -> tuple[bytes, int, int]:
    if offset == 0 and block.startswith(BOM):
        return block[len(BOM) :], number, len(BOM)
    return block, number, offset


def json_lines(file: DataFile, refuse: OnBadRow) -> Iterator[tuple[Place, Row]]:
    """One object a line."""
    name = file.name
    with file.reading() as stream:
        for block, first, offset in line_blocks(stream):
            exact = has_long_integers(block)
            for number, line in enumerate(block.split(b"\n"), first):
                row = None if exact else _read_fast(line)
                if type(row) is not dict and line.strip():
                    row = _read_exactly(line, offset, Place(name, "line", number), refuse)
                offset += len(line) + 1
                if row is not None:
                    yield Place(name, "line", number), row


def text_lines(file: DataFile, refuse: OnBadRow) -> Iterator[tuple[Place, Row]]:
    """One row {'text': line} a line, without its line end; so a document of many lines is one row for each."""
    name = file.name
    with file.reading() as stream:
        for block, first, offset in line_blocks(stream):
            for number, line in enumerate(block.split(b"\n"), first):
                text = _plain_text(line, offset, Place(name, "line", number), refuse) if line.strip() else None
                offset += len(line) + 1
                if text is not None:
                    yield Place(name, "line", number), {"text": text}


def _read_fast(line: bytes) -> Any:
    try:
        return orjson.loads(line)
    except orjson.JSONDecodeError:
        return None


def _read_exactly(line: bytes, offset: int, place: Place, refuse: OnBadRow) -> Row | None:
    try:
        return parse_row(line, offset)
    except DataError as error:
        refuse(place, str(error))
        return None


def _plain_text(line: bytes, offset: int, place: Place, refuse: OnBadRow) -> str | None:
    try:
        check_no_bom(line)
        return decode_utf8(line.removesuffix(b"\r"), offset)
    except DataError as error:
        refuse(place, str(error))
        return None
