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

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from twinkle_core.dataset.input_feature import InputFeature, encoded_sample
from twinkle_core.errors import ConfigError, DamagedError
from twinkle_core.infra.group import WorkerGroup
from twinkle_core.types import EncodedSample, PackedRow, StepOutput

if TYPE_CHECKING:
    import numpy as np
    import peft

    from storage.artifact import FileEntry
    from twinkle_core.config import LoraConfig

TRANSFORMERS_WORKER = "twinkle_core.model.transformers_worker:TransformersWorker"
"""The worker class to build a group of, e.g. `RayGroup(TRANSFORMERS_WORKER, workers=2)`."""
TRAINER_STATE_FILE = "trainer_state.json"

Row = PackedRow | EncodedSample


class TransformersModel:
    """A causal language model, replicated on each worker of `group` (None: one worker in this process).

    `model_id` is a folder that every worker can read. `mixed_precision` 'bf16' computes in bfloat16 and keeps trained
    parameters float32. `seed` decides the adapter's start and, where `forward_backward` gets none, dropout.
    """

    def __init__(self, model_id: str | Path, *, group: WorkerGroup | None = None, mixed_precision: str = "no", seed: int = 0) -> None:
        if group is None:
            from twinkle_core.infra.local_group import LocalGroup

            group = LocalGroup(TRANSFORMERS_WORKER)
        self._group = group
        group.call("load", str(model_id), mixed_precision, seed)

    @property
    def cur_step(self) -> int:
        """Optimizer steps taken."""
        result: int = self._group.call("get_step", collect="first")
        return result

    def add_adapter_to_model(self, adapter_name: str, config: LoraConfig | peft.LoraConfig) -> None:
        """Adds a LoRA adapter and freezes the rest. Without a call of this, all parameters are trained."""
        self._group.call("add_adapter_to_model", adapter_name, config)

    def set_optimizer(
        self,
        optimizer_cls: str = "AdamW",
        *,
        lr: float,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        """The optimizer of the parameters that are trainable now: add an adapter first."""
        self._group.call("set_optimizer", optimizer_cls, lr, weight_decay, betas, eps)

    def set_lr_scheduler(self, scheduler_cls: str, *, num_training_steps: int, num_warmup_steps: int = 0) -> None:
        """Learning rate over optimizer steps; see `twinkle_core.scheduler` for the names."""
        self._group.call("set_lr_scheduler", scheduler_cls, num_training_steps, num_warmup_steps)

    def forward_backward(
        self, inputs: Sequence[Row | InputFeature], *, micro_batch_size: int = 1, seed: tuple[int, ...] | None = None
    ) -> StepOutput:
        """Adds the gradient of the summed token losses of `inputs`, in micro-batches of `micro_batch_size` consecutive rows.

        Micro-batches are numbered from the last optimizer step on, over all calls; number i draws its dropout from
        (seed, i). `seed` None stands for (the model's seed, cur_step). Worker r computes micro-batches r, r + W, …
        Raises `TrainingError` naming the step when a loss is not finite or GPU memory is exhausted.
        """
        micro_batches = list(enumerate(_micro_batches(inputs, micro_batch_size)))
        loss_sum, num_loss_tokens, loss_weight = self._group.call(
            "forward_backward", micro_batches, len(micro_batches), seed, dispatch="round_robin", collect="sum"
        )
        return StepOutput(loss_sum=loss_sum, num_loss_tokens=num_loss_tokens, loss_weight=loss_weight)

    def clip_grad_and_step(self, max_grad_norm: float = 1.0) -> float:
        """One optimizer step over everything accumulated. Gives the global gradient norm before clipping.

        Raises `TrainingError` naming the step when there was no supervised token, the gradient is not finite, or the
        learning rate schedule is over.
        """
        result: float = self._group.call("clip_grad_and_step", max_grad_norm, collect="first")
        return result

    def forward_only(self, inputs: Sequence[Row | InputFeature], *, micro_batch_size: int = 1) -> list[dict[str, float]]:
        """For each row, in order: `loss_sum` in nats, `num_loss_tokens`, `num_correct` (greedy next token right). No dropout."""
        micro_batches = _micro_batches(inputs, micro_batch_size)
        result: list[dict[str, float]] = self._group.call("forward_only", micro_batches, dispatch="slice", collect="flatten")
        return result

    def get_lr(self) -> float:
        """Learning rate of the next optimizer step (0 after the schedule's last)."""
        result: float = self._group.call("get_lr", collect="first")
        return result

    def get_state_dict(self) -> dict[str, np.ndarray]:
        """The trained parameters by the names they have in a checkpoint, float32."""
        result: dict[str, np.ndarray] = self._group.call("get_state_dict", collect="first")
        return result

    def begin_save(self, store_url: str, prefix: str) -> None:
        """Copies the training state aside on worker 0 and starts writing and uploading it under `prefix` of the store.

        Training may go on at once. One save at a time: call `end_save` in between.
        """
        self._group.call("begin_save", store_url, prefix)

    def end_save(self, block: bool = True) -> tuple[FileEntry, ...] | None:
        """The files of the save that was begun, once it is done; None while it runs (`block=False`) or when none was begun.

        Raises what the save raised.
        """
        result: tuple[FileEntry, ...] | None = self._group.call("end_save", block, collect="first")
        return result

    def restore(self, folder: str | Path, *, only_weights: bool = False) -> None:
        """Loads weights, optimizer, schedule, step and RNG states. Set up adapter, optimizer and schedule first, as they were.

        Raises `DataError` naming each missing, unexpected or misshapen tensor, `ConfigError` for other settings than
        the saved ones, and `DamagedError` for files that cannot be read; nothing is changed then.
        """
        self._group.call("restore", str(folder), only_weights)

    def restore_from(self, store_url: str, prefix: str, entries: Sequence[FileEntry]) -> None:
        """As `restore`, from a checkpoint in a store: every worker fetches it and verifies each file."""
        self._group.call("restore_from", store_url, prefix, tuple(entries))

    def save(self, name: str, output_dir: str | Path, *, consumed_train_samples: int = 0, gradient_accumulation_steps: int = 1) -> Path:
        """Writes the folder `output_dir/name`, which appears whole or not at all; an existing one is refused. Gives the folder."""
        if Path(name).name != name or name in ("", ".", ".."):
            raise ConfigError(f"checkpoint name {name!r} must be a plain folder name")
        state = {"consumed_train_samples": consumed_train_samples, "gradient_accumulation_steps": gradient_accumulation_steps}
        return Path(self._group.call("save", str(Path(output_dir).absolute() / name), state, collect="first"))

    def resume_from_checkpoint(self, checkpoint_dir: str | Path, *, resume_only_model: bool = False) -> dict[str, int]:
        """Restores a folder of `save`. Gives cur_step, consumed_train_samples and gradient_accumulation_steps."""
        path = Path(checkpoint_dir) / TRAINER_STATE_FILE
        try:
            state = json.loads(path.read_text())
        except (OSError, ValueError) as error:
            raise DamagedError(f"{path} cannot be read ({error}): the checkpoint is not whole, use another") from error
        self.restore(checkpoint_dir, only_weights=resume_only_model)
        return {key: int(state[key]) for key in ("cur_step", "consumed_train_samples", "gradient_accumulation_steps")}

    def shutdown(self) -> None:
        """Ends the workers."""
        self._group.shutdown()


def _micro_batches(inputs: Sequence[Row | InputFeature], size: int) -> list[list[Any]]:
    if size < 1:
        raise ConfigError(f"micro_batch_size is {size}; at least 1 is needed")
    if not inputs:
        raise ConfigError("no rows were given")
    rows = [encoded_sample(row) if isinstance(row, dict) else row for row in inputs]
    return [rows[start : start + size] for start in range(0, len(rows), size)]
