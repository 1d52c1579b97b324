"""Trajectories that are nearly the same, by MinHash (https://doi.org/10.1109/SEQUEN.1997.666900) through rensa.

rensa (https://github.com/beowolx/rensa) makes the signatures: on one core 18 times as many a second as datasketch, from
one seed the same on every machine, with wheels for all platforms. Its files of signatures stay on disk, 512 bytes a
trajectory; what is held in memory is at most 16 to 64 bytes a trajectory and the signatures of one chunk.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from twinkle_core.errors import ConfigError
from twinkle_core.preprocessor.texts import all_text, words
from twinkle_core.types import Trajectory

NUM_HASHES = 128
SEED = 1
WORDS_PER_SHINGLE = 5
ALGORITHM = 2
"""rensa's version of the signatures: others would call other trajectories the same, under an unchanged key."""
MAX_MISS = 0.01
"""Probability that two trajectories of just the similarity that counts are never compared."""
ROWS_AT_A_TIME = 1024
CHUNK = 1 << 16
CROWD = 64
"""Rows that agree in a band beyond which the band tells too little."""
LATEST = 128
"""Kept rows of one place that a row is compared with."""
MAX_SLOT_BITS = 26
"""The counts of values take 256 MB at most."""


def shingles(trajectory: Trajectory) -> list[str]:
    """The runs of five words of all its texts; two answers that are judged differently have none in common."""
    found = words(all_text(trajectory, calls=True))
    mark = f"{trajectory['desirable']} " if "desirable" in trajectory else ""
    runs = range(max(1, len(found) - WORDS_PER_SHINGLE + 1))
    return [mark + " ".join(found[start : start + WORDS_PER_SHINGLE]) for start in runs]


class SignatureWriter:
    """Writes the MinHash signature of each trajectory to a file: uint32 [N, 128], row by row."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.waiting, self.minhash = file, list[list[str]](), _rensa()

    def add(self, trajectory: Trajectory) -> None:
        self.waiting.append(shingles(trajectory))
        if len(self.waiting) == ROWS_AT_A_TIME:
            self.flush()

    def flush(self) -> None:
        """Writes what is waiting."""
        if self.waiting:
            made = self.minhash.digests_from_token_sets(self.waiting, NUM_HASHES, SEED)
            self.file.write(np.array(made, dtype="<u4").tobytes())
        self.waiting.clear()


def open_signatures(path: Path) -> np.ndarray:
    """[N, 128] uint32, mapped from the file."""
    if not path.stat().st_size:
        return np.empty((0, NUM_HASHES), dtype=np.uint32)
    return np.memmap(path, dtype="<u4", mode="r").reshape(-1, NUM_HASHES)


def near_repeated(signatures: np.ndarray, similarity: float, leave: np.ndarray) -> np.ndarray:
    """[N] bool, True for each row that is as similar as `similarity` to an earlier one that is kept.

    Rows where `leave` is True are out already. Similarity is estimated as the share of equal signature values. Compared
    are rows that agree in a whole band of values, with bands so short that at most 1 of 100 such pairs is missed.

    A band in which more than `CROWD` rows agree says little (rows from one mould: a long system prompt, a form with a few words
    filled in), and comparing all of them would take time that grows with their square. Those rows are compared where they agree in
    one of their rarest values instead: rows that are similar enough do, always (see `_rarest`). With the `LATEST` kept rows of each such
    place, so time grows with the number of rows; only where more rows than that share even a rare value may a pair be missed.
    """
    band = values_per_band(similarity)
    shared, crowded = _shared_bands(signatures, band, leave)
    mask = np.zeros(len(signatures), dtype=bool)
    kept: dict[tuple[int, int], deque[int]] = {}
    for row, places in _candidates(signatures, band, shared, crowded, similarity):
        before = sorted({other for place in places for other in kept.get(place, ())})
        if before and ((signatures[before] == signatures[row]).mean(axis=1) >= similarity).any():
            mask[row] = True
            continue
        for place in places:
            kept.setdefault(place, deque(maxlen=LATEST)).append(row)
    return mask


def values_per_band(similarity: float) -> int:
    """The most values of a band with which pairs of this similarity are missed at most once in a hundred."""
    sizes = range(NUM_HASHES, 0, -1)
    return next((size for size in sizes if (1 - similarity**size) ** (NUM_HASHES // size) <= MAX_MISS), 1)


def _shared_bands(signatures: np.ndarray, band: int, leave: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[N, bands] bool: a few other rows have the row's values in that band; [N] bool: many have, in some band."""
    shared = np.zeros((len(signatures), NUM_HASHES // band), dtype=bool)
    crowded = np.zeros(len(signatures), dtype=bool)
    there = np.flatnonzero(~leave)
    for index in range(shared.shape[1]):
        keys = np.concatenate([np.empty(0, np.uint64), *(_keys(chunk, band, index) for chunk in _chunks(signatures))])[there]
        order = np.argsort(keys, kind="stable")
        ends = np.flatnonzero(np.append(keys[order[1:]] != keys[order[:-1]], True)[: len(keys)]) + 1
        sizes = np.diff(ends, prepend=0)
        alike = np.repeat(sizes, sizes)  # how many rows have the values that order[i] has
        shared[there[order[(alike > 1) & (alike <= CROWD)]], index] = True
        crowded[there[order[alike > CROWD]]] = True
    return shared, crowded


def _candidates(
    signatures: np.ndarray, band: int, shared: np.ndarray, crowded: np.ndarray, similarity: float
) -> Iterator[tuple[int, list[tuple[int, int]]]]:
    """Rows that may be near others, in order, with the places where they meet those: (band, its key), or (-1 - column, value)."""
    rows = np.flatnonzero(shared.any(axis=1) | crowded)
    counts = _value_counts(signatures, np.flatnonzero(crowded))
    for start in range(0, len(rows), CHUNK // 8):
        some = rows[start : start + CHUNK // 8]
        chunk = np.asarray(signatures[some])
        keys = np.stack([_keys(chunk, band, index) for index in range(shared.shape[1])], axis=1)
        among_many = np.flatnonzero(crowded[some])
        rarest = dict(zip(among_many.tolist(), _rarest(chunk[among_many], counts, similarity), strict=True))
        for number, row in enumerate(some.tolist()):
            places = [(index, int(keys[number, index])) for index in np.flatnonzero(shared[row]).tolist()]
            yield row, places + rarest.get(number, [])


def _rarest(chunk: np.ndarray, counts: np.ndarray, similarity: float) -> list[list[tuple[int, int]]]:
    """For each row the (-1 - column, value) of its rarest values that another row may have, among so many that no pair is missed.

    Of two rows that agree in `fewest` values or more, each has such a value among its `NUM_HASHES - fewest + 1` rarest, in any order of
    values that is the same for all rows (prefix filtering: https://doi.org/10.1145/1242572.1242591).
    """
    fewest = next(count for count in range(NUM_HASHES + 1) if count / NUM_HASHES >= similarity)
    slots = _slots(chunk, len(counts))
    order = np.argsort(counts[slots].astype(np.uint64) << np.uint64(32) | slots, axis=1, kind="stable")[:, : NUM_HASHES - fewest + 1]
    often = np.take_along_axis(counts[slots], order, axis=1) > 1
    values = np.take_along_axis(chunk, order, axis=1)
    return [
        [(-1 - column, value) for column, value in zip(columns[met].tolist(), own[met].tolist(), strict=True)]
        for columns, own, met in zip(order, values, often, strict=True)
    ]


def _value_counts(signatures: np.ndarray, rows: np.ndarray) -> np.ndarray:
    """uint32 counts of the (column, value) pairs of these rows, by slot. Pairs that meet in a slot count as more frequent than they are."""
    bits = min(max(int(len(rows)).bit_length() + 5, 8), MAX_SLOT_BITS)
    counts = np.zeros(1 << bits, dtype=np.uint32)
    for start in range(0, len(rows), CHUNK // 8):
        np.add.at(counts, _slots(np.asarray(signatures[rows[start : start + CHUNK // 8]]), len(counts)), 1)
    return counts


def _slots(chunk: np.ndarray, num_slots: int) -> np.ndarray:
    """[R, 128] uint64 below `num_slots` (a power of two): a hash of column and value (Fibonacci hashing of both)."""
    columns = np.arange(1, NUM_HASHES + 1, dtype=np.uint64) * np.uint64(0xD1B54A32D192ED03)
    mixed = (chunk.astype(np.uint64) ^ columns) * np.uint64(0x9E3779B97F4A7C15)
    found: np.ndarray = mixed >> np.uint64(64 - (num_slots.bit_length() - 1))
    return found


def _chunks(signatures: np.ndarray) -> Iterator[np.ndarray]:
    return (signatures[start : start + CHUNK] for start in range(0, len(signatures), CHUNK))


def _keys(signatures: np.ndarray, band: int, index: int) -> np.ndarray:
    """[N] uint64 hash of the band's values (FNV-1a over words)."""
    keys = np.full(len(signatures), 0xCBF29CE484222325, dtype=np.uint64)
    for column in range(index * band, (index + 1) * band):
        keys = (keys ^ signatures[:, column]) * np.uint64(0x100000001B3)
    return keys


def _rensa() -> Any:
    try:
        from rensa import RMinHash  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise ConfigError("dedup 'minhash' needs rensa: pip install twinkle-flows[data]") from None
    if RMinHash.ALGORITHM_VERSION != ALGORITHM:
        raise ConfigError(f"rensa makes signatures of version {RMinHash.ALGORITHM_VERSION}, not {ALGORITHM}: pip install 'rensa>=0.5,<0.6'")
    return RMinHash
