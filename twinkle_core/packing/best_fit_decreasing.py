"""Best-fit-decreasing bin packing (Johnson 1974; for documents: https://arxiv.org/abs/2404.10830), by counts of lengths.

Lengths are small integers, so while they are filled many bins are alike. A run of bins with the same contents is filled at once,
and splits where the items of a length run out: that work grows with the number of distinct lengths, not of items.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from twinkle_core.errors import DataError
from twinkle_core.packing.packing_plan import PackingPlan

_DIGIT_BITS = 16
"""numpy's stable sort of 16-bit integers is a radix sort."""


def pack(lengths: np.ndarray, capacity: int) -> PackingPlan:
    """Rows of item numbers: each item of `lengths` (int [N]) in one row, no row's sum above `capacity`, in the order rows were opened.

    The rows are those of one-by-one best fit: items longest first, of equal ones the lower number first, each into the fullest row
    that has room for it; of equally full rows into the one that has been so for longest. Memory: about 60 bytes an item.
    Raises `DataError` for an item that is empty or longer than `capacity`.

    Example: lengths `[9, 5, 4, 3, 2]` and capacity 9 give the rows `[0]`, `[1, 2]`, `[3, 4]`.
    """
    if not len(lengths):
        return PackingPlan(items=np.empty(0, dtype=np.int64), offsets=np.zeros(1, dtype=np.int64))
    lengths = np.asarray(lengths)
    check_lengths(lengths, capacity)
    counts = np.bincount(lengths)
    distinct = np.flatnonzero(counts)[::-1]
    fillings = _fill(distinct.tolist(), counts[distinct].tolist(), min(capacity, int(lengths.sum())))  # more room is never used
    row_of = np.empty(len(lengths), dtype=np.int64)
    row_of[_stable_order(capacity - lengths, capacity)] = _row_of_each(fillings)
    num_items = np.bincount(row_of)
    return PackingPlan(items=_stable_order(row_of, len(num_items)), offsets=np.concatenate([[0], np.cumsum(num_items, dtype=np.int64)]))


def check_lengths(lengths: np.ndarray, capacity: int, *, first: int = 0) -> None:
    """Raises `DataError` naming an item that is empty or longer than `capacity`; `first` is the number of the first item."""
    if len(lengths) and (lengths.min() < 1 or lengths.max() > capacity):
        wrong = np.flatnonzero((lengths < 1) | (lengths > capacity))
        at, longest = int(wrong[0]), int(lengths.max())
        remedy = (
            "the documents of a sample count together, as the two of a preference pair do: "
            f"raise packing.row_length to at least {longest}, or lower template.max_length"
        )
        raise DataError(
            f"sample {first + at} has {int(lengths[at])} tokens, which does not fit a row of 1 to {capacity} ({len(wrong)} such samples)"
            + (f"; {remedy}" if longest > capacity else "; a sample has a token at least")
        )


def _fill(lengths: list[int], counts: list[int], capacity: int) -> np.ndarray:
    """[F, 3] int64 fillings (first bin, the one after the last, items put into each), in the order in which the items are placed.

    `lengths` are distinct and descend; there are `counts` items of each. Bins are numbered as they are opened.

    A bin that takes as many items of a length as fit has less room left than that length. So bins come into use again as the lengths
    shrink, and the rooms in use stay sorted without a search.
    """
    fillings: list[int] = []
    # Of each room, the runs (first bin, the one after the last) of like bins that have it; those that had it first in front.
    runs: list[deque[tuple[int, int]] | None] = [None] * (capacity + 1)
    # Rooms of open bins, with their runs, that are no smaller than the length in hand; the smallest last.
    in_use: list[tuple[int, deque[tuple[int, int]]]] = []
    num_bins, previous = 0, lengths[0]
    for length, count in zip(lengths, counts, strict=True):
        for room in range(previous - 1, length - 1, -1):
            if there := runs[room]:
                in_use.append((room, there))
        previous = length
        while count:
            if in_use:
                room, here = in_use[-1]
                first, end = here.popleft()
                if not here:
                    in_use.pop()
            else:
                room, here, first = capacity, deque(), num_bins
                end = num_bins = first + max(count // (room // length), 1)
            per_bin = 1 if room < 2 * length else min(room // length, count)
            filled = first + count // per_bin
            if filled >= end:
                filled = end
            else:
                if not here:
                    in_use.append((room, here))
                here.appendleft((filled, end))
            fillings += (first, filled, per_bin)
            count -= (filled - first) * per_bin
            room -= per_bin * length
            if room:
                there = runs[room]
                if there is None:
                    there = runs[room] = deque()
                if room >= length:  # the items ran out
                    in_use.append((room, there))
                there.append((first, filled))
    return np.array(fillings, dtype=np.int64).reshape(-1, 3)


def _row_of_each(fillings: np.ndarray) -> np.ndarray:
    """[N] bin of each item, in the order in which they are placed."""
    first, end, per_bin = fillings.T
    num_bins = end - first
    bins = np.repeat(first - (np.cumsum(num_bins) - num_bins), num_bins)
    bins += np.arange(len(bins))
    return bins if per_bin.max() == 1 else np.repeat(bins, np.repeat(per_bin, num_bins))


def _stable_order(keys: np.ndarray, end: int) -> np.ndarray:
    """[N] int64 positions of the keys, integers in [0, end), from small to large; equal ones in their order."""
    order = np.argsort(keys.astype(np.uint16), kind="stable")  # the cast keeps the low bits
    for shift in range(_DIGIT_BITS, (end - 1).bit_length(), _DIGIT_BITS):
        order = order[np.argsort((keys >> shift).astype(np.uint16)[order], kind="stable")]
    return order
