"""What a worker holds: the model, its adapters, and what is set for each. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from twinkle_core.errors import ConfigError
from twinkle_core.kernel.cpu_layers import drop_cpu_layers, use_cpu_layers
from twinkle_core.kernel.layers import allow_variants
from twinkle_core.model.adapter import Adapter, read_adapter
from twinkle_core.model.adapter_state import AdapterState
from twinkle_core.model.checkpoint_worker import CheckpointWorker
from twinkle_core.model.forward import Forward, compute_type
from twinkle_core.model.grad_scaler import LossScaler
from twinkle_core.model.heads import check_needs, of_score_head, score_head
from twinkle_core.model.layer_settings import attention_kernel, make_deterministic, set_up_layers
from twinkle_core.model.loading import load_model
from twinkle_core.model.losses import LossFunction, is_plain, needs_of
from twinkle_core.model.optimizer import Schedule
from twinkle_core.model.parallel.late_adapters import check_late, whole_shapes
from twinkle_core.model.parallel.sharded_loading import weight_files
from twinkle_core.model.placement import Replicated, open_placement
from twinkle_core.model.seeding import derive_seed
from twinkle_core.model.spec import ModelSpec

if TYPE_CHECKING:
    import peft

    from twinkle_core.config import LoraConfig
    from twinkle_core.device_mesh import DeviceMesh


class AdaptersWorker(CheckpointWorker):
    """The part of a worker that is set up. `adapter_name` None or '' stands for the only adapter, or for all parameters."""

    def __init__(self, *, rank: int, world_size: int, device_mesh: DeviceMesh | None = None) -> None:
        super().__init__(rank, world_size)
        self._device_mesh = device_mesh
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")

    def load(self, spec: ModelSpec) -> tuple[int, int]:
        """Starts anew: whatever was loaded before is dropped. Gives the data rank and the number of data ranks."""
        self._precision = spec.mixed_precision or ("bf16" if self.device.type == "cuda" else "no")
        compute_type(self._precision, self.device)
        make_deterministic(spec, self.device)
        spec = replace(spec, device_mesh=spec.device_mesh or self._device_mesh)
        self.placement = open_placement(self.rank, self.world_size, self.device, spec, self._precision)
        self._spec = spec
        self._seed = spec.seed
        self._placed = False
        self._active: AdapterState | None = None
        check = None if isinstance(self.placement, Replicated) else self.placement.check
        self.model, self.folder = load_model(spec, self.device, on_meta=self.placement.needs_meta, check=check)
        if self.placement.needs_meta and self._lacks_head():
            raise ConfigError("memory_efficient_init reads weights from files, and they hold no head for scores: set it to False")
        self.forwards = Forward(self.model, self.placement, self.device, self._precision, attention_kernel(spec))
        self.states = {"": self._new_state(None, 1)}
        if self.placement.needs_meta:
            self.place()  # an adapter takes its start from real weights
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
            late = "set memory_efficient_init=False, and " if self.placement.needs_meta else ""
            raise ConfigError(f"{late}add all adapters before the first optimizer is set: layers are split over the workers by now")
        saved: Mapping[str, torch.Tensor] | None = None
        if isinstance(config, str):
            config, saved = read_adapter(config)
        beside = None if first else next(iter(self.states.values())).adapter
        seed = derive_seed(self._seed, "adapter")
        if self._placed:
            check_late(config)
        with whole_shapes(self.model) if self._placed else nullcontext():
            adapter = Adapter(self.model, adapter_name, config, seed, beside=beside, is_trainable=is_trainable)
        if self._lacks_head() and not of_score_head(adapter.parameters()):
            raise ConfigError(
                f"{type(self.model).__name__} has a head that its weights lack, and the adapter would not train it: "
                "LoraConfig(modules_to_save=['score']) does"
            )
        if not self._placed:
            self.placement.check(self.model)
        state = self._new_state(adapter, accumulation)
        if saved is not None:
            self.load_weights(state, saved, adapter_name)  # before the model is placed: refused in time
            state.waiting = saved if self.placement.needs_meta else None
        self.states = {adapter_name: state} if first else {**self.states, adapter_name: state}
        self._active = state
        if self._placed:
            self._use_cpu_layers()
        if self.device.type == "cuda":
            allow_variants(len(self.states))
        if first and not self._placed and (half := compute_type(self._precision, self.device)) is not torch.float32:
            adapted = {id(parameter) for parameter in adapter.parameters().values()}
            for parameter in self.model.parameters():
                if id(parameter) not in adapted and parameter.ndim >= 2:
                    parameter.data = parameter.data.to(half)

    def _lacks_head(self) -> bool:
        """Whether the model has a head for scores that was drawn anew, since no file holds it."""
        head = score_head(self.model)
        return head is not None and not (self.folder is not None and of_score_head(weight_files(self.folder)))

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
        self.forwards.is_half = state.is_split
        return state

    def place(self) -> None:
        if self._placed:
            return
        self.placement.place(self.model, self.folder)
        for state in self.states.values():
            state.set_parameters(dict(self.model.named_parameters()) if state.adapter is None else state.adapter.parameters())
            if state.waiting is not None:
                self.placement.scatter(state.waiting, state.parameters)
                state.waiting = None
        self._use_cpu_layers()
        self._placed = True
        set_up_layers(self.model, self.placement, self._spec, self._precision)

    def _use_cpu_layers(self) -> None:
        """Not in a patched model: a patch may hook layers that are passed by then, or change their classes."""
        if self.device.type == "cpu" and not self.forwards.is_patched:
            use_cpu_layers(self.model)

    def set_optimizer(self, optimizer_cls: Any, arguments: Mapping[str, Any], adapter_name: str | None) -> None:
        state = self._activated(adapter_name)
        state.set_optimizer(optimizer_cls, arguments, may_split=self._may_split())
        if state.is_split:
            trained = {id(parameter) for other in self.states.values() for parameter in other.parameters.values()}
            for parameter in self.model.parameters():
                if id(parameter) not in trained:
                    parameter.data = parameter.data.to(torch.bfloat16)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()  # of the float32 values: other sizes come now

    def _may_split(self) -> bool:
        """Whether trained parameters may be held in bf16, the rest of their float32 values beside them: in bf16, whole on each
        worker, and where transformers has no part of the model stay float32. Otherwise they are float32, and autocast computes.
        """
        kept = getattr(self.model, "_keep_in_fp32_modules", None) or getattr(self.model, "_keep_in_fp32_modules_strict", None) or ()
        stays = any(part in name for part in kept for name, _ in self.model.named_parameters())
        return self._precision == "bf16" and isinstance(self.placement, Replicated) and not stays

    def set_lr_scheduler(self, scheduler_cls: Any, arguments: Mapping[str, Any], adapter_name: str | None) -> None:
        state = self.state(adapter_name)
        state.schedule = Schedule(scheduler_cls, arguments, lr=state.ready()[0].base_lr)

    def set_loss(self, loss: LossFunction, adapter_name: str | None) -> None:
        check_needs(self.model, needs_of(loss))
        if not is_plain(loss):
            self._refuse_cut("a loss of its own")
        self.state(adapter_name).loss = None if is_plain(loss) and self.placement.cuts_rows else loss

    def set_processor(self, processor: Any, adapter_name: str | None) -> None:
        self.state(adapter_name).processor = processor

    def set_grad_scaler(self, settings: Mapping[str, Any], adapter_name: str | None) -> None:
        if self._precision != "fp16":
            raise ConfigError(f"mixed_precision is {self._precision!r}: a gradient scaler is for 'fp16' alone")
        self.state(adapter_name).scaler = LossScaler(**settings)

    def apply_patch(self, patch: Callable[[Any], Any]) -> None:
        before = {name: id(parameter) for name, parameter in self.model.named_parameters()}
        drop_cpu_layers(self.model)
        self.forwards.is_patched = True
        patch(self.model)
        after = {name: id(parameter) for name, parameter in self.model.named_parameters()}
        if before != after:
            changed = sorted({name for name, _ in before.items() ^ after.items()})
            raise ConfigError(f"the patch replaced parameters ({', '.join(changed[:5])}); a patch may change how the model computes only")

    def get_step(self, adapter_name: str | None) -> int:
        return self.state(adapter_name).step

    def get_lr(self, adapter_name: str | None) -> float:
        return self.state(adapter_name).lr()

    def metric_facts(self, adapter_name: str | None) -> dict[str, float]:
        state = self.state(adapter_name)
        facts: dict[str, float] = {"step": state.step}
        if state.optimizer is not None:
            facts["lr"] = state.lr()
        return facts | (
            {"num_skipped_steps": state.scaler.num_skipped, "loss_scale": state.scaler.scale} if state.scaler is not None else {}
        )

    def _refuse_cut(self, what: str) -> None:
        """On every rank, before any of them waits for another."""
        if self.placement.cuts_rows:
            raise ConfigError(f"the mesh cuts rows over ranks (ulysses_size, cp_size), and {what} needs whole rows: use fsdp_size")

    def add_metric(self, metric: Any, is_training: bool, adapter_name: str | None) -> None:
        self._refuse_cut("a metric of the forward pass")
        self.state(adapter_name).metrics[is_training].append(metric)

    def metric_sums(self, is_training: bool, adapter_name: str | None) -> list[dict[str, float]]:
        """Of each metric, since the last time."""
        metrics = self.state(adapter_name).metrics[is_training]
        sums = [metric.sums() for metric in metrics]
        for metric in metrics:
            metric.reset()
        return sums

    def get_train_configs(self, adapter_name: str | None) -> dict[str, Any]:
        state = self.state(adapter_name)
        return {
            "model": self._spec.model_id or type(self.model).__name__,
            "adapter": state.name or None,
            "adapter_config": state.adapter.config_dict() if state.adapter is not None else None,
            "num_trained_parameters": sum(parameter.numel() for parameter in state.parameters.values()),
            "mixed_precision": self._precision,
            "parameters": "bf16, with the rest of their float32 values beside them" if state.is_split else "float32",
            "gradient_accumulation_steps": state.accumulation,
            "data_ranks": self.placement.data_world_size,
            "loss": type(state.loss).__name__ if state.loss is not None else "CrossEntropyLoss",
            **(state.settings() if state.optimizer is not None else {"optimizer": None}),
        }

    def get_accumulation(self, adapter_name: str | None) -> int:
        return self.state(adapter_name).accumulation
