"""One rank of a transformers model in training. Imports torch; built by a worker group, one a process."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch

from twinkle_core.errors import ConfigError, TrainingError
from twinkle_core.model.adapter_state import AdapterState
from twinkle_core.model.adapters_worker import AdaptersWorker
from twinkle_core.model.forward import Answer, ratings
from twinkle_core.model.ledger import CallLosses
from twinkle_core.model.losses import Part, loss_of, needs_of, to_compute
from twinkle_core.model.micro_batch import MicroBatch
from twinkle_core.model.readings import Readings
from twinkle_core.model.seeding import derive_seed


@dataclass(kw_only=True)
class Pending:
    """What `forward` keeps until `backward`."""

    state: AdapterState
    answers: list[tuple[int, MicroBatch, Answer]]
    num_micro_batches: int
    parts: list[tuple[int, Part]] | None = None


class TransformersWorker(AdaptersWorker):
    """The worker side of `TransformersModel`; its methods are the driver's, on this worker's share."""

    _pending: Pending | None = None

    def forward_backward(
        self,
        micro_batches: Sequence[MicroBatch],
        num_micro_batches: int,
        seed: tuple[int, ...] | None,
        adapter_name: str | None,
        ticket: int,
    ) -> tuple[int, float, float]:
        """Supervised tokens and the weight of the loss over this worker's micro-batches, and the rate of the step that they are for.

        The loss itself goes into the adapter's ledger, under `ticket`: nothing waits for the device.
        """
        state = self._activated(adapter_name)
        state.ready()
        parts: list[tuple[int, Part]] = []
        try:
            for index, micro_batch in self._numbered(state, micro_batches, num_micro_batches):
                with self._at(state, seed, index):
                    answer = self.forwards.answer(
                        micro_batch.rows, state.processor, to_compute(state.loss, self.forwards, state.metrics[True])
                    )
                    part = loss_of(state.loss, answer, micro_batch, self.forwards, self._metrics(state))
                    if part.loss is not None:
                        self._backward(state, part.loss)
                        part = replace(part, loss=part.loss.detach())
                parts.append((index, part))
        finally:  # a rank that fails joins all the same: the others must hear of it
            losses = self._losses(state, parts, num_micro_batches)
        state.ledger.note_losses(ticket, state.step + 1, state.num_micro_batches, losses)
        return *self._close_call(state, parts, num_micro_batches), state.lr()

    def forward(
        self,
        micro_batches: Sequence[MicroBatch],
        num_micro_batches: int,
        seed: tuple[int, ...] | None,
        adapter_name: str | None,
        temperature: float,
        returned: Sequence[str],
    ) -> list[tuple[int, list[dict[str, Any]]]]:
        """Keeps the graphs for `calculate_loss`. Gives (position of the micro-batch in the call, what was asked for of each row)."""
        self._refuse_cut("forward")
        state = self._activated(adapter_name)
        answers = []
        for index, micro_batch in self._numbered(state, micro_batches, num_micro_batches):
            with self._at(state, seed, index):
                answers.append(
                    (index, micro_batch, self.forwards.answer(micro_batch.rows, state.processor, needs_of(state.loss), temperature))
                )
        self._pending = Pending(state=state, answers=answers, num_micro_batches=num_micro_batches)
        with torch.no_grad():
            return [(batch.position, ratings(answer, batch.rows, returned)) for _, batch, answer in answers if not batch.is_filler]

    def calculate_loss(self, inputs: Sequence[MicroBatch] | None, adapter_name: str | None) -> tuple[int, float, float]:
        """Supervised tokens and weight of what `forward` kept, and the loss sum of all ranks.

        `inputs` are its micro-batches once more, with what the loss needs to know of them. Waits for the device, so that a loss that
        is not finite is an error before anything was learnt from it.
        """
        pending = self._pending_of(adapter_name)
        state, given = pending.state, {batch.position: batch for batch in inputs or ()}
        parts: list[tuple[int, Part]] = []
        try:
            for index, batch, answer in pending.answers:
                metrics = self._metrics(state)
                parts.append((index, loss_of(state.loss, answer, given.get(batch.position, batch), self.forwards, metrics)))
        finally:
            losses = self._losses(state, parts, pending.num_micro_batches)
        loss_sum = losses.read(state.step + 1, state.num_micro_batches)
        pending.parts = parts
        return *self._counts(parts), loss_sum

    def backward(self, adapter_name: str | None) -> None:
        """Of the losses that `calculate_loss` found. They count as one call of the window."""
        pending = self._pending_of(adapter_name)
        pending.state.ready()
        if pending.parts is None:
            raise ConfigError("backward has no loss: call calculate_loss first")
        self._pending = None
        for index, part in pending.parts:
            with self._at(pending.state, None, index):
                if part.loss is not None:
                    self._backward(pending.state, part.loss)
        self._close_call(pending.state, pending.parts, pending.num_micro_batches)

    def _metrics(self, state: AdapterState, is_training: bool = True) -> list[Any]:
        """Those that this rank keeps: of the ranks that share rows, one counts them."""
        return state.metrics[is_training] if self.placement.leads else []

    def _pending_of(self, adapter_name: str | None) -> Pending:
        if self._pending is None or self._pending.state is not self.state(adapter_name):
            raise ConfigError("nothing is kept of a forward pass of this adapter: call forward first")
        return self._pending

    def _numbered(self, state: AdapterState, micro_batches: Sequence[MicroBatch], number: int) -> list[tuple[int, MicroBatch]]:
        """This rank's share, with their numbers in the window."""
        return [
            (state.num_micro_batches + batch.position if batch.position >= 0 else -1, batch) for batch in self._share(micro_batches, number)
        ]

    def _share(self, micro_batches: Sequence[MicroBatch], number: int) -> list[MicroBatch]:
        """This data rank's micro-batches; where all ranks have to join, as many on each as on any, of which the last may be a filler."""
        ranks = self.placement.data_world_size
        mine = [batch for batch in micro_batches if batch.position % ranks == self.placement.data_rank]
        return mine + [MicroBatch.filler()] * (-(-number // ranks) - len(mine) if self.placement.joins_all else 0)

    @contextmanager
    def _at(self, state: AdapterState, seed: tuple[int, ...] | None, index: int) -> Iterator[None]:
        """Dropout drawn from (seed, number of the micro-batch); errors of memory and of determinism that say what to do."""
        parts = seed if seed is not None else (self._seed, state.step)
        torch.manual_seed(derive_seed(*parts, index))
        try:
            yield
        except torch.OutOfMemoryError as error:
            place = f"micro-batch {index} of optimizer step {state.step + 1}"
            raise TrainingError(f"out of GPU memory in {place}: use a smaller micro_batch_size or row_length") from error
        except RuntimeError as error:
            if "deterministic" not in str(error) or not torch.are_deterministic_algorithms_enabled():
                raise
            raise TrainingError(f"{str(error).splitlines()[0]}. Train with deterministic=False, and resumed runs differ in bits") from error

    def _backward(self, state: AdapterState, loss: torch.Tensor) -> None:
        (loss if state.scaler is None else loss * state.loss_scale).backward()

    def _losses(self, state: AdapterState, parts: Sequence[tuple[int, Part]], num_micro_batches: int) -> CallLosses:
        """Collective. Of a call that is not closed yet."""
        share = self.placement.own_part(1.0)
        own = {index - state.num_micro_batches: part.loss for index, part in parts if part.loss is not None and index >= 0}
        own = own if share == 1.0 else {place: loss * share for place, loss in own.items()}
        return CallLosses(own, num_micro_batches, self.device, self.world_size)

    def _close_call(self, state: AdapterState, parts: Sequence[tuple[int, Part]], num_micro_batches: int) -> tuple[int, float]:
        state.num_micro_batches += num_micro_batches
        state.num_calls += 1
        state.normalised = None
        num_loss_tokens, weight = self._counts(parts)
        state.ready()[1].loss_weight += weight
        return num_loss_tokens, weight

    def _counts(self, parts: Sequence[tuple[int, Part]]) -> tuple[int, float]:
        """Supervised tokens and weight, to be added up over all ranks."""
        counted = [part for _, part in parts] if self.placement.leads else []
        num_loss_tokens = sum(part.num_loss_tokens for part in counted)
        weight = 0.0
        for part in counted:
            weight += part.weight
        return num_loss_tokens, weight

    def take_readings(self, adapter_name: str | None, tickets: Sequence[int]) -> Readings:
        """Not collective: every rank has all numbers."""
        return self.state(adapter_name).ledger.take(tickets)

    def clip_grad_norm(self, max_norm: float, norm_type: float, accumulation: int | None, adapter_name: str | None, ticket: int) -> bool:
        """False while the window is not full. The norm goes into the ledger."""
        state = self.state(adapter_name)
        state.ready()
        if not state.window_is_full(accumulation):
            return False
        state.clip(max_norm, norm_type, ticket)
        return True

    def step(self, accumulation: int | None, adapter_name: str | None) -> bool:
        """Whether a step was taken."""
        state = self.state(adapter_name)
        state.ready()
        return state.window_is_full(accumulation) and state.apply()

    def zero_grad(self, accumulation: int | None, adapter_name: str | None) -> None:
        """Forgets a full window; one that is not full goes on."""
        state = self.state(adapter_name)
        if state.num_calls >= (accumulation or state.accumulation):
            state.start_window()

    def lr_step(self, metric: float | None, adapter_name: str | None) -> None:
        self.state(adapter_name).advance_schedule(metric)

    def clip_grad_and_step(
        self, max_norm: float, norm_type: float, accumulation: int | None, adapter_name: str | None, ticket: int
    ) -> dict[str, float] | None:
        """`metric_facts` after the step; None while the window is not full. The norm before clipping goes into the ledger."""
        state = self.state(adapter_name)
        state.ready()
        state.clipping = (max_norm, norm_type)
        if not state.window_is_full(accumulation):
            return None
        state.take_step(max_norm, norm_type, ticket)
        return self.metric_facts(adapter_name)

    @torch.no_grad()
    def forward_only(
        self,
        micro_batches: Sequence[MicroBatch],
        num_micro_batches: int,
        adapter_name: str | None,
        disable_lora: bool,
        temperature: float,
        returned: Sequence[str],
    ) -> list[tuple[int, list[dict[str, Any]]]]:
        """(Position of the micro-batch, what each row is given), without dropout."""
        self._refuse_cut("forward_only")
        self.place()
        state = (
            self._activated(adapter_name) if adapter_name or len(self.states) == 1 or not disable_lora else next(iter(self.states.values()))
        )
        self.forwards.is_half = state.is_split
        base = state.adapter.disabled if disable_lora and state.adapter is not None else nullcontext()
        needs = tuple(name for name in returned if name in ("embeddings", "scores"))
        was_training = self.model.training
        self.model.eval()
        try:
            with base:
                rated = []
                for batch in self._share(micro_batches, num_micro_batches):
                    answer = self.forwards.answer(batch.rows, state.processor, needs, temperature)
                    if self._metrics(state, False) and not needs:
                        loss_of(None, answer, batch, self.forwards, self._metrics(state, False))
                    rated += [] if batch.is_filler else [(batch.position, ratings(answer, batch.rows, returned))]
                return rated
        finally:
            self.model.train(was_training)
