"""Losses and gradient norms that lie on the device until somebody reads them. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist

from twinkle_core.errors import TrainingError
from twinkle_core.model.readings import MOST_UNREAD, Readings

MOST_KEPT = 2 * MOST_UNREAD
"""Entries of a ledger, read or not. The driver has asked for older ones, or never will."""


class CallLosses:
    """The losses of all micro-batches of a call, on their way from every rank to every rank. Making one waits for nothing."""

    def __init__(self, own: Mapping[int, torch.Tensor], number: int, device: torch.device, world_size: int) -> None:
        """Collective. `own` are scalars of this rank by the position of their micro-batch among the call's `number`.

        Ranks that compute a micro-batch together give their parts of its loss.
        """
        nothing = torch.zeros((), dtype=torch.float64, device=device)
        given = [own[place].detach().to(device, torch.float64) if place in own else nothing for place in range(number)]
        self.tensor = torch.stack(given) if given else nothing[None][:0]
        """[number] float64; of this rank alone until `arrived`."""
        self._work: Any = dist.all_reduce(self.tensor, async_op=True) if world_size > 1 and number else None

    def arrived(self) -> torch.Tensor:
        """[number] float64, those of all ranks."""
        if self._work is not None:
            self._work.wait()
            self._work = None
        return self.tensor

    def read(self, step: int, first: int) -> float:
        """Their sum. Waits for the device; raises `TrainingError` where one is not finite."""
        values = self.arrived().tolist()
        if (text := _wrong_loss(values, step, first)) is not None:
            raise TrainingError(text)
        return math.fsum(values)


@dataclass(frozen=True, kw_only=True)
class _Entry:
    ticket: int | None
    """The driver's number of what was asked for; None where nobody asked."""
    step: int
    """The optimizer step that it belongs to, from 1."""
    losses: CallLosses | None = None
    first: int = 0
    """Number of the call's first micro-batch in the window."""
    norm: torch.Tensor | None = None
    """Scalar float64."""
    may_overflow: bool = False
    """A scaler deals with a norm that is not finite."""


class Ledger:
    """What one adapter's training calls gave, in order, until it is read: then all of it is, in one transfer.

    A loss or norm that is not finite is remembered as trouble for as long as the model bears its marks.
    """

    def __init__(self) -> None:
        self._unread: list[_Entry] = []
        self._values: dict[int, float] = {}
        self._last = -1
        self._trouble: tuple[int, str] | None = None

    def note_losses(self, ticket: int | None, step: int, first: int, losses: CallLosses) -> None:
        self._note(_Entry(ticket=ticket, step=step, losses=losses, first=first))

    def note_norm(self, ticket: int | None, step: int, norm: torch.Tensor, *, may_overflow: bool) -> None:
        self._note(_Entry(ticket=ticket, step=step, norm=norm, may_overflow=may_overflow))

    def _note(self, entry: _Entry) -> None:
        self._unread.append(entry)
        if len(self._unread) >= MOST_KEPT:  # on a rank that the driver never asks
            self._read()

    def take(self, tickets: Sequence[int]) -> Readings:
        """What lies under these tickets, and no longer from now on. Waits for the device."""
        self._read()
        return Readings(values={ticket: self._values.pop(ticket) for ticket in tickets if ticket in self._values}, trouble=self._trouble)

    def check(self) -> None:
        """Raises `TrainingError` where a loss or norm was not finite. Waits for the device."""
        self._read()
        if self._trouble is not None:
            raise TrainingError(f"{self._trouble[1]}. Nothing is saved of a model that learnt from it: restore an earlier checkpoint")

    @property
    def has_trouble(self) -> bool:
        """Waits for the device."""
        self._read()
        return self._trouble is not None

    def forget_trouble(self) -> None:
        self._trouble = None

    def _read(self) -> None:
        entries, self._unread = self._unread, []
        tensors = [entry.losses.arrived() if entry.losses is not None else _scalar(entry.norm) for entry in entries]
        if not tensors:
            return
        device = tensors[0].device
        values = iter(torch.cat([tensor.to(device) for tensor in tensors]).tolist())
        for entry, tensor in zip(entries, tensors, strict=True):
            own = list(islice(values, len(tensor)))
            self._last = self._last if entry.ticket is None else entry.ticket
            if self._trouble is None and (text := _trouble(entry, own)) is not None:
                self._trouble = self._last if entry.ticket is not None else self._last + 1, text
            if entry.ticket is not None:
                self._values[entry.ticket] = math.fsum(own) if entry.losses is not None else own[0]
        for ticket in list(self._values)[:-MOST_KEPT]:
            del self._values[ticket]


def _scalar(norm: torch.Tensor | None) -> torch.Tensor:
    assert norm is not None, "an entry has losses or a norm"
    return torch.as_tensor(norm, dtype=torch.float64).detach()[None]


def _trouble(entry: _Entry, values: list[float]) -> str | None:
    if entry.losses is not None:
        return _wrong_loss(values, entry.step, entry.first)
    if math.isfinite(values[0]) or entry.may_overflow:
        return None
    return f"gradient norm is {values[0]} at optimizer step {entry.step}; look at the rows and the learning rate"


def _wrong_loss(values: list[float], step: int, first: int) -> str | None:
    for place, value in enumerate(values):
        if not math.isfinite(value):
            return f"loss of micro-batch {first + place} is {value} at optimizer step {step}; look at its rows and the learning rate"
    return None
