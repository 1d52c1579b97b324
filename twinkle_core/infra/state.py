"""The one place that knows whether this process was initialized, and whether it is a worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from twinkle_core.infra.runtime import Runtime


@dataclass
class State:
    """See `runtime.initialize`."""

    runtime: Runtime | None = None
    """What `initialize` made; None before it and after its shutdown."""
    in_worker: bool = False
    """Whether this process is a worker of somebody's gang, where every class is local."""


STATE = State()
