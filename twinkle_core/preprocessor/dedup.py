"""Trajectories that are nearly the same, by MinHash (https://doi.org/10.1109/SEQUEN.1997.666900) through rensa.

rensa (https://github.com/beowolx/rensa) makes the signatures: on one core 18 times as many a second as datasketch, from
one seed the same on every machine, with wheels for all platforms. Its files of signatures stay on disk, 512 bytes a
trajectory; what is held in memory is at most 16 to 64 bytes a trajectory and the signatures of one chunk.
"""

from __future__ import annotations

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
    """
    band = values_per_band(similarity)
    shared = _shared_bands(signatures, band, leave)
    mask = np.zeros(len(signatures), dtype=bool)
    kept: dict[tuple[int, int], list[int]] = {}
    for row, bands, keys in _candidates(signatures, band, shared):
        places = [(index, int(keys[index])) for index in bands]
        before = sorted({other for place in places for other in kept.get(place, ())})
        if before and ((signatures[before] == signatures[row]).mean(axis=1) >= similarity).any():
            mask[row] = True
            continue
        for place in places:
            kept.setdefault(place, []).append(row)
    return mask


def values_per_band(similarity: float) -> int:
    """The most values of a band with which pairs of this similarity are missed at most once in a hundred."""
    sizes = range(NUM_HASHES, 0, -1)
    return next((size for size in sizes if (1 - similarity**size) ** (NUM_HASHES // size) <= MAX_MISS), 1)


def _shared_bands(signatures: np.ndarray, band: int, leave: np.ndarray) -> np.ndarray:
    """[N, bands] bool: the row has another row's values in that band."""
    shared = np.zeros((len(signatures), NUM_HASHES // band), dtype=bool)
    there = np.flatnonzero(~leave)
    for index in range(shared.shape[1]):
        keys = np.concatenate([np.empty(0, np.uint64), *(_keys(chunk, band, index) for chunk in _chunks(signatures))])[there]
        order = np.argsort(keys, kind="stable")
        equal = keys[order[1:]] == keys[order[:-1]]
        shared[there[order[1:][equal]], index] = True
        shared[there[order[:-1][equal]], index] = True
    return shared


def _candidates(signatures: np.ndarray, band: int, shared: np.ndarray) -> Iterator[tuple[int, list[int], np.ndarray]]:
    rows = np.flatnonzero(shared.any(axis=1))
    for start in range(0, len(rows), CHUNK):
        some = rows[start : start + CHUNK]
        chunk = np.asarray(signatures[some])
        keys = np.stack([_keys(chunk, band, index) for index in range(shared.shape[1])], axis=1)
        for row, mine in zip(some.tolist(), keys, strict=True):
            yield row, np.flatnonzero(shared[row]).tolist(), mine


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
