"""A source of files: one, many, a folder or a glob, of any of the known types."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property

from storage.fingerprint import fingerprint
from twinkle_core.errors import DataError
from twinkle_core.preprocessor.sources.columnar import arrow_rows, parquet_rows
from twinkle_core.preprocessor.sources.csv_table import csv_rows
from twinkle_core.preprocessor.sources.data_file import DataFile, UnreadableFileError
from twinkle_core.preprocessor.sources.find import check_address, find_files
from twinkle_core.preprocessor.sources.json_document import json_document
from twinkle_core.preprocessor.sources.lines import json_lines, text_lines
from twinkle_core.preprocessor.sources.place import OnBadRow, Place, Row, raising

READERS: dict[str, Callable[[DataFile, OnBadRow], Iterator[tuple[Place, Row]]]] = {
    "jsonl": json_lines,
    "json": json_document,
    "csv": csv_rows,
    "parquet": parquet_rows,
    "arrow": arrow_rows,
    "text": text_lines,
}


class FileSource:
    """The rows of files, one file after the other. Which files there are is looked up at the first use, and then stays."""

    def __init__(self, name: str, *uris: str) -> None:
        self.name, self.uris = name, uris
        for uri in uris:
            check_address(name, uri)

    @cached_property
    def files(self) -> list[DataFile]:
        """In the order of the addresses, and of names below each. Raises as `find_files` does."""
        return distinctly_named([file for uri in self.uris for file in find_files(self.name, uri)], self.uris)

    def digest(self) -> str:
        return digest_of(self.files)

    def rows(self, on_bad_row: OnBadRow | None = None) -> Iterator[tuple[Place, Row]]:
        """Rows as `Source` says. Raises `DataError` when there are none at all, and for a file that is damaged as a whole."""
        return rows_of(self.name, self.files, on_bad_row or raising(self.name))


def digest_of(files: list[DataFile]) -> str:
    """sha256 hex over type and sha256 of each file, in order. Names do not enter it."""
    return fingerprint([[file.type.format, file.type.compression, file.digest()] for file in files])


def rows_of(source: str, files: list[DataFile], refuse: OnBadRow) -> Iterator[tuple[Place, Row]]:
    """The rows of all files. A file without rows is fine beside others that have some."""
    found = False
    for file in files:
        try:
            for place, row in READERS[file.type.format](file, refuse):
                found = True
                yield place, row
        except UnreadableFileError as error:
            raise DataError(f"source '{source}', {error}") from error
    if not found:
        names = ", ".join(file.name for file in files[:3]) + (", …" if len(files) > 3 else "")
        raise DataError(f"source '{source}': no rows in {names}; it is empty or holds only blank or refused lines")


def distinctly_named(files: list[DataFile], uris: tuple[str, ...]) -> list[DataFile]:
    """The files, those of one name told apart by the position of their address: 'a.jsonl (2)'."""
    counts = Counter(file.name for file in files)
    if len(uris) == 1 or max(counts.values()) == 1:
        return files
    seen: Counter[str] = Counter()
    named = []
    for file in files:
        seen[file.name] += 1
        named.append(replace(file, name=f"{file.name} ({seen[file.name]})") if counts[file.name] > 1 else file)
    return named
