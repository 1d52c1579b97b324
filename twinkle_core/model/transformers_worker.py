"""One rank of a transformers model in training. Imports torch; built by a worker group, one a process."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from twinkle_core.errors import ConfigError, TrainingError
from twinkle_core.model.adapter import Adapter, read_adapter
from twinkle_core.model.adapter_state import AdapterState
from twinkle_core.model.checkpoint_worker import CheckpointWorker
from twinkle_core.model.forward import Answer, Forward, compute_type, ratings
from twinkle_core.model.grad_scaler import LossScaler
from twinkle_core.model.loading import load_model
from twinkle_core.model.losses import LossFunction, Part, loss_of, needs_of
from twinkle_core.model.micro_batch import MicroBatch
from twinkle_core.model.optimizer import build_schedule
from twinkle_core.model.placement import open_placement
from twinkle_core.model.seeding import derive_seed
from twinkle_core.model.spec import ModelSpec

if TYPE_CHECKING:
    import peft

    from twinkle_core.config import LoraConfig


@dataclass(kw_only=True)
class Pending:
    """What `forward` keeps until `backward`."""

    state: AdapterState
    answers: list[tuple[int, MicroBatch, Answer]]
    num_micro_batches: int
    parts: list[tuple[int, Part]] | None = None


class TransformersWorker(CheckpointWorker):
    """The worker side of `TransformersModel`; its methods are the driver's, on this worker's share.

    `adapter_name` None stands for the only adapter, or for all parameters where there is none.
    """

    def __init__(self, *, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    def load(self, spec: ModelSpec) -> tuple[int, int]:
        """Starts anew: whatever was loaded before is dropped. Gives the data rank and the number of data ranks."""
        self._precision = spec.mixed_precision or ("bf16" if self.device.type == "cuda" else "no")
        compute_type(self._precision, self.device)
        self.placement = open_placement(self.rank, self.world_size, self.device, spec)
        self._spec = spec
        self._seed = spec.seed
        self._placed = False
        self._active: AdapterState | None = None
        self._pending: Pending | None = None
        self.model, self.folder = load_model(spec, self.device, on_meta=self.placement.needs_meta)
        self.forwards = Forward(self.model, self.placement, self.device, self._precision)
        self.states = {"": self._new_state(None, 1)}
        return self.placement.data_rank, self.placement.data_world_size

    def _new_state(self, adapter: Adapter | None, accumulation: int) -> AdapterState:
        parameters = dict(self.model.named_parameters()) if adapter is None else adapter.parameters()
        state = AdapterState(adapter, parameters, self.placement, accumulation)
        state.scaler = LossScaler(**self._spec.grad_scaler_config) if self._precision == "fp16" else None
        return state

    def add_adapter_to_model(
        self, adapter_name: str, config: LoraConfig | peft.LoraConfig | str, accumulation: int, is_trainable: bool
    ) -> None:
        first = "" in self.states
        if first and self.states[""].optimizer is not None:
            raise ConfigError("all parameters have an optimizer: add adapters before set_optimizer")
        if adapter_name in self.states and adapter_name:
            raise ConfigError(f"adapter {adapter_name!r} is there already")
        if self._placed and not self.placement.takes_adapters_late:
            raise ConfigError("add all adapters before the first optimizer is set: the parameters lie on their workers by now")
        saved: Mapping[str, torch.Tensor] | None = None
        if isinstance(config, str):
            config, saved = read_adapter(config)
        beside = None if first else next(iter(self.states.values())).adapter
        adapter = Adapter(self.model, adapter_name, config, derive_seed(self._seed, "adapter"), beside=beside, is_trainable=is_trainable)
        state = self._new_state(adapter, accumulation)
        if saved is not None:
            self.load_weights(state, saved, adapter_name)
        self.states = {adapter_name: state} if first else {**self.states, adapter_name: state}
        self._active = state
        if first and (half := compute_type(self._precision, self.device)) is not torch.float32:
            adapted = {id(parameter) for parameter in adapter.parameters().values()}
            for parameter in self.model.parameters():
                if id(parameter) not in adapted and parameter.ndim >= 2:
                    parameter.data = parameter.data.to(half)

    def state(self, adapter_name: str | None = None) -> AdapterState:
        """What is trained under a name."""
        if not adapter_name and len(self.states) == 1:
            return next(iter(self.states.values()))
        if not adapter_name or adapter_name not in self.states:
            known = ", ".join(map(repr, self.states)) or "none"
            raise ConfigError(f"adapter_name is {adapter_name!r}; known: {known}")
        return self.states[adapter_name]

    def _activated(self, adapter_name: str | None) -> AdapterState:
        """The state, its adapter switched on and the model placed."""
        self.place()
        state = self.state(adapter_name)
        if state.adapter is not None and self._active is not state:
            state.adapter.activate()
            self._active = state
        return state

    def place(self) -> None:
        if self._placed:
            return
        self.placement.place(self.model, self.folder)
        for state in self.states.values():
            state.set_parameters(dict(self.model.named_parameters()) if state.adapter is None else state.adapter.parameters())
        self._placed = True

    def set_optimizer(self, optimizer_cls: Any, arguments: Mapping[str, Any], adapter_name: str | None) -> None:
        self._activated(adapter_name).set_optimizer(optimizer_cls, arguments)

    def set_lr_scheduler(self, scheduler_cls: Any, arguments: Mapping[str, Any], adapter_name: str | None) -> None:
        self.state(adapter_name).schedule = build_schedule(scheduler_cls, arguments)

    def set_loss(self, loss: LossFunction, adapter_name: str | None) -> None:
        needs_of(loss)
        self.state(adapter_name).loss = loss

    def set_processor(self, processor: Any, adapter_name: str | None) -> None:
        self.state(adapter_name).processor = processor

    def set_grad_scaler(self, settings: Mapping[str, Any], adapter_name: str | None) -> None:
        if self._precision != "fp16":
            raise ConfigError(f"mixed_precision is {self._precision!r}: a gradient scaler is for 'fp16' alone")
        self.state(adapter_name).scaler = LossScaler(**settings)

    def apply_patch(self, patch: Callable[[Any], Any]) -> None:
        before = {name: id(parameter) for name, parameter in self.model.named_parameters()}
        patch(self.model)
        after = {name: id(parameter) for name, parameter in self.model.named_parameters()}
        if before != after:
            changed = sorted({name for name, _ in before.items() ^ after.items()})
            raise ConfigError(f"the patch replaced parameters ({', '.join(changed[:5])}); a patch may change how the model computes only")

    def get_step(self, adapter_name: str | None) -> int:
        return self.state(adapter_name).step

    def get_lr(self, adapter_name: str | None) -> float:
        return self.state(adapter_name).lr()

    def forward_backward(
        self, micro_batches: Sequence[MicroBatch], num_micro_batches: int, seed: tuple[int, ...] | None, adapter_name: str | None
    ) -> tuple[float, int, float]:
        """Loss sum, supervised tokens and the weight of the loss over this worker's micro-batches."""
        state = self._activated(adapter_name)
        state.ready()
        parts = []
        for index, micro_batch in self._numbered(state, micro_batches, num_micro_batches):
            with self._at(state, seed, index):
                answer = self.forwards.answer(micro_batch.rows, state.processor, needs_of(state.loss))
                part = loss_of(state.loss, answer, micro_batch, self.forwards)
                if part.loss is not None:
                    self._backward(state, part.loss)
                    part = replace(part, loss=part.loss.detach())
            parts.append((index, part))
        return self._close_call(state, parts, num_micro_batches)

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

    def calculate_loss(self, inputs: Sequence[MicroBatch] | None, adapter_name: str | None) -> tuple[float, int, float]:
        """Of what `forward` kept; `inputs` are its micro-batches once more, with what the loss needs to know of them."""
        pending = self._pending_of(adapter_name)
        given = {batch.position: batch for batch in inputs or ()}
        pending.parts = [
            (index, loss_of(pending.state.loss, answer, given.get(batch.position, batch), self.forwards))
            for index, batch, answer in pending.answers
        ]
        return self._sums(pending.state, pending.parts)

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
        """Dropout drawn from (seed, number of the micro-batch); an error of memory that says where."""
        parts = seed if seed is not None else (self._seed, state.step)
        torch.manual_seed(derive_seed(*parts, index))
        try:
            yield
        except torch.OutOfMemoryError as error:
            place = f"micro-batch {index} of optimizer step {state.step + 1}"
            raise TrainingError(f"out of GPU memory in {place}: use a smaller micro_batch_size or row_length") from error

    def _backward(self, state: AdapterState, loss: torch.Tensor) -> None:
        (loss if state.scaler is None else loss * state.loss_scale).backward()  # type: ignore[no-untyped-call]

    def _close_call(self, state: AdapterState, parts: Sequence[tuple[int, Part]], num_micro_batches: int) -> tuple[float, int, float]:
        state.num_micro_batches += num_micro_batches
        state.num_calls += 1
        state.normalised = None
        sums = self._sums(state, parts)
        state.ready()[1].loss_weight += sums[2]
        return sums

    def _sums(self, state: AdapterState, parts: Sequence[tuple[int, Part]]) -> tuple[float, int, float]:
        """Loss sum, supervised tokens and weight, to be added up over all ranks. Raises `TrainingError` for a loss that is not finite."""
        losses = {index: part.loss.detach() for index, part in parts if part.loss is not None}
        values = torch.stack(list(losses.values())).tolist() if losses else []
        for index, value in zip(losses, values, strict=True):
            if not math.isfinite(value):
                place = f"at optimizer step {state.step + 1}"
                raise TrainingError(f"loss of micro-batch {index} is {value} {place}; look at its rows and the learning rate")
        counted = [part for _, part in parts] if self.placement.leads else []
        num_loss_tokens = sum(part.num_loss_tokens for part in counted)
        weight = 0.0
        for part in counted:
            weight += part.weight
        return self.placement.own_part(math.fsum(values)), num_loss_tokens, weight

    def clip_grad_norm(self, max_norm: float, norm_type: float, accumulation: int | None, adapter_name: str | None) -> float | None:
        """None while the window is not full."""
        state = self.state(adapter_name)
        state.ready()
        return state.clip(max_norm, norm_type) if state.window_is_full(accumulation) else None

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

    def lr_step(self, adapter_name: str | None) -> None:
        self.state(adapter_name).advance_schedule()

    def clip_grad_and_step(self, max_norm: float, norm_type: float, accumulation: int | None, adapter_name: str | None) -> float | None:
        """Norm before clipping; None while the window is not full."""
        state = self.state(adapter_name)
        state.ready()
        state.clipping = (max_norm, norm_type)
        return state.take_step(max_norm, norm_type) if state.window_is_full(accumulation) else None

    def metric_facts(self, adapter_name: str | None) -> dict[str, float]:
        state = self.state(adapter_name)
        facts: dict[str, float] = {"step": state.step}
        if state.optimizer is not None:
            facts["lr"] = state.lr()
        return facts | (
            {"num_skipped_steps": state.scaler.num_skipped, "loss_scale": state.scaler.scale} if state.scaler is not None else {}
        )

    def get_train_configs(self, adapter_name: str | None) -> dict[str, Any]:
        state = self.state(adapter_name)
        return {
            "model": self._spec.model_id or type(self.model).__name__,
            "adapter": state.name or None,
            "adapter_config": state.adapter.config_dict() if state.adapter is not None else None,
            "num_trained_parameters": sum(parameter.numel() for parameter in state.parameters.values()),
            "mixed_precision": self._precision,
            "gradient_accumulation_steps": state.accumulation,
            "data_ranks": self.placement.data_world_size,
            "loss": type(state.loss).__name__ if state.loss is not None else "CrossEntropyLoss",
            **(state.settings() if state.optimizer is not None else {"optimizer": None}),
        }

    def get_accumulation(self, adapter_name: str | None) -> int:
        return self.state(adapter_name).accumulation

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
        self.place()
        state = (
            self._activated(adapter_name) if adapter_name or len(self.states) == 1 or not disable_lora else next(iter(self.states.values()))
        )
        base = state.adapter.disabled if disable_lora and state.adapter is not None else nullcontext()
        needs = ("embeddings",) if "embeddings" in returned else ()
        was_training = self.model.training
        self.model.eval()
        try:
            with base:
                rated = []
                for batch in self._share(micro_batches, num_micro_batches):
                    answer = self.forwards.answer(batch.rows, state.processor, needs, temperature)
                    rated += [] if batch.is_filler else [(batch.position, ratings(answer, batch.rows, returned))]
                return rated
        finally:
            self.model.train(was_training)
