"""Random seeds as a function of what they are for, so that nothing random has to be carried along or depends on who computes."""

from __future__ import annotations

import hashlib


def derive_seed(*parts: int | str) -> int:
    """A seed in [0, 2^63) from `parts`, the same everywhere. Example: `derive_seed(42, step, micro_batch)`."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
