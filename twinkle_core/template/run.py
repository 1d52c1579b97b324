"""The encode stage: train.jsonl and held_out.jsonl -> train.arrow and held_out.arrow, token ids and labels, and report.json."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from twinkle_core.errors import DataError
from twinkle_core.preprocessor.run import read_trajectories
from twinkle_core.template.base import Outcome, Template
from twinkle_core.types import EncodedSample, Progress, user_data_get

VERSION = 1
"""Raised when the same rows and settings would give other files."""

BATCH = 256
"""Conversations tokenized in one call, and the documents of one Arrow record batch at most."""


def encode(in_folder: Path, template: Template, out: Path, progress: Progress) -> dict[str, Any]:
    """Writes train.arrow, held_out.arrow and report.json into `out`; returns the report.

    Columns: input_ids, labels (large_list<int32>), row (int64: which line of the .jsonl file it was, from 0).

    Raises `DataError` naming file and line for a conversation that cannot be encoded, and when no training document is left.
    """
    report = {side: _encode_file(in_folder / f"{side}.jsonl", template, out / f"{side}.arrow", progress) for side in ("train", "held_out")}
    if not report["train"]["documents"]:
        raise DataError(f"no document is left to train on: {report['train']['dropped']} dropped; raise max_length or look at the data")
    (out / "report.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    return report


def _encode_file(source: Path, template: Template, target: Path, progress: Progress) -> dict[str, Any]:
    import pyarrow as pa

    report: dict[str, Any] = {
        "conversations": 0, "documents": 0, "tokens": 0, "supervised_tokens": 0, "longest": 0,
        "truncated": 0, "truncated_tokens": 0, "dropped": {"too_long": 0, "no_loss": 0},
        "unprinted_tools": 0,
    }  # fmt: skip
    progress.start(f"encode {source.stem}", None, "conversations")
    schema = pa.schema([("input_ids", pa.large_list(pa.int32())), ("labels", pa.large_list(pa.int32())), ("row", pa.int64())])
    with pa.OSFile(str(target), "wb") as sink, pa.ipc.new_file(sink, schema) as writer:
        for outcomes in _batches(source, template):
            samples = [outcome.sample for outcome in outcomes if outcome.sample is not None]
            rows = [row for row, outcome in enumerate(outcomes, start=report["conversations"]) if outcome.sample is not None]
            _count(report, outcomes)
            if samples:
                columns = [*(_column(samples, name) for name in ("input_ids", "labels")), pa.array(rows, pa.int64())]
                writer.write_batch(pa.record_batch(columns, schema=schema))
            progress.advance(len(outcomes), tokens=report["tokens"])
    return report


def _batches(source: Path, template: Template) -> Iterator[list[Outcome]]:
    rows = read_trajectories(source)
    done = 0
    while batch := list(islice(rows, BATCH)):
        try:
            yield template.outcomes(batch)
        except DataError as error:
            place, reason = str(error).split(": ", 1)
            row = int(place.removeprefix("conversation "))
            origin = user_data_get(batch[row - 1], "source", "unnamed")
            raise DataError(f"{source.name}, line {done + row}: {reason} (source '{origin}')") from None
        done += len(batch)


def _count(report: dict[str, Any], outcomes: list[Outcome]) -> None:
    report["conversations"] += len(outcomes)
    for outcome in outcomes:
        report["unprinted_tools"] += outcome.unprinted_tools
        if outcome.sample is None:
            report["dropped"][outcome.dropped] += 1
            continue
        length = len(outcome.sample.input_ids)
        report["documents"] += 1
        report["tokens"] += length
        report["supervised_tokens"] += outcome.sample.num_loss_tokens
        report["longest"] = max(report["longest"], length)
        report["truncated"] += outcome.num_tokens > length
        report["truncated_tokens"] += outcome.num_tokens - length


def _column(samples: list[EncodedSample], name: str) -> Any:
    import pyarrow as pa

    arrays = [getattr(sample, name) for sample in samples]
    offsets = np.concatenate([[0], np.cumsum([len(array) for array in arrays])]).astype(np.int64)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(np.concatenate(arrays)))
