"""What a `DataLoader` asks of its data: the steps from a place on, and the place after each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from numbers import Integral
from typing import Any, Protocol

from twinkle_core.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a loader stands. A pass is what one `for` goes through: the whole run where `num_epochs` is set, else one epoch."""

    consumed: int = 0
    """Rows handed out since the start of the run, on all data ranks together."""
    number: int = 0
    """Passes ended before; in a stream, times that it has ended."""
    steps: int = 0
    """Batches of the pass handed out."""
    rows: int = 0
    """Rows that a stream gave since it last began."""
    data: Mapping[str, Any] | None = None
    """The state of a stream that has one."""


LIMIT = 1 << 64
"""No number may reach this: seed and epoch are the 64-bit words that key the generator of orders."""
_MAY_BE_NONE = frozenset({"batch_size", "max_tokens", "shuffle_shards", "num_epochs"})

Step = tuple[Place, list[Any] | None]
"""The place after a batch, and this data rank's rows of it; the last step of a pass has None, and the place where the next loop begins."""


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The settings of a `DataLoader` that decide which rows are in which batch. Raises `ConfigError` for what cannot be."""

    batch_size: int | None
    max_tokens: int | None
    min_batch_size: int
    shuffle: bool
    shuffle_shards: int | None
    seed: int
    num_epochs: int | None
    data_rank: int
    data_world_size: int

    def __post_init__(self) -> None:
        if (self.batch_size is None) == (self.max_tokens is None):
            raise ConfigError(f"set either batch_size or max_tokens, got batch_size={self.batch_size} and max_tokens={self.max_tokens}")
        for name in ("batch_size", "max_tokens", "min_batch_size", "shuffle_shards", "num_epochs", "data_world_size", "data_rank", "seed"):
            self._check_number(name, smallest=int(name not in ("seed", "data_rank")))
        if self.batch_size is not None and self.min_batch_size > self.batch_size:
            raise ConfigError(f"min_batch_size is {self.min_batch_size}, but no batch has more than batch_size {self.batch_size} rows")
        if self.max_tokens is not None and self.min_batch_size > 1:
            raise ConfigError("min_batch_size and drop_last go with batch_size; batches of max_tokens are all kept")
        if not 0 <= self.data_rank < self.data_world_size:
            raise ConfigError(f"data_rank is {self.data_rank}, but data_world_size is {self.data_world_size}")

    def _check_number(self, name: str, smallest: int) -> None:
        value = getattr(self, name)
        if value is None and name in _MAY_BE_NONE:
            return
        if not isinstance(value, Integral) or int(value) >= LIMIT:
            raise ConfigError(f"{name} is {value!r}, but must be an integer from {smallest} to 2**64 - 1")
        if int(value) < smallest:
            raise ConfigError(f"{name} is {value}, but must be at least {smallest}")

    @property
    def batch_text(self) -> str:
        return str(self.batch_size) if self.batch_size is not None else f"at most {self.max_tokens} tokens"


class Steps(Protocol):
    """`NumberedSteps` or `StreamSteps`. Nothing here keeps a cursor: the loader does."""

    def start(self) -> Place: ...

    def count(self, place: Place) -> int:
        """Batches of the pass in which `place` is."""
        ...

    def epoch(self, place: Place) -> int:
        """Epochs that are over."""
        ...

    def next_pass(self, place: Place) -> Place:
        """Where the next loop begins that finds the loader at `place`."""
        ...

    def steps(self, place: Place) -> Iterator[Callable[[], Step]]:
        """What reads each batch from `place` to the end of the pass. To be called once each, in any order and thread for rows with
        numbers, in order for a stream."""
        ...

    def reading(self, place: Place) -> AbstractContextManager[None]: ...

    def at(self, consumed: int) -> Place:
        """The place where so many rows were handed out. Raises `ConfigError` where there is none."""
        ...

    def dump(self, place: Place) -> dict[str, Any]:
        """What `load` needs beside the number of rows; plain JSON."""
        ...

    def load(self, consumed: int, state: Mapping[str, Any]) -> Place: ...
