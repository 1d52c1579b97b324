"""Tokens a second that the DataLoader hands out as batches for training: from local shards, and from an S3 on this machine (moto, which
takes a part of the same cores) with an empty cache.

    .venv/bin/python bench/loader.py

Rows of 2048 tokens, shuffled, 8 to a batch, collated into torch tensors: every token is read.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
from peers.side_by_side import ROOT, print_table

from twinkle_core.config import PackingConfig, ShardConfig
from twinkle_core.dataloader import DataLoader
from twinkle_core.packing import plan
from twinkle_core.processor import InputProcessor
from twinkle_core.sharding import PackedDataset, ShardCache, write_shards
from twinkle_core.types import IGNORE, NoProgress

ROW_LENGTH, BATCH, ROWS_PER_SHARD, CACHE_BYTES, SHUFFLED_SHARDS = 2048, 8, 1024, 4 << 30, 4
TARGETS = {"local": 1_200_000, "S3": 300_000}


def write_samples(folder: Path, num_tokens: int) -> None:
    """As the encode stage writes them: log-normal lengths, random ids, the second half of each sample supervised."""
    import pyarrow as pa

    rng = np.random.default_rng(0)
    lengths = np.clip(rng.lognormal(5.4, 0.8, num_tokens // 200), 2, ROW_LENGTH).astype(np.int64)
    lengths = lengths[: int(np.searchsorted(np.cumsum(lengths), num_tokens)) + 1]
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.integers(0, 49_000, offsets[-1], dtype=np.int32)
    labels = np.append(ids[1:], np.int32(IGNORE))
    labels[np.arange(len(ids)) - np.repeat(offsets[:-1], lengths) < np.repeat(lengths // 2, lengths)] = IGNORE
    labels[offsets[1:] - 1] = IGNORE
    one_each = pa.array(np.arange(len(lengths) + 1, dtype=np.int32))
    batch = pa.record_batch(
        {
            "input_ids": pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(ids)),
            "labels": pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(labels)),
            "seq_lens": pa.ListArray.from_arrays(one_each, pa.array(lengths.astype(np.int32))),
            "kinds": pa.ListArray.from_arrays(one_each, pa.array(np.zeros(len(lengths), dtype=np.int8))),
            "loss_weights": pa.nulls(len(lengths), pa.large_list(pa.float32())),
            "row": pa.array(np.arange(len(lengths))),
        }
    )
    with pa.ipc.new_file(str(folder / "train-00000.arrow"), batch.schema) as writer:
        writer.write_batch(batch)


def tokens_per_second(open_rows: Callable[[], PackedDataset], num_workers: int, shuffle_shards: int | None) -> float:
    began = time.perf_counter()
    rows = open_rows()
    loader = DataLoader(rows, batch_size=BATCH, num_epochs=1, num_workers=num_workers, shuffle_shards=shuffle_shards)
    loader.set_processor(InputProcessor())
    num_tokens = sum(batch["input_ids"].numel() for batch in loader)
    assert num_tokens == rows.num_tokens.sum()
    return num_tokens / (time.perf_counter() - began)


def measure(shards: Path, scratch: Path, repetitions: int) -> list[list[object]]:
    sys.path.append(str(ROOT))
    from storage.store import open_store
    from storage.transfer import upload_folder
    from tests.servers import create_bucket, s3_server

    with s3_server() as settings:
        os.environ.update(settings)
        create_bucket(settings, "bench")
        store = open_store("s3://bench/store")
        files = upload_folder(store, shards, "data/shard")
        caches = iter(range(1_000_000))

        def remote() -> PackedDataset:
            return PackedDataset.open(store, "data/shard", files, ShardCache(scratch / f"cache-{next(caches)}", CACHE_BYTES))

        cases: list[tuple[str, str, Callable[[], PackedDataset], int, int | None]] = [
            ("local shards, mapped", "local", lambda: PackedDataset(shards), 0, None),
            ("local shards, mapped, 2 threads", "local", lambda: PackedDataset(shards), 2, None),
            (f"S3, empty cache, {SHUFFLED_SHARDS} shards shuffled at a time", "S3", remote, 0, SHUFFLED_SHARDS),
            (f"S3, empty cache, {SHUFFLED_SHARDS} shards shuffled at a time, 2 threads", "S3", remote, 2, SHUFFLED_SHARDS),
            ("S3, empty cache, all rows shuffled, 2 threads", "S3", remote, 2, None),
        ]
        rates: list[list[float]] = [[] for _ in cases]
        tokens_per_second(lambda: PackedDataset(shards), 0, None)  # imports torch
        for _ in range(repetitions):
            for found, (_, _, open_rows, num_workers, shuffle_shards) in zip(rates, cases, strict=True):
                found.append(tokens_per_second(open_rows, num_workers, shuffle_shards))
    medians = [statistics.median(found) for found in rates]
    return [[name, rate, rate / TARGETS[where]] for (name, where, *_), rate in zip(cases, medians, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=40_000_000)
    parser.add_argument("--repetitions", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        encoded, planned, shards = (Path(temporary) / name for name in ("encode", "pack", "shard"))
        for folder in (encoded, planned, shards):
            folder.mkdir()
        write_samples(encoded, options.tokens)
        plan(encoded, PackingConfig(row_length=ROW_LENGTH), planned, NoProgress())
        index = write_shards(encoded, planned, ShardConfig(rows_per_shard=ROWS_PER_SHARD), shards, NoProgress())
        lines = measure(shards, Path(temporary), options.repetitions)
    title = f"{index['num_tokens']:,} tokens in {index['num_rows']:,} rows and {len(index['shards'])} shards"
    print_table(f"{title}, medians of {options.repetitions}", ["what", "tokens/s", "times what is asked"], lines)


if __name__ == "__main__":
    main()
