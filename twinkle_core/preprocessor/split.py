"""Which rows are held out, and which repeat an earlier one: pure functions of the rows' content digests."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def groups(digests: np.ndarray) -> np.ndarray:
    """[N] int64 numbers from 0, equal for equal rows of `digests` ([N, 2] uint64) and only for them; larger digests, larger numbers."""
    order = np.lexsort((digests[:, 1], digests[:, 0]))
    ordered = digests[order]
    starts = np.ones(len(order), dtype=bool)
    starts[1:] = (ordered[1:] != ordered[:-1]).any(axis=1)
    found = np.empty(len(order), dtype=np.int64)
    found[order] = np.cumsum(starts) - 1
    return found


def repeated(digests: np.ndarray) -> np.ndarray:
    """[N] bool, True for each row of `digests` ([N, 2] uint64) that an earlier one equals."""
    mask = np.ones(len(digests), dtype=bool)
    mask[np.unique(groups(digests), return_index=True)[1]] = False
    return mask


def split(digests: Sequence[np.ndarray], shares: Sequence[float], seed: int) -> list[np.ndarray]:
    """For each source a bool array [N], True where the row is held out.

    `digests[s]` ([N, 2] uint64) are the content digests of source s, and `shares[s]` the share to hold out. The rows with
    the smallest hash of seed and digest are held out, `round(share * N)` of them, so that adding or reordering rows
    moves few of them. Identical rows stay together, also across sources: a source's rows that an earlier source has
    placed follow it, and count towards the number. Further groups of identical rows are taken in hash order where the
    whole group still fits. So the number is exact unless duplicates leave no group that fits (then it is lower) or
    earlier sources have placed too many (then higher).
    """
    every = np.concatenate([*digests, np.empty((0, 2), dtype=np.uint64)])
    group = groups(every)
    placed = np.full(int(group.max(initial=-1)) + 1, -1, dtype=np.int8)
    hashes = np.empty(len(placed), dtype=np.uint64)
    hashes[group] = _hash(every, seed)
    del every
    masks, start = [], 0
    for mine, share in zip(digests, shares, strict=True):
        own = group[start : start + len(mine)]
        start += len(mine)
        found, counts = np.unique(own, return_counts=True)
        wanted = round(share * len(mine)) - int(counts[placed[found] == 1].sum())
        fresh = placed[found] == -1
        candidates, sizes = found[fresh], counts[fresh]
        order = np.lexsort((candidates, hashes[candidates]))
        placed[candidates] = 0
        placed[candidates[order[_that_fit(sizes[order], wanted)]]] = 1
        masks.append(placed[own] == 1)
    return masks


def _that_fit(sizes: np.ndarray, room: int) -> np.ndarray:
    """Positions taken when each size in turn is taken where it still fits into what is left of `room`."""
    taken: list[np.ndarray] = []
    left = np.flatnonzero(sizes <= room)
    while room > 0 and len(left):
        count = int(np.searchsorted(np.cumsum(sizes[left]), room, side="right"))
        taken.append(left[:count])
        room -= int(sizes[left[:count]].sum())
        left = left[count:]
        left = left[sizes[left] <= room]
    return np.concatenate(taken) if taken else np.empty(0, dtype=np.int64)


def _hash(digests: np.ndarray, seed: int) -> np.ndarray:
    """[N] uint64: both halves of a digest and the seed through the finaliser of SplitMix64 (https://doi.org/10.1145/2660193.2660195)."""
    start = np.uint64(seed * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF)
    return _finalised(_finalised(digests[:, 0] ^ start) ^ digests[:, 1])


def _finalised(words: np.ndarray) -> np.ndarray:
    words = words + np.uint64(0x9E3779B97F4A7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    finalised: np.ndarray = words ^ (words >> np.uint64(31))
    return finalised
