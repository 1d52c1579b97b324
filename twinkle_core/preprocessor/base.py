"""What a preprocessor and a filter are."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from twinkle_core.preprocessor.fields import Row
from twinkle_core.types import Trajectory


class Preprocessor(ABC):
    """Makes of one row of a known data set a `Trajectory`, or another row. A plain function of a row does as well.

    Twinkle's class of this name is called with a batch of columns; this one with a row, so that a bad one can be named.
    """

    @abstractmethod
    def __call__(self, row: Row) -> dict[str, Any] | Trajectory | None:
        """The row's trajectory, or a row of any known layout, or None to leave the row out (counted as dropped)."""

    def annotate(self, trajectory: Trajectory) -> Trajectory:
        """Called with the trajectory that the row became; adds what can only be known from it."""
        return trajectory


class DataFilter(ABC):
    """Which trajectories are kept. A plain function of a trajectory does as well."""

    @abstractmethod
    def __call__(self, trajectory: Trajectory) -> bool:
        """Whether to keep it."""

    def apply(self, trajectory: Trajectory) -> Trajectory | None:
        """The trajectory where it is kept, else None. A filter that rewrites instead of leaving out does so here."""
        return trajectory if self(trajectory) else None
