"""In which order the rows of several sources come. Pure and deterministic; no row is repeated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from twinkle_core.errors import DataError

Mix = Literal["concatenate", "interleave", "weighted"]


def mix(counts: Sequence[int], rule: Mix = "concatenate", weights: Sequence[float] = ()) -> Iterator[int]:
    """Which source the next row is taken from, until the mix ends; a source's rows are taken in their order.

    `counts` are the sources' numbers of rows. 'concatenate' takes one source after the other, 'interleave' one row of
    each in turn, passing over those that are used up; both take every row. 'weighted' takes, at each turn, from the
    source that lacks most of its share: at turn n the one with the largest `weight / sum(weights) * n - taken` (the first
    of equals). It ends at the turn of a source that is used up, so no source has more than its share.
    """
    if rule == "concatenate":
        return (source for source, count in enumerate(counts) for _ in range(count))
    if rule == "interleave":
        return (source for turn in range(max(counts, default=0)) for source, count in enumerate(counts) if turn < count)
    return _weighted(counts, weights)


def _weighted(counts: Sequence[int], weights: Sequence[float]) -> Iterator[int]:
    if len(weights) != len(counts) or not all(weight > 0 for weight in weights):
        raise DataError(f"{len(counts)} sources need as many weights greater than 0, got {list(weights)}")
    shares = [weight / sum(weights) for weight in weights]
    taken = [0] * len(counts)
    for turn in range(1, sum(counts) + 1):
        source = max(range(len(counts)), key=lambda index: (shares[index] * turn - taken[index], -index))
        if taken[source] == counts[source]:
            return
        taken[source] += 1
        yield source
