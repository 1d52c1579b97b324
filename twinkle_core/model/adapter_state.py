"""What training one adapter (or all parameters) has beside the model: optimizer, schedule, scale, gradients, counters. Imports torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch

from twinkle_core.errors import ConfigError, TrainingError
from twinkle_core.model.adapter import Adapter
from twinkle_core.model.grad_scaler import LossScaler
from twinkle_core.model.half_gradients import HalfGradients
from twinkle_core.model.ledger import Ledger
from twinkle_core.model.optimizer import Optimizer, Schedule
from twinkle_core.model.parallel.whole_tensors import assign_local, local_part
from twinkle_core.model.placement import Gradients, Placement
from twinkle_core.model.split_adamw import SplitAdamW, is_taken
from twinkle_core.processor.base import InputProcessor
from twinkle_core.types import IGNORE


class AdapterState:
    """One set of trained parameters and its course.

    An accumulation window is what `forward_backward` adds up until the step. It is full after `accumulation` calls (or
    more); a step before that is put off. `normalised` is the window's gradient norm once it has been divided and clipped.
    """

    def __init__(
        self, adapter: Adapter | None, parameters: Mapping[str, torch.nn.Parameter], placement: Placement, accumulation: int
    ) -> None:
        if accumulation < 1:
            raise ConfigError(f"gradient_accumulation_steps is {accumulation}; at least 1 is needed")
        self.adapter = adapter
        self.accumulation = accumulation
        self.processor: Any = InputProcessor()
        self.loss: Any = None
        self.metrics: dict[bool, list[Any]] = {True: [], False: []}
        """Of training calls, and of `forward_only`."""
        self._placement = placement
        self.ledger = Ledger()
        self.set_parameters(parameters)
        self.waiting: Mapping[str, torch.Tensor] | None = None
        """Weights of an adapter whose parameters have no memory before the model is placed."""
        self.optimizer: Optimizer | SplitAdamW | None = None
        self.schedule: Schedule | None = None
        self.scaler: LossScaler | None = None
        self.gradients: Gradients | None = None
        self.step = 0
        self.schedule_step = 0
        self.stepped = False
        """A step was taken since the schedule last moved."""
        self.clipping = (1.0, 2.0)
        """Largest norm and its type, as last asked for: a short last window is clipped alike."""
        self.start_window()

    @property
    def name(self) -> str:
        return self.adapter.name if self.adapter is not None else ""

    def set_parameters(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.parameters = {name: parameters[name] for name in sorted(parameters)}
        self.model_order = tuple(parameters)

    def start_window(self) -> None:
        if getattr(self, "gradients", None) is not None:
            self.gradients.zero()  # type: ignore[union-attr]
        self.num_calls = 0
        self.num_micro_batches = 0
        self.normalised: torch.Tensor | None = None

    def set_optimizer(self, optimizer_cls: Any, arguments: Mapping[str, Any], *, may_split: bool = False) -> None:
        """`may_split`: the model may hold these parameters in bf16, where the optimizer is one that keeps their float32 values."""
        if self.adapter is not None and not self.adapter.is_trainable:
            raise ConfigError(f"adapter {self.name!r} was added with is_trainable=False: it has nothing to optimize")
        if isinstance(self.optimizer, SplitAdamW):
            self.optimizer.give_back()
            self.optimizer = None
        if may_split and is_taken(optimizer_cls, arguments):
            self.optimizer = SplitAdamW(self.parameters, arguments)
            self.gradients = self.optimizer.gradients = HalfGradients(self.parameters, self._placement.data_world_size)
        else:
            self.optimizer = Optimizer(optimizer_cls, self.parameters, arguments)
            self.gradients = self._placement.gradients(self.parameters)
        self.start_window()
        self.forget_trouble()

    @property
    def is_split(self) -> bool:
        """Whether the model holds these parameters in bf16, with the rest of their float32 values beside them."""
        return isinstance(self.optimizer, SplitAdamW)

    def weights(self) -> Mapping[str, torch.Tensor]:
        """The trained values, float32; those of split parameters are made when asked for."""
        return self.optimizer.float32_values() if isinstance(self.optimizer, SplitAdamW) else self.parameters

    def assign(self, values: Mapping[str, torch.Tensor]) -> None:
        """Takes over this rank's part of each value, by the names of `weights`."""
        if isinstance(self.optimizer, SplitAdamW):
            self.optimizer.assign(values)
        else:
            assign_local(self.parameters, values)

    def ready(self) -> tuple[Optimizer | SplitAdamW, Gradients]:
        if self.optimizer is None or self.gradients is None:
            raise ConfigError("no optimizer is set: call set_optimizer first")
        return self.optimizer, self.gradients

    def lr(self) -> float:
        """Learning rate of the next optimizer step."""
        return self.ready()[0].base_lr * self._factor()

    def _factor(self) -> float:
        return self.schedule.factor(self.schedule_step) if self.schedule is not None else 1.0

    @property
    def loss_scale(self) -> float:
        return self.scaler.scale if self.scaler is not None else 1.0

    def window_is_full(self, accumulation: int | None) -> bool:
        """Raises `TrainingError` for a window in which nothing was called."""
        if accumulation is not None and accumulation < 1:
            raise ConfigError(f"gradient_accumulation_steps is {accumulation}; at least 1 is needed")
        if self.num_calls == 0:
            raise TrainingError(f"no supervised token before optimizer step {self.step + 1}: forward_backward was not called")
        return self.num_calls >= (accumulation or self.accumulation)

    def clip(self, max_norm: float, norm_type: float, ticket: int | None = None) -> torch.Tensor:
        """Collective. Divides the window's gradient by its tokens' weight and scales it down to `max_norm`; gives the norm in between.

        The norm is noted under `ticket`. Does not wait for the device.
        """
        _, gradients = self.ready()
        if self.normalised is not None:
            raise ConfigError("the gradient of this window was divided and clipped already: step, or zero_grad")
        step = self.step + 1
        self._check_schedule()
        loss_weight = gradients.reduce()
        if loss_weight == 0:
            why = f"every label is {IGNORE}, or forward_backward was not called"
            raise TrainingError(f"no supervised token before optimizer step {step}: {why}")
        norm = gradients.normalise_and_clip(loss_weight * self.loss_scale, max_norm, norm_type)
        self._note_norm(norm, ticket)
        self.normalised = norm
        return norm

    def _note_norm(self, norm: torch.Tensor, ticket: int | None) -> None:
        self.ledger.note_norm(ticket, self.step + 1, norm, may_overflow=self.scaler is not None)

    def apply(self) -> bool:
        """The optimizer's step, at the schedule's rate; False where a float16 gradient overflowed and the step was skipped."""
        optimizer, _ = self.ready()
        norm = self.clip(math.inf, 2.0) if self.normalised is None else self.normalised
        if self.scaler is not None:
            is_finite = math.isfinite(float(norm))  # the one place where a step waits for the device: the host decides to skip
            self.scaler.update(is_finite=is_finite)
            if not is_finite:
                return False
        optimizer.set_factor(self._factor())
        optimizer.step()
        self.step += 1
        self.stepped = True
        return True

    def take_step(self, max_norm: float, norm_type: float = 2.0, ticket: int | None = None) -> None:
        """Clip, step, zero and move the schedule on. The norm before clipping is noted under `ticket`."""
        if self.normalised is None:
            self.clip(max_norm, norm_type, ticket)
        elif ticket is not None:
            self._note_norm(self.normalised, ticket)
        self.apply()
        self.advance_schedule()
        self.start_window()

    def close_window(self) -> str | None:
        """Takes the step of a short window, so that nothing that was learnt from is left out. Says so where the schedule leaves no rate."""
        if self.num_calls == 0:
            return None
        if self.schedule_is_over:
            ignored = f"{self.num_calls} forward_backward calls after step {self.step}"
            self.start_window()
            return f"{ignored} change nothing: the schedule is over, make num_training_steps count the last, short window too"
        self.take_step(*self.clipping)
        return None

    def advance_schedule(self, metric: float | None = None) -> None:
        """Moves the rate on, if a step was taken since it last moved."""
        if self.stepped:
            if self.schedule is not None:
                self.schedule.observe(metric)
            self.schedule_step += 1
            self.stepped = False

    def _check_schedule(self) -> None:
        if self.schedule is not None and self.schedule_is_over:
            raise TrainingError(
                f"optimizer step {self.step + 1} is past the schedule's num_training_steps={self.schedule.num_training_steps}"
            )

    @property
    def schedule_is_over(self) -> bool:
        end = self.schedule.num_training_steps if self.schedule is not None else None
        return end is not None and self.schedule_step >= end

    def settings(self) -> dict[str, Any]:
        return {"optimizer": self.ready()[0].settings, "scheduler": self.schedule.settings if self.schedule is not None else None}

    def progress(self) -> dict[str, Any]:
        """What a checkpoint holds besides tensors."""
        optimizer, _ = self.ready()
        more: dict[str, Any] = {"schedule_step": self.schedule_step} if self.schedule_step != self.step else {}
        if self.schedule is not None and (scheduler_state := self.schedule.state) is not None:
            more["scheduler_state"] = scheduler_state
        if self.scaler is not None:
            more["grad_scaler"] = self.scaler.state()
        if (plain := optimizer.plain_state()) is not None:
            more["optimizer_state"] = plain
        return {"cur_step": self.step, **self.settings(), **more}

    def load_progress(self, saved: Mapping[str, Any]) -> None:
        self.step = int(saved["cur_step"])
        self.schedule_step = int(saved.get("schedule_step", self.step))
        self.stepped = False
        if self.schedule is not None:
            self.schedule.load(saved.get("scheduler_state"))
        if self.scaler is not None and "grad_scaler" in saved:
            self.scaler.load(saved["grad_scaler"])

    def forget_trouble(self) -> None:
        """Where weights, optimizer or both were replaced, and all that is there now is finite."""
        if self.optimizer is None or not self.ledger.has_trouble:
            return
        tensors = chain(self.parameters.values(), self.optimizer.tensors().values())
        if all(bool(local_part(tensor).isfinite().all()) for tensor in tensors):
            self.ledger.forget_trouble()
