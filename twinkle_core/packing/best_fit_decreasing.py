"""Best-fit-decreasing bin packing (Johnson 1974; used for documents in https://arxiv.org/abs/2404.10830).

Items of equal length are placed together: work grows with the number of distinct (length, room) pairs, not with
the number of items, so a million documents take about a second.
"""

from __future__ import annotations

from bisect import bisect_left, insort

import numpy as np

from twinkle_core.errors import DataError


def pack(lengths: np.ndarray, capacity: int) -> list[np.ndarray]:
    """Bins of item numbers: each item of `lengths` (int [N]) once, no bin's sum above `capacity`.

    Returns int64 arrays, each ascending, in the order in which bins were opened. Items are placed longest first
    into the fullest bin that has room, as one-by-one best fit would. Deterministic. Raises `DataError` for an item
    that is empty or longer than `capacity`.

    Example: lengths `[9, 5, 4, 3, 2]` and capacity 9 give `[[0], [1, 2], [3, 4]]`.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    check_lengths(lengths, capacity)
    if not len(lengths):
        return []
    order = np.argsort(-lengths, kind="stable")
    distinct, counts = np.unique(lengths, return_counts=True)
    bin_of = np.empty(len(lengths), dtype=np.int64)
    bins_by_room: dict[int, list[int]] = {}  # room left -> bins with that room
    rooms: list[int] = []  # keys of bins_by_room, sorted
    num_bins = start = 0
    for length, count in zip(distinct[::-1].tolist(), counts[::-1].tolist(), strict=True):
        end = start + count
        while start < end:
            at = bisect_left(rooms, length)
            room = rooms[at] if at < len(rooms) else capacity
            per_bin = room // length
            wanted = -(-(end - start) // per_bin)
            if at < len(rooms):
                bins = bins_by_room[room][-wanted:]
                del bins_by_room[room][-wanted:]
                if not bins_by_room[room]:
                    del bins_by_room[room], rooms[at]
            else:
                bins = list(range(num_bins, num_bins + wanted))
                num_bins += wanted
            placed = min(len(bins) * per_bin, end - start)
            bin_of[order[start : start + placed]] = np.repeat(bins, per_bin)[:placed]
            full, rest = divmod(placed, per_bin)
            _give_back(bins_by_room, rooms, room - per_bin * length, bins[:full])
            _give_back(bins_by_room, rooms, room - rest * length, bins[full:])
            start += placed
    by_bin = np.argsort(bin_of, kind="stable")
    return np.split(by_bin, np.cumsum(np.bincount(bin_of, minlength=num_bins))[:-1])


def _give_back(bins_by_room: dict[int, list[int]], rooms: list[int], room: int, bins: list[int]) -> None:
    if not bins or not room:
        return
    if room not in bins_by_room:
        insort(rooms, room)
    bins_by_room.setdefault(room, []).extend(bins)


def check_lengths(lengths: np.ndarray, capacity: int) -> None:
    """Raises `DataError` naming the first item that is empty or longer than `capacity`."""
    wrong = np.flatnonzero((lengths < 1) | (lengths > capacity))
    if len(wrong):
        item = int(wrong[0])
        raise DataError(
            f"sample {item} has {int(lengths[item])} tokens, which does not fit a row of 1 to {capacity} ({len(wrong)} such samples); "
            "raise packing.row_length or lower template.max_length"
        )
