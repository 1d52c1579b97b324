"""The order of rows and how it is cut into batches: pure functions of sizes, seed and epoch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from twinkle_core.errors import DataError

_SHARDS, _WINDOWS, _BATCHES = 1, 2, 3  # top words of the counters from which draws other than the rows' start; they never meet

GROUP_BATCHES = 50
"""Batches whose rows are sorted by length together: enough for equal lengths to meet, few enough to leave the order random."""


def permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """[N] int64: the order in which epoch `epoch` visits the rows 0..N-1.

    Sorts N raw 64-bit draws of the counter-based generator Philox keyed by (seed, epoch). numpy promises that raw bit
    streams never change (https://numpy.org/doc/stable/reference/random/compatibility.html); it does not for shuffle().
    """
    return _draw(num_rows, seed, epoch, 0, 0)


def windowed_permutation(shard_rows: Sequence[int], seed: int, epoch: int, window_shards: int) -> np.ndarray:
    """[N] int64: an order of rows that lie in shards, rows 0..N-1 numbered through them, that touches few shards at a time.

    Shards are drawn in a random order and taken `window_shards` at a time (the last time what is left); rows are permuted
    within each such window. With at most `window_shards` shards it is `permutation` of all rows.
    """
    sizes = np.asarray(shard_rows, dtype=np.int64)
    if len(sizes) <= window_shards:
        return permutation(int(sizes.sum()), seed, epoch)
    starts = np.cumsum(sizes) - sizes
    shards = _draw(len(sizes), seed, epoch, 0, _SHARDS)
    parts = []
    for window, at in enumerate(range(0, len(shards), window_shards)):
        rows = np.concatenate([np.arange(starts[shard], starts[shard] + sizes[shard]) for shard in shards[at : at + window_shards]])
        parts.append(rows[_draw(len(rows), seed, epoch, window, _WINDOWS)])
    return np.concatenate(parts)


def token_batches(lengths: np.ndarray, max_tokens: int, seed: int, epoch: int, *, shuffle: bool) -> tuple[np.ndarray, np.ndarray]:
    """Batches of at most `max_tokens` tokens: (rows [N] int64 in order, ends [K] int64: where in that order each batch ends).

    With `shuffle`, rows of like length meet: a permutation is cut into groups of about `GROUP_BATCHES` batches, each group is
    sorted by length (up and down in turns, so that neighbours stay alike at the seams), the whole is cut by the budget, and the
    batches are shuffled. Without, rows come in their own order. Raises `DataError` for a row that is longer than the budget.
    """
    if (longest := int(lengths.max(initial=0))) > max_tokens:
        raise DataError(f"row {int(lengths.argmax())} has {longest} tokens and fits no batch of max_tokens {max_tokens}")
    rows = np.arange(len(lengths), dtype=np.int64)
    if shuffle:
        rows = permutation(len(lengths), seed, epoch)
        group = max(1, int(GROUP_BATCHES * max_tokens / max(float(lengths.mean()), 1.0)))
        number = np.arange(len(rows)) // group
        rows = rows[np.lexsort((np.where(number % 2, -1, 1) * lengths[rows], number))]
    ends = _cut(lengths[rows], max_tokens)
    if shuffle:
        batches = _draw(len(ends), seed, epoch, 0, _BATCHES)
        starts = np.concatenate([[0], ends[:-1]])
        rows = rows[_ranges(starts[batches], ends[batches])]
        ends = np.cumsum((ends - starts)[batches])
    return rows, ends


def rank_slice(total: int, rank: int, world_size: int) -> slice:
    """The part of `total` rows that falls to a data rank: even parts, of which the first `total % world_size` have one more."""
    size, more = divmod(total, world_size)
    start = rank * size + min(rank, more)
    return slice(start, start + size + (rank < more))


def rank_rows(rows: np.ndarray, sizes: np.ndarray, rank: int, world_size: int) -> np.ndarray:
    """Of the rows of several batches laid end to end, of `sizes` rows each, those that fall to a rank by `rank_slice`."""
    size, more = sizes // world_size, sizes % world_size
    starts = np.cumsum(sizes) - sizes + rank * size + np.minimum(rank, more)
    mine: np.ndarray = rows[_ranges(starts, starts + size + (rank < more))]
    return mine


def _draw(size: int, seed: int, epoch: int, number: int, purpose: int) -> np.ndarray:
    """[size] int64 permutation from a stream of random bits of its own."""
    counter = np.array([0, 0, number, purpose], dtype=np.uint64)
    keys = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64), counter=counter).random_raw(size)
    return np.argsort(keys, kind="stable").astype(np.int64)


def _cut(lengths: np.ndarray, max_tokens: int) -> np.ndarray:
    """[K] int64 ends of the longest runs, one after the other, of at most `max_tokens` tokens."""
    total = np.cumsum(lengths, dtype=np.int64)
    ends: list[int] = []
    at, before = 0, 0
    while at < len(total):
        at = int(np.searchsorted(total, before + max_tokens, side="right"))
        before = int(total[at - 1])
        ends.append(at)
    return np.array(ends, dtype=np.int64)


def _ranges(starts: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """arange(start, end) of each pair, one after the other."""
    sizes = ends - starts
    return np.repeat(starts - (np.cumsum(sizes) - sizes), sizes) + np.arange(int(sizes.sum()))
