"""The order of rows: a pure function of their number, the seed and the epoch."""

from __future__ import annotations

import numpy as np


def permutation(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """[N] int64: the order in which epoch `epoch` visits the rows 0..N-1.

    Sorts N raw 64-bit draws of the counter-based generator Philox keyed by (seed, epoch). numpy promises that raw bit
    streams never change (https://numpy.org/doc/stable/reference/random/compatibility.html); it does not for shuffle().
    """
    keys = np.random.Philox(key=np.array([seed, epoch], dtype=np.uint64)).random_raw(num_rows)
    return np.argsort(keys, kind="stable").astype(np.int64)
