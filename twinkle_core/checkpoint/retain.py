"""Which checkpoints are kept: a pure choice. `Attempt.commit` carries it out, after HEAD no longer lists the others."""

from __future__ import annotations

from twinkle_core.checkpoint.manifest import Committed, Keep


def keep_policy(*, keep_last: int, keep_every: int | None = None) -> Keep:
    """Keeps the newest `keep_last` checkpoints and every one whose step is a multiple of `keep_every`.

    Example: steps 8, 6, 4, 2 with keep_last=1, keep_every=4 keep 8 and 4.
    """

    def keep(newest_first: tuple[Committed, ...]) -> tuple[tuple[Committed, ...], tuple[Committed, ...]]:
        kept = {line for i, line in enumerate(newest_first) if i < keep_last or (keep_every and line.step % keep_every == 0)}
        return tuple(c for c in newest_first if c in kept), tuple(c for c in newest_first if c not in kept)

    return keep
