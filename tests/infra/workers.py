"""Workers for the tests of groups: no model, no training."""

import os
import time
from pathlib import Path
from typing import Any

from twinkle_core.errors import DataError


class OddError(Exception):
    """Cannot be unpickled."""

    def __init__(self, *, row: int) -> None:
        super().__init__(f"row {row} is odd")


class Echo:
    def __init__(self, *, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    def items(self, items: list[Any]) -> list[Any]:
        return list(items)

    def ranks(self) -> int:
        return self.rank

    def threads(self) -> tuple[int, str | None]:
        import torch

        return torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")

    def total(self, value: float) -> float:
        import torch
        import torch.distributed as dist

        tensor = torch.tensor(value * (self.rank + 1))
        if self.world_size > 1:
            dist.all_reduce(tensor)
        return float(tensor)

    def wait_on(self, rank: int, started: str) -> int:
        """Every worker but `rank` answers at once; `rank` is busy for a minute."""
        if self.rank == rank:
            Path(started).touch()
            time.sleep(60)
        return self.rank

    def reduce_without(self, rank: int, started: str) -> None:
        """`rank` never joins the reduction, so the others hang in it until it dies."""
        if self.rank == rank:
            Path(started).touch()
            time.sleep(60)
        self.total(1.0)

    def fail(self, rank: int) -> None:
        if self.rank == rank:
            raise DataError("row 3 of file x is bad")

    def fail_oddly(self, rank: int) -> None:
        if self.rank == rank:
            raise KeyError("odd")

    def fail_unsent(self, rank: int) -> None:
        if self.rank == rank:
            raise OddError(row=3)
