"""Which rows are held out: a pure function of their content, so that adding or reordering rows moves few of them."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np


def split(digests: Sequence[Sequence[bytes]], shares: Sequence[float], seed: int) -> list[np.ndarray]:
    """For each source a bool array [N], True where the row is held out.

    `digests[s][i]` is the content digest of row i of source s, and `shares[s]` the share to hold out. The rows with
    the smallest sha256(seed, digest) are held out, `round(share * N)` of them. Identical rows stay together, also
    across sources: a source's rows that an earlier source has placed follow it, and count towards the number. Further
    groups of identical rows are taken in hash order where the whole group still fits. So the number is exact
    unless duplicates leave no group that fits (then it is lower) or earlier sources have placed too many (then higher).
    """
    placed: dict[bytes, bool] = {}
    return [_split_source(source, share, seed, placed) for source, share in zip(digests, shares, strict=True)]


def _split_source(digests: Sequence[bytes], share: float, seed: int, placed: dict[bytes, bool]) -> np.ndarray:
    counts: dict[bytes, int] = {}
    for digest in digests:
        counts[digest] = counts.get(digest, 0) + 1
    wanted = round(share * len(digests)) - sum(count for digest, count in counts.items() if placed.get(digest))
    fresh = [digest for digest in counts if digest not in placed]
    prefix = f"{seed}:".encode()
    for digest in sorted(fresh, key=lambda digest: hashlib.sha256(prefix + digest).digest()):
        placed[digest] = counts[digest] <= wanted
        wanted -= counts[digest] if placed[digest] else 0
    return np.fromiter((placed[digest] for digest in digests), dtype=bool, count=len(digests))
