"""CSV (https://www.rfc-editor.org/rfc/rfc4180): a header row, comma, double quotes; every value stays the text that it is.

A quoted value may hold line ends. An empty value is '', not null: what a column means is not guessed.
"""

from __future__ import annotations

import csv
import io
import sys
from collections.abc import Iterator
from typing import BinaryIO

from twinkle_core.errors import DataError
from twinkle_core.preprocessor.sources.data_file import DataFile, UnreadableFileError
from twinkle_core.preprocessor.sources.json_values import check_no_bom, decode_utf8
from twinkle_core.preprocessor.sources.lines import line_blocks
from twinkle_core.preprocessor.sources.place import OnBadRow, Place, Row


def csv_rows(file: DataFile, refuse: OnBadRow) -> Iterator[tuple[Place, Row]]:
    """Rows at the line they start on. Raises `UnreadableFileError` for a header that names a column twice or cannot be read."""
    csv.field_size_limit(sys.maxsize)  # of the process; the default, 131,072, is less than one long document
    with file.reading() as stream:
        problems: list[str] = []
        reader = csv.reader(_lines(stream, problems), strict=True)
        header = _header(reader, problems, file.name)
        while header:
            line = reader.line_num + 1
            problem = None
            try:
                values = next(reader, None)
            except csv.Error as error:
                values, problem = [], f"not valid CSV: {error}"
            if values is None:
                return
            if problem is None and (not values or (len(values) == 1 < len(header) and not values[0].strip())):
                continue
            if problems:
                problem = problems[0]
                problems.clear()
            if problem is None and len(values) != len(header):
                problem = f"{len(values)} values under a header of {len(header)}; is a quote or comma wrong?"
            if problem is None:
                yield Place(file.name, "line", line), dict(zip(header, values, strict=True))
            else:
                refuse(Place(file.name, "line", line), problem)


def _header(reader: Iterator[list[str]], problems: list[str], name: str) -> list[str]:
    """The names of the columns, [] for a file without any."""
    try:
        header = next((values for values in reader if any(value.strip() for value in values)), [])
    except csv.Error as error:
        raise UnreadableFileError(f"{name}: the header is not valid CSV: {error}") from None
    if problems:
        raise UnreadableFileError(f"{name}: the header is {problems[0]}")
    if twice := sorted({column for column in header if header.count(column) > 1}):
        raise UnreadableFileError(f"{name}: the header names the column {twice[0]!r} twice")
    return header


def _lines(stream: BinaryIO, problems: list[str]) -> Iterator[str]:
    """Lines with their ends, as csv wants them. What is wrong with a line's bytes is put into `problems` just before it comes."""
    for block, _, offset in line_blocks(stream):
        try:
            text = decode_utf8(block)
        except DataError:
            text = "\ufeff"
        if "\ufeff" not in text:
            yield from io.StringIO(text + "\n", newline="\n")
            continue
        for line in block.split(b"\n"):
            try:
                check_no_bom(line)
                decode_utf8(line, offset)
            except DataError as error:
                problems.append(str(error))
            offset += len(line) + 1
            yield line.decode("utf-8", errors="replace") + "\n"
