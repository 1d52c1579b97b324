"""Setting up what a model trains: adapters, optimizers, schedules, losses, templates, metrics. The driver's side; imports no torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_core.errors import ConfigError
from twinkle_core.infra.group import WorkerGroup
from twinkle_core.model.metrics import AdapterMetrics
from twinkle_core.model.spec import ModelSpec

if TYPE_CHECKING:
    import peft

    from twinkle_core.config import LoraConfig
    from twinkle_core.patch import Patch
    from twinkle_core.template.base import Template


class ModelSetup:
    """The part of a model's driver that sets things up. In every method `adapter_name` None or '' stands for the only adapter.

    Where no adapter was added it stands for all parameters; where there are several, it must be given.
    """

    _group: WorkerGroup
    _spec: ModelSpec
    _templates: dict[str, Template]
    _metrics: dict[str, AdapterMetrics]

    def add_adapter_to_model(
        self,
        adapter_name: str,
        config_or_dir: LoraConfig | peft.LoraConfig | str | Path,
        gradient_accumulation_steps: int = 1,
        is_trainable: bool = True,
    ) -> None:
        """Adds a LoRA adapter and freezes the base. Without a call of this, all parameters are trained.

        `config_or_dir` is the settings, or the folder of a saved adapter, whose tensors are loaded. Several adapters lie side by
        side, each with its own optimizer, schedule, loss and accumulation. With `gradient_accumulation_steps` n the loop may
        call `forward_backward` and `clip_grad_and_step` for each batch: every n-th call takes the step.
        """
        config = str(config_or_dir) if isinstance(config_or_dir, (str, Path)) else config_or_dir
        self._group.call("add_adapter_to_model", adapter_name, config, gradient_accumulation_steps, is_trainable)
        if "" in self._metrics:
            self._metrics.clear()
        self._metrics[adapter_name] = AdapterMetrics()

    def set_optimizer(self, optimizer_cls: Any = "AdamW", *, adapter_name: str | None = None, **arguments: Any) -> None:
        """The optimizer of the adapter's parameters: a name of torch.optim, or a class like those, with its arguments; `lr` is needed.

        'AdamW' is torch's fused one, with weight_decay 0 unless it is given. Without adapters, of all parameters.
        """
        self._group.call("set_optimizer", optimizer_cls, arguments, adapter_name)

    def set_lr_scheduler(self, scheduler_cls: Any, *, adapter_name: str | None = None, **arguments: Any) -> None:
        """Learning rate over optimizer steps (not micro-batches); see `twinkle_core.scheduler` for the names and their arguments."""
        self._group.call("set_lr_scheduler", scheduler_cls, arguments, adapter_name)

    def set_loss(self, loss_cls: Any, *, adapter_name: str | None = None, **arguments: Any) -> None:
        """What is learnt: a name of `twinkle_core.loss`, a class with its arguments, or a function (inputs, outputs) -> `LossOutput`.

        Without a call: cross-entropy of the labels.
        """
        from twinkle_core.loss import build_loss

        self._group.call("set_loss", build_loss(loss_cls, arguments), adapter_name)

    def set_template(
        self,
        template_cls: str | type[Template] | Template,
        *,
        model_id: str | Path | None = None,
        adapter_name: str | None = None,
        **settings: Any,
    ) -> None:
        """What encodes raw trajectories that are handed to `forward` and its like. `model_id` None: the model's own tokenizer."""
        from twinkle_core.dataset.template import build_template

        if model_id is None and isinstance(template_cls, (str, type)):
            model_id = self._spec.model_id
        self._templates[self._name(adapter_name)] = build_template(template_cls, model_id, settings, self._spec.cache_dir)

    def set_processor(self, processor_cls: Any, *, adapter_name: str | None = None, **arguments: Any) -> None:
        """What collates rows: 'InputProcessor', a class with its arguments, or an object with `collate` (see `InputProcessor.collate`)."""
        from twinkle_core.processor import InputProcessor

        known = {"InputProcessor": InputProcessor}
        if isinstance(processor_cls, str):
            if processor_cls not in known:
                raise ConfigError(f"processor is {processor_cls!r}; known: {', '.join(known)}")
            processor_cls = known[processor_cls]
        if isinstance(processor_cls, type):
            try:
                processor_cls = processor_cls(**arguments)
            except TypeError as error:
                raise ConfigError(f"{processor_cls.__name__} does not take {arguments}: {error}") from error
        elif arguments:
            raise ConfigError(f"the processor is built already: {', '.join(arguments)} are for a class")
        if not callable(getattr(processor_cls, "collate", None)):
            raise ConfigError(f"processor is {processor_cls!r}, which has no collate(rows)")
        self._group.call("set_processor", processor_cls, adapter_name)

    def set_grad_scaler(self, *, adapter_name: str | None = None, **settings: Any) -> None:
        """Of a model in fp16: init_scale, growth_factor, backoff_factor, growth_interval, enabled, as torch.amp.GradScaler's.

        `init_scale` is 1024 if not given: losses are sums over tokens here.
        """
        self._group.call("set_grad_scaler", settings, adapter_name)

    def add_metric(self, metric_cls: Any, is_training: bool | None = None, *, adapter_name: str | None = None, **arguments: Any) -> None:
        """A metric beside those that are always there: a name of `twinkle_core.metric`, or a class with its arguments.

        `is_training` True: over training calls; False: over `forward_only`; None: over both, apart.
        """
        from twinkle_core.metric import build_metric

        metric = build_metric(metric_cls, arguments)
        kept = self._metrics_of(adapter_name)
        if metric.when == "step":
            kept.of_steps.append(metric)
        elif metric.when == "hand":
            raise ConfigError(f"{type(metric).__name__} is not fed by the model: make one yourself and call its accumulate")
        else:
            for of_training in (True, False) if is_training is None else (is_training,):
                kept.added[of_training].append(deepcopy(metric))
                self._group.call("add_metric", deepcopy(metric), of_training, adapter_name)

    def apply_patch(self, patch_cls: str | Patch | Callable[..., Any] | type, **arguments: Any) -> None:
        """Changes how the model computes on every worker; parameters must stay the ones they are.

        `patch_cls`: a name of `twinkle_core.patch`, a class of `Patch`, or a function, which is called with the model and the
        arguments; any other class is made with the arguments, and called with the model.
        """
        from twinkle_core.patch import build_patch

        self._group.call("apply_patch", build_patch(patch_cls, arguments))

    def get_train_configs(self, *, adapter_name: str | None = None) -> str:
        """How the adapter is trained, as JSON to read."""
        settings: Mapping[str, Any] = self._group.call("get_train_configs", adapter_name, collect="first")
        return json.dumps(settings, indent=2, default=str)

    def _name(self, adapter_name: str | None) -> str:
        """The adapter that is meant. Raises `ConfigError` naming the known ones."""
        if not adapter_name and len(self._metrics) == 1:
            return next(iter(self._metrics))
        if not adapter_name or adapter_name not in self._metrics:
            raise ConfigError(f"adapter_name is {adapter_name!r}; known: {', '.join(map(repr, self._metrics))}")
        return adapter_name

    def _metrics_of(self, adapter_name: str | None) -> AdapterMetrics:
        return self._metrics[self._name(adapter_name)]
