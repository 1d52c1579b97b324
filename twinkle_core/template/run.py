"""The encode stage: train.jsonl and held_out.jsonl -> train-00000.arrow …, held_out-00000.arrow …, and report.json.

Memory: at most `IN_FLIGHT_BYTES` of text per process with the tokens made of it (about 30 bytes for a byte of text, while it is
tokenized 200), whatever the size of the input; a row larger than that is alone in flight.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np

from twinkle_core.config import TemplateConfig
from twinkle_core.errors import DataError
from twinkle_core.template.lines import BadRow, EncodeLines, Encodes, SampleColumns, add_counts, new_counts
from twinkle_core.template.processes import ProcessMap, available_cores
from twinkle_core.types import KeepParts, PartSink, Progress

VERSION = 5
"""Raised when the same rows and settings would give other files."""

PART_ROWS = 32768
"""Lines of the .jsonl file that one Arrow file covers."""
BATCH_ROWS = 384
"""Most lines that are tokenized in one call; their samples are one Arrow record batch."""
BATCH_BYTES = 1 << 20
"""Most text of such a batch, unless a single line is larger."""
PROCESS_BYTES = 512 << 10
"""Text that makes one more process worth its start, which takes about as long as encoding so much."""
THREAD_BYTES = 16 << 20
"""Up to so much text a thread of this process stands in for one of the others: its start would cost more than sharing the lock."""
_READ_BYTES = 1 << 20

Side = Literal["train", "held_out"]
SIDES: tuple[Side, ...] = ("train", "held_out")


class EncodingTemplate(Protocol):
    """What the stage needs of a template."""

    config: TemplateConfig

    def encoder(self) -> Encodes: ...


@dataclass(frozen=True, kw_only=True)
class _Part:
    """One file to make."""

    source: Path
    first_line: int
    """From 0."""
    num_lines: int
    start: int
    """Byte where its first line starts."""
    end: int
    name: str


def encode(
    in_folder: Path, template: EncodingTemplate, out: Path, progress: Progress, *, parts: PartSink | None = None, part_rows: int = PART_ROWS
) -> dict[str, Any]:
    """Writes SIDE-00000.arrow … for each side, and report.json, into `out`; returns the report.

    Columns: input_ids, labels (large_list<int32>), seq_lens (list<int32>), kinds (list<int8>), loss_weights (large_list<float32>,
    null where a sample has none), row (int64: which line of the .jsonl file it was, from 0). The bytes do not depend on the
    number of processes. A part that `parts` has already is not made again.

    Raises `DataError` naming file, line and source for a row that cannot be encoded, and when nothing is left to train on;
    `WorkerLostError` when an encoding process is killed.
    """
    sink = parts or KeepParts()
    planned = {side: _plan(in_folder / f"{side}.jsonl", part_rows) for side in SIDES}
    progress.start("encode", sum(part.num_lines for side in SIDES for part in planned[side]), "conversations")
    facts: dict[str, dict[str, Any]] = {}
    missing: list[_Part] = []
    for part in (part for side in SIDES for part in planned[side]):
        found = sink.finished(part.name)
        if found is None:
            missing.append(part)
        else:
            facts[part.name] = found
            progress.advance(part.num_lines)
    facts |= _encode_parts(missing, template, out, progress, sink)
    report: dict[str, Any] = {side: _sum(planned[side], facts) for side in SIDES}
    if not report["train"]["samples"]:
        left_out = {name: report["train"][name] for name in ("dropped", "refused")}
        raise DataError(f"no document is left to train on: {json.dumps(left_out)}; raise max_length or look at the data")
    (out / "report.json").write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return report


def _sum(parts: list[_Part], facts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    total = new_counts()
    for part in parts:
        add_counts(total, facts[part.name], part.first_line)
    return total


def _plan(source: Path, part_rows: int) -> list[_Part]:
    """The parts of a file; one without lines has one part."""
    starts, num_lines, num_bytes = [0], 0, 0
    ends_in_line = False
    with source.open("rb") as file:
        while block := file.read(_READ_BYTES):
            found = block.count(b"\n")
            wanted = len(starts) * part_rows
            if num_lines + found >= wanted:
                at = np.flatnonzero(np.frombuffer(block, dtype=np.uint8) == ord("\n"))
                starts += [num_bytes + int(at[line - num_lines - 1]) + 1 for line in range(wanted, num_lines + found + 1, part_rows)]
            num_lines += found
            num_bytes += len(block)
            ends_in_line = not block.endswith(b"\n")
    num_lines += ends_in_line
    starts = starts[: max(-(-num_lines // part_rows), 1)]
    return [
        _Part(
            source=source,
            first_line=number * part_rows,
            num_lines=min(part_rows, num_lines - number * part_rows),
            start=start,
            end=end,
            name=f"{source.stem}-{number:05d}.arrow",
        )
        for number, (start, end) in enumerate(zip(starts, [*starts[1:], num_bytes], strict=True))
    ]


def _encode_parts(parts: list[_Part], template: EncodingTemplate, out: Path, progress: Progress, sink: PartSink) -> dict[str, Any]:
    """Makes these parts, one after the other in the same processes; their reports by name."""
    num_bytes = sum(part.end - part.start for part in parts)
    num_proc = min(template.config.num_proc or available_cores(), 1 + num_bytes // PROCESS_BYTES)
    rate = _Rate(progress)
    facts = {}
    with ProcessMap(EncodeLines(encoder=template.encoder()), num_proc, thread=num_bytes <= THREAD_BYTES) as encoded:
        results = encoded(batch for part in parts for batch in _batches(part))
        for part in parts:
            facts[part.name] = _write_part(part, results, out / part.name, rate)
            sink.add(out / part.name, facts[part.name])
    return facts


def _batches(part: _Part) -> Iterator[bytes]:
    with part.source.open("rb") as file:
        file.seek(part.start)
        lines: list[bytes] = []
        num_bytes = 0
        for line in islice(file, part.num_lines):
            if lines and (len(lines) == BATCH_ROWS or num_bytes + len(line) > BATCH_BYTES):
                yield b"".join(lines)
                lines, num_bytes = [], 0
            lines.append(line)
            num_bytes += len(line)
        if lines:
            yield b"".join(lines)


def _write_part(part: _Part, results: Iterator[SampleColumns | BadRow], target: Path, rate: _Rate) -> dict[str, Any]:
    import pyarrow as pa

    counts = new_counts()
    with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_file(sink, _schema()) as writer:
        while counts["conversations"] < part.num_lines:
            done = counts["conversations"]
            made = next(results)
            if isinstance(made, BadRow):
                where = f"{part.source.name}, line {part.first_line + done + made.row + 1}"
                raise DataError(f"{where}: {made.reason}" + (f" (source '{made.source}')" if made.source is not None else ""))
            if len(made.num_tokens):
                writer.write_batch(_record_batch(made, part.first_line + done))
            add_counts(counts, made.counts, done)
            rate.advance(made.counts)
    return counts


def _record_batch(made: SampleColumns, first_row: int) -> Any:
    import pyarrow as pa

    tokens = pa.array(_offsets(made.num_tokens))
    documents = pa.array(_offsets(made.num_documents).astype(np.int32))
    weights = pa.array(_offsets(made.num_tokens * made.weighted))
    columns = [
        pa.LargeListArray.from_arrays(tokens, pa.array(made.input_ids)),
        pa.LargeListArray.from_arrays(tokens, pa.array(made.labels)),
        pa.ListArray.from_arrays(documents, pa.array(made.seq_lens)),
        pa.ListArray.from_arrays(documents, pa.array(made.kinds)),
        pa.LargeListArray.from_arrays(weights, pa.array(made.loss_weights), mask=pa.array(~made.weighted)),
        pa.array(made.rows + first_row),
    ]
    return pa.record_batch(columns, schema=_schema())


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)


def _schema() -> Any:
    import pyarrow as pa

    tokens = pa.large_list(pa.int32())
    return pa.schema(
        [
            ("input_ids", tokens),
            ("labels", tokens),
            ("seq_lens", pa.list_(pa.int32())),
            ("kinds", pa.list_(pa.int8())),
            ("loss_weights", pa.large_list(pa.float32())),
            ("row", pa.int64()),
        ]
    )


class _Rate:
    """Progress with rows a second, of what this computation has encoded itself."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._rows, self._tokens, self._began = progress, 0, 0, time.monotonic()

    def advance(self, counts: dict[str, Any]) -> None:
        self._rows += counts["conversations"]
        self._tokens += counts["tokens"]
        seconds = max(time.monotonic() - self._began, 1e-9)
        self._progress.advance(counts["conversations"], tokens=self._tokens, **{"rows/s": self._rows / seconds})
