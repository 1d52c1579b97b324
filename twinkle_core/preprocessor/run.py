"""The preprocess stage: source rows -> train.jsonl and held_out.jsonl, one `Trajectory` a line, and report.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO

from twinkle_core.config import DataConfig, SourceConfig
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.preprocessor.formats import convert, detect, unused_keys
from twinkle_core.preprocessor.self_cognition import build_preprocessor
from twinkle_core.preprocessor.sources import open_source, parse_json
from twinkle_core.preprocessor.split import split
from twinkle_core.types import Progress, Trajectory

VERSION = 1
"""Raised when the same sources and settings would give other files."""

MAX_LISTED = 20
"""Skipped rows listed in the report, per source; all are counted."""


def preprocess(data: DataConfig, out: Path, progress: Progress) -> dict[str, Any]:
    """Writes train.jsonl, held_out.jsonl and report.json into the existing folder `out`; returns the report.

    Raises `DataError` naming source and line for a row that cannot be converted (unless `on_bad_row` is 'skip'), and
    when nothing is left to train on; `ConfigError` for a source or processor that cannot be built.
    """
    readers = [_SourceReader(source, skip=data.on_bad_row == "skip") for source in data.sources]
    progress.start("preprocess", None, "rows")
    converted = out / "converted.jsonl.partial"
    digests: list[list[bytes]] = []
    with converted.open("wb") as file:
        for reader in readers:
            digests.append([])
            for trajectory in reader.trajectories():
                digests[-1].append(content_digest(trajectory))
                file.write(trajectory_line(trajectory))
                progress.advance()
    held_out = split(digests, [source.held_out for source in data.sources], data.split_seed)
    for reader, mask in zip(readers, held_out, strict=True):
        reader.report |= {"train": int((~mask).sum()), "held_out": int(mask.sum())}
    _write_sides(converted, [flag for mask in held_out for flag in mask.tolist()], out)
    report = {
        "train": sum(reader.report["train"] for reader in readers),
        "held_out": sum(reader.report["held_out"] for reader in readers),
        "sources": {reader.config.name: reader.report for reader in readers},
    }
    if not report["train"]:
        raise DataError(f"no rows left to train on: {json.dumps(report, ensure_ascii=False)}")
    (out / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return report


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
    """One line of JSON in UTF-8, LF at its end. Key order is kept: templates print tools and arguments in that order."""
    return json.dumps(trajectory, ensure_ascii=False, allow_nan=False).encode("utf-8") + b"\n"


def content_digest(trajectory: Trajectory) -> bytes:
    """[16] bytes that are equal for rows with the same messages and tools, whatever else is known of them."""
    content = {"messages": trajectory["messages"], "tools": trajectory.get("tools", [])}
    return hashlib.sha256(json.dumps(content, ensure_ascii=False, sort_keys=True).encode("utf-8")).digest()[:16]


def _write_sides(converted: Path, held_out: list[bool], out: Path) -> None:
    with converted.open("rb") as file, (out / "train.jsonl").open("wb") as train, (out / "held_out.jsonl").open("wb") as kept:
        sides: tuple[BinaryIO, BinaryIO] = (train, kept)
        for line, flag in zip(file, held_out, strict=True):
            sides[flag].write(line)
    converted.unlink()


class _SourceReader:
    """Converts the rows of one source and keeps the count of what happened to them."""

    def __init__(self, config: SourceConfig, *, skip: bool) -> None:
        self.config, self.skip = config, skip
        self.source = open_source(config)
        self.processor = build_preprocessor(config.processor, config.processor_args)
        if config.uri == "builtin://self_cognition" and self.processor is None:
            raise ConfigError(
                f"source '{config.name}': builtin://self_cognition holds the placeholders {{name}} and {{author}}; "
                "set processor to SelfCognitionProcessor with processor_args name and author"
            )
        self.format: str = config.format
        self.report: dict[str, Any] = {"rows": 0, "format": config.format, "skipped": 0, "skipped_rows": [], "ignored_keys": {}}

    def trajectories(self) -> Iterator[Trajectory]:
        """Converted rows; a bad one raises, or is counted and listed."""
        for number, row in islice(self.source.rows(self._refuse), self.config.limit):
            try:
                trajectory = self._convert(row)
            except DataError as error:
                self._refuse(number, str(error))
                continue
            self.report["rows"] += 1
            for key in unused_keys(row, self.format):
                self.report["ignored_keys"][key] = self.report["ignored_keys"].get(key, 0) + 1
            yield trajectory
        if not self.report["rows"]:
            skipped = self.report["skipped_rows"]
            raise DataError(f"source '{self.config.name}': none of its {self.report['skipped']} rows can be used: {skipped}")

    def _convert(self, row: dict[str, Any]) -> Trajectory:
        row = self.processor(row) if self.processor else row
        if self.format == "auto":
            self.format = self.report["format"] = detect(row)
        trajectory = convert(row, self.format)
        if self.processor:
            trajectory = self.processor.annotate(trajectory)
        return {**trajectory, "user_data": [("source", self.config.name), *trajectory.get("user_data", [])]}

    def _refuse(self, number: int, reason: str) -> None:
        place = self.source.place
        if not self.skip:
            where = f"source '{self.config.name}' ({self.config.uri}), {place} {number}"
            raise DataError(f"{where}: {reason} (on_bad_row='skip' would count and leave out such rows)")
        self.report["skipped"] += 1
        if len(self.report["skipped_rows"]) < MAX_LISTED:
            self.report["skipped_rows"].append({place: number, "reason": reason})
