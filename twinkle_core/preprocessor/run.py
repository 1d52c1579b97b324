"""The preprocess stage: source rows -> train.jsonl and held_out.jsonl, one `Trajectory` a line, and report.json."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from twinkle_core.config import DataConfig
from twinkle_core.errors import DataError
from twinkle_core.preprocessor.base import DataFilter
from twinkle_core.preprocessor.dedup import SignatureWriter, near_repeated, open_signatures
from twinkle_core.preprocessor.lines import digest_of, line_of, read_trajectories, trajectory_line
from twinkle_core.preprocessor.mix import mix
from twinkle_core.preprocessor.reader import SourceReader
from twinkle_core.preprocessor.registry import build_filter
from twinkle_core.preprocessor.sources import Source
from twinkle_core.preprocessor.split import repeated, split
from twinkle_core.types import Progress

__all__ = ["VERSION", "preprocess", "read_trajectories", "trajectory_line"]

VERSION = 4
"""Raised when the same sources and settings would give other files."""
TRAIN, HELD_OUT, DUPLICATE = 0, 1, 2


def preprocess(
    data: DataConfig,
    out: Path,
    progress: Progress,
    *,
    cache: Path | None = None,
    trusted_code: Path | None = None,
    sources: Mapping[str, Source] | None = None,
) -> dict[str, Any]:
    """Writes train.jsonl, held_out.jsonl and report.json into the existing folder `out`; returns the report.

    Each row goes through: columns renamed, processor, conversion, filters; then duplicates are left out (the first of
    equals stays, whatever its source), rows are held out by their content, and those to learn from are mixed. Held-out
    rows are not mixed. What became of each row is counted: for each source `rows` is the sum of skipped, dropped,
    filtered, duplicates, left_out, train and held_out. Rows stream: at most about 130 bytes of a row are held in memory,
    with `dedup` 'minhash' about 70 more, and 512 on disk.

    `sources` takes the place of those that `data` names by uri.
    Raises `DataError` naming source and row for one that cannot be converted (unless `on_bad_row` is 'skip'), and
    when nothing is left to train on; `ConfigError` for a source, processor or filter that cannot be built.
    """
    filters = _filters(data, trusted_code)
    readers = [
        SourceReader(
            config,
            filters,
            skip=data.on_bad_row == "skip",
            source=(sources or {}).get(config.name),
            cache=cache,
            trusted_code=trusted_code,
        )
        for config in data.sources
    ]
    progress.start("preprocess", None, "rows")
    digests = _convert(readers, out, progress, near=data.dedup == "minhash")
    _check_filters(readers, filters)
    sides = _sides(data, digests, out)
    del digests
    _write_sides(data, readers, sides, out)
    report = {
        "train": sum(reader.counts.train for reader in readers),
        "held_out": sum(reader.counts.held_out for reader in readers),
        "sources": {reader.config.name: reader.counts.report(reader.format) for reader in readers},
    }
    if not report["train"]:
        raise DataError(f"no rows left to train on: {json.dumps(report, ensure_ascii=False)}")
    (out / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return report


def _filters(data: DataConfig, trusted_code: Path | None) -> dict[str, DataFilter]:
    """The filters by the names they have in the report; the second of a name is called NAME 2."""
    filters: dict[str, DataFilter] = {}
    for config in data.filters:
        count = sum(other.partition(" ")[0] == config.name for other in filters)
        name = f"{config.name} {count + 1}" if count else config.name
        filters[name] = build_filter(config.name, config.args, trusted_code)
    return filters


def _convert(readers: Sequence[SourceReader], out: Path, progress: Progress, *, near: bool) -> list[np.ndarray]:
    """Writes each source's trajectories to a file of its own; gives their digests, [N, 2] uint64 each."""
    found: list[np.ndarray] = []
    with ExitStack() as stack:
        signatures = SignatureWriter(stack.enter_context(_signatures(out).open("wb"))) if near else None
        for index, reader in enumerate(readers):
            digests = bytearray()
            with _part(out, index).open("wb") as file:
                origin = ("source", reader.config.name)
                for trajectory, content in reader.trajectories(progress):
                    digests += digest_of(trajectory, content)
                    file.write(line_of(content, [origin, *trajectory.get("user_data", [])]))
                    if signatures:
                        signatures.add(trajectory)
            found.append(np.frombuffer(digests, dtype=">u8").astype(np.uint64).reshape(-1, 2))
        if signatures:
            signatures.flush()
    return found


def _check_filters(readers: Sequence[SourceReader], filters: Mapping[str, DataFilter]) -> None:
    """A filter that lets nothing through was meant otherwise."""
    reached = sum(reader.counts.rows - reader.counts.skipped - reader.counts.dropped for reader in readers)
    for name in filters:
        out = sum(reader.counts.filtered[name] for reader in readers)
        if reached and out == reached:
            raise DataError(f"filter '{name}' keeps none of the {reached} rows that reach it; change its args or leave it out")
        reached -= out


def _sides(data: DataConfig, digests: Sequence[np.ndarray], out: Path) -> list[np.ndarray]:
    """For each source [N] int8: what becomes of its rows, TRAIN, HELD_OUT or DUPLICATE."""
    out_mask = np.zeros(sum(len(own) for own in digests), dtype=bool)
    if data.dedup != "none":
        out_mask = repeated(np.concatenate(digests))
    if data.dedup == "minhash":
        out_mask |= near_repeated(open_signatures(_signatures(out)), data.dedup_similarity, out_mask)
        _signatures(out).unlink()
    ends = np.cumsum([len(own) for own in digests])
    left_out = np.split(out_mask, ends[:-1])
    kept = [own[~mask] for own, mask in zip(digests, left_out, strict=True)]
    sides = []
    for mask, held_out in zip(left_out, split(kept, [source.held_out for source in data.sources], data.split_seed), strict=True):
        side = np.full(len(mask), DUPLICATE, dtype=np.int8)
        side[~mask] = np.where(held_out, HELD_OUT, TRAIN)
        sides.append(side)
    return sides


def _write_sides(data: DataConfig, readers: Sequence[SourceReader], sides: Sequence[np.ndarray], out: Path) -> None:
    for reader, side in zip(readers, sides, strict=True):
        reader.counts.held_out, reader.counts.duplicates = int((side == HELD_OUT).sum()), int((side == DUPLICATE).sum())
    with (out / "held_out.jsonl").open("wb") as file:
        for index, side in enumerate(sides):
            file.writelines(_lines(out, index, side, HELD_OUT))
    there = [int((side == TRAIN).sum()) for side in sides]
    with (out / "train.jsonl").open("wb") as file:
        if data.mix == "concatenate":
            for index, side in enumerate(sides):
                file.writelines(_lines(out, index, side, TRAIN))
            taken = there
        else:
            if data.mix == "weighted" and 0 in there:
                name = readers[there.index(0)].config.name
                raise DataError(f"mix 'weighted': source '{name}' has no rows to learn from, so no mix can keep its share; leave it out")
            taken = [0] * len(there)
            lines = [_lines(out, index, side, TRAIN) for index, side in enumerate(sides)]
            for source in mix(there, data.mix, [config.weight for config in data.sources]):
                file.write(next(lines[source]))
                taken[source] += 1
    for index, reader in enumerate(readers):
        reader.counts.train, reader.counts.left_out = taken[index], there[index] - taken[index]
        _part(out, index).unlink()


def _lines(out: Path, index: int, side: np.ndarray, wanted: int) -> Iterator[bytes]:
    with _part(out, index).open("rb") as file:
        for start in range(0, len(side), 1 << 16):
            flags = (side[start : start + (1 << 16)] == wanted).tolist()
            yield from (line for line, flag in zip(islice(file, len(flags)), flags, strict=True) if flag)


def _part(out: Path, index: int) -> Path:
    return out / f"converted-{index:05}.jsonl.partial"


def _signatures(out: Path) -> Path:
    return out / "signatures.partial"
