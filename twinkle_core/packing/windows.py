"""Packing a stream: best-fit-decreasing within windows of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice

import numpy as np

from twinkle_core.packing.best_fit_decreasing import check_lengths, pack
from twinkle_core.packing.packing_plan import PackingPlan


def pack_window(lengths: np.ndarray, capacity: int, *, is_last: bool) -> tuple[PackingPlan, np.ndarray]:
    """The rows of one window, and the items [C] int64, ascending, that are to stand before the items of the next window.

    `lengths` ([N] int) are those of the items carried so far and then of the new ones. The row opened last, which holds the shortest
    items, is carried where it is not full; nothing is of the last window. So the items carried fill less than a row.
    Raises `DataError` as `pack` does.

    Example: lengths `[9, 5, 4, 3, 2]` and capacity 9 give the rows `[0]`, `[1, 2]` and carry `[3, 4]`.
    """
    plan = pack(lengths, capacity)
    if is_last or not len(plan) or int(np.asarray(lengths)[plan[len(plan) - 1]].sum()) == capacity:
        return plan, np.empty(0, dtype=np.int64)
    return PackingPlan(items=plan.items[: plan.offsets[-2]], offsets=plan.offsets[:-1]), plan[len(plan) - 1]


def pack_windows(lengths: Iterable[int], capacity: int, window: int) -> Iterator[PackingPlan]:
    """Rows of item numbers (positions in `lengths`), window by window of so many new items; together they hold each item once.

    Memory holds two windows, and what is carried. Raises `DataError` as `pack` does, naming the item of the stream.
    """
    stream = iter(lengths)
    carried_numbers = carried_lengths = np.empty(0, dtype=np.int64)
    first, incoming = 0, np.fromiter(islice(stream, window), dtype=np.int64)
    while len(incoming):
        check_lengths(incoming, capacity, first=first)
        following = np.fromiter(islice(stream, window), dtype=np.int64)
        numbers = np.concatenate([carried_numbers, np.arange(first, first + len(incoming))])
        held = np.concatenate([carried_lengths, incoming])
        plan, carried = pack_window(held, capacity, is_last=not len(following))
        yield PackingPlan(items=numbers[plan.items], offsets=plan.offsets)
        carried_numbers, carried_lengths = numbers[carried], held[carried]
        first, incoming = first + len(incoming), following
