"""Numbers of training calls that the workers have and the driver reads when somebody looks. Imports no torch."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from twinkle_core.errors import TrainingError
from twinkle_core.infra.group import WorkerGroup
from twinkle_core.lazy_number import LazyNumber
from twinkle_core.model.metrics import AdapterMetrics
from twinkle_core.types import StepOutput

MOST_UNREAD = 512
"""Numbers of an adapter that may wait on the workers; the next call reads them, whoever looks."""

_TICKETS = itertools.count()
"""Of all models of this process: a worker that hosts another one by now knows none of an older one's."""


@dataclass(frozen=True, kw_only=True)
class Readings:
    """What a worker was read."""

    values: Mapping[int, float]
    """Ticket -> loss sum or gradient norm."""
    trouble: tuple[int, str] | None
    """The first ticket with a number that is not finite, and where that was."""


class Unread:
    """The numbers of one adapter that were promised and not yet read, by ticket: one for each thing asked for, in order."""

    def __init__(self, fetch: Callable[[list[int]], Readings]) -> None:
        self._fetch = fetch
        self._numbers: dict[int, LazyNumber] = {}

    def ticket(self) -> int:
        """Of what is asked for next. Where too much is unread, reads, and raises `TrainingError` where a number is not finite."""
        ticket = next(_TICKETS)
        if len(self._numbers) >= MOST_UNREAD:
            self._read_for(ticket)
        return ticket

    def promise(self, ticket: int) -> LazyNumber:
        self._numbers[ticket] = number = LazyNumber(lambda: self._look(ticket, number))
        return number

    def _look(self, ticket: int, number: LazyNumber) -> None:
        self._read_for(ticket)
        if not number.is_read:
            raise TrainingError("this number is lost: its worker hosts another model by now, or dropped it unread")

    def _read_for(self, ticket: int) -> None:
        """Gives all numbers their values, but none from the first on that is not finite; `TrainingError` where `ticket` is among those."""
        numbers, self._numbers = self._numbers, {}
        found = self._fetch(list(numbers))
        for each, number in numbers.items():
            if each in found.values and (found.trouble is None or each < found.trouble[0]):
                number.give(found.values[each])
        if found.trouble is not None and ticket >= found.trouble[0]:
            raise TrainingError(found.trouble[1])


class ModelReadings:
    """The part of a model's driver that knows what training calls gave."""

    _group: WorkerGroup
    _unread: dict[str, Unread]

    def _name(self, adapter_name: str | None) -> str:
        raise NotImplementedError

    def _metrics_of(self, adapter_name: str | None) -> AdapterMetrics:
        raise NotImplementedError

    def _unread_of(self, adapter_name: str | None) -> Unread:
        name = self._name(adapter_name)
        if name not in self._unread:
            self._unread[name] = Unread(partial(self._group.call_one, "take_readings", name))
        return self._unread[name]

    def _trained(self, loss_sum: float | LazyNumber, counts: tuple[int, float, float | None], adapter_name: str | None) -> StepOutput:
        output = StepOutput(loss_sum=loss_sum, num_loss_tokens=counts[0], loss_weight=counts[1], lr=counts[2])
        self._metrics_of(adapter_name).trained(output)
        return output

    def _clipped(self, ticket: int, adapter_name: str | None) -> LazyNumber:
        norm = self._unread_of(adapter_name).promise(ticket)
        self._metrics_of(adapter_name).clipped(norm)
        return norm

    def calculate_metric(self, is_training: bool = True, *, adapter_name: str | None = None) -> dict[str, float]:
        """Numbers over the calls since the last `calculate_metric`: of training calls, or of `forward_only`. Waits for the device."""
        facts = self._group.call("metric_facts", adapter_name, collect="first") if is_training else {}
        metrics = self._metrics_of(adapter_name)
        sums = self._group.call("metric_sums", is_training, adapter_name) if metrics.added[is_training] else []
        return metrics.calculate(is_training, facts, sums)


def added_counts(results: list[tuple[Any, ...]]) -> tuple[Any, ...]:
    """A collect: the numbers of all workers added up, but for the last, which is the same everywhere."""
    return (*(sum(values) for values in zip(*(result[:-1] for result in results), strict=True)), results[0][-1])
