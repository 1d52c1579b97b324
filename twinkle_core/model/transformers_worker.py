"""One data-parallel replica of a transformers model. Imports torch; built by a worker group, one a process."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from twinkle_core.errors import ConfigError, TrainingError
from twinkle_core.loss.cross_entropy import token_losses
from twinkle_core.model import checkpoint_files as files
from twinkle_core.model.adapter import Adapter, refuse_untrained
from twinkle_core.model.loading import load_base
from twinkle_core.model.optimizer import Optimizer, Schedule, schedule_settings
from twinkle_core.model.placement import Placement, Replicated
from twinkle_core.model.seeding import derive_seed
from twinkle_core.model.transformers import TRAINER_STATE_FILE, Row
from twinkle_core.processor.base import InputProcessor
from twinkle_core.types import IGNORE

if TYPE_CHECKING:
    import numpy as np
    import peft

    from storage.artifact import FileEntry
    from twinkle_core.config import LoraConfig
    from twinkle_core.model.background_save import BackgroundSave


class TransformersWorker:
    """The worker side of `TransformersModel`; its methods are the driver's, on this worker's share."""

    def __init__(self, *, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        self._processor = InputProcessor()
        self.placement: Placement = Replicated(rank, world_size)
        self._save: BackgroundSave | None = None

    def load(self, model_id: str, mixed_precision: str, seed: int) -> None:
        """Starts anew: whatever was loaded before is dropped."""
        if mixed_precision not in ("no", "bf16"):
            raise ConfigError(f"mixed_precision is {mixed_precision!r}; known: no, bf16")
        self._bf16 = mixed_precision == "bf16"
        self._seed = seed
        self._adapter: Adapter | None = None
        self._optimizer: Optimizer | None = None
        self._schedule: Schedule | None = None
        self._step = 0
        self._num_micro_batches = 0
        self.model = load_base(model_id, self.device)
        self._set_trainable(dict(self.model.named_parameters()))

    def add_adapter_to_model(self, adapter_name: str, config: LoraConfig | peft.LoraConfig) -> None:
        if self._adapter is not None or self._optimizer is not None:
            raise ConfigError("add one adapter, and before the optimizer is set")
        self._adapter = Adapter(self.model, adapter_name, config, derive_seed(self._seed, "adapter"))
        self._set_trainable(self._adapter.parameters())
        if self._bf16:
            for parameter in self.model.parameters():
                if not parameter.requires_grad and parameter.ndim >= 2:
                    parameter.data = parameter.data.to(torch.bfloat16)

    def _set_trainable(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        self.trainable = {name: parameters[name] for name in sorted(parameters)}

    def set_optimizer(self, name: str, lr: float, weight_decay: float, betas: tuple[float, float], eps: float) -> None:
        self._optimizer = Optimizer(name, self.trainable, lr=lr, weight_decay=weight_decay, betas=betas, eps=eps)
        self._gradients = self.placement.gradients(self.trainable)

    def set_lr_scheduler(self, name: str, num_training_steps: int, num_warmup_steps: int) -> None:
        schedule = Schedule(name=name, num_training_steps=num_training_steps, num_warmup_steps=num_warmup_steps)
        schedule.factor(0)
        self._schedule = schedule

    def get_step(self) -> int:
        return self._step

    def get_lr(self) -> float:
        return self._ready().lr(self._schedule, self._step)

    def forward_backward(
        self, micro_batches: Sequence[tuple[int, Sequence[Row]]], num_micro_batches: int, seed: tuple[int, ...] | None
    ) -> tuple[float, int, float]:
        """Loss sum, supervised tokens and their weight over this worker's micro-batches, each given with its number within the call."""
        self._ready()
        parts = seed if seed is not None else (self._seed, self._step)
        losses: dict[int, torch.Tensor] = {}
        num_loss_tokens, loss_weight = 0, 0.0
        for position, rows in micro_batches:
            index = self._num_micro_batches + position
            torch.manual_seed(derive_seed(*parts, index))
            try:
                logits, labels, weights = self._supervised_logits(rows)
                if len(labels):
                    token_loss = token_losses(logits, labels)
                    loss_sum = token_loss.sum() if weights is None else (token_loss * weights).sum()
                    loss_sum.backward()  # type: ignore[no-untyped-call]
                    losses[index] = loss_sum.detach()
            except torch.OutOfMemoryError as error:
                place = f"micro-batch {index} of optimizer step {self._step + 1}"
                raise TrainingError(f"out of GPU memory in {place}: use a smaller micro_batch_size or row_length") from error
            num_loss_tokens += len(labels)
            loss_weight += math.fsum(row.loss_weight for row in rows)
        self._num_micro_batches += num_micro_batches
        self._gradients.loss_weight += loss_weight
        values = torch.stack(list(losses.values())).tolist() if losses else []
        for index, value in zip(losses, values, strict=True):
            if not math.isfinite(value):
                place = f"at optimizer step {self._step + 1}"
                raise TrainingError(f"loss of micro-batch {index} is {value} {place}; look at its rows and the learning rate")
        return math.fsum(values), num_loss_tokens, loss_weight

    def clip_grad_and_step(self, max_grad_norm: float) -> float:
        optimizer, step = self._ready(), self._step + 1
        if self._schedule is not None and self._step >= self._schedule.num_training_steps:
            raise TrainingError(f"optimizer step {step} is past the schedule's num_training_steps={self._schedule.num_training_steps}")
        loss_weight = self._gradients.reduce()
        if loss_weight == 0:
            why = f"every label is {IGNORE}, or forward_backward was not called"
            raise TrainingError(f"no supervised token before optimizer step {step}: {why}")
        norm = self._gradients.normalise_and_clip(loss_weight, max_grad_norm)
        if not math.isfinite(norm):
            raise TrainingError(f"gradient norm is {norm} at optimizer step {step}; look at the rows and the learning rate")
        optimizer.step(self.get_lr())
        self._gradients.zero()
        self._step, self._num_micro_batches = step, 0
        return norm

    @torch.no_grad()
    def forward_only(self, micro_batches: Sequence[Sequence[Row]]) -> list[dict[str, float]]:
        was_training = self.model.training
        self.model.eval()
        try:
            return [row for rows in micro_batches for row in self._score(rows)]
        finally:
            self.model.train(was_training)

    def _score(self, rows: Sequence[Row]) -> list[dict[str, float]]:
        counts = [row.num_loss_tokens for row in rows]
        logits, labels, _ = self._supervised_logits(rows)
        losses = token_losses(logits, labels) if len(labels) else torch.zeros(0)
        correct = logits.argmax(dim=-1) == labels
        return [
            {"loss_sum": float(loss.sum()), "num_loss_tokens": count, "num_correct": int(right.sum())}
            for loss, right, count in zip(losses.split(counts), correct.split(counts), counts, strict=True)
        ]

    def _supervised_logits(self, rows: Sequence[Row]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Logits [S, V], labels [S] and, where some row has them, loss weights [S] of the supervised tokens of `rows`, in one row."""
        batch = self.placement.cut(self._processor.collate(rows))
        labels = batch["labels"][0]
        positions = (labels != IGNORE).nonzero()[:, 0]
        if not len(positions):
            return torch.zeros(0, 1), labels[positions], None
        positions = positions.to(self.device)
        with self._autocast():
            output = self.model(
                input_ids=batch["input_ids"].to(self.device),
                position_ids=batch["position_ids"].to(self.device),
                seq_lens=[int(length) for length in batch["seq_lens"]],
                logits_to_keep=positions,
                use_cache=False,
            )
        weights = batch.get("loss_weights")
        return output.logits[0], labels.to(self.device)[positions], None if weights is None else weights[0].to(self.device)[positions]

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16) if self._bf16 else nullcontext()

    def _ready(self) -> Optimizer:
        if self._optimizer is None:
            raise ConfigError("no optimizer is set: call set_optimizer first")
        return self._optimizer

    def get_state_dict(self) -> dict[str, np.ndarray]:
        return {name: tensor.numpy() for name, tensor in self.placement.gather(self.trainable).items()}

    def _snapshot(self) -> files.Snapshot:
        optimizer = self._ready()
        weights = self.placement.gather(self.trainable)
        if self._adapter is not None and self._step > 0:
            refuse_untrained(weights)
        return files.Snapshot(
            weights=weights,
            adapter_config=self._adapter.config_json() if self._adapter else None,
            optimizer=self.placement.gather(optimizer.tensors()),
            rng=files.detach(_rng_states()),
            training={"cur_step": self._step, **self._settings()},
        )

    def _settings(self) -> dict[str, Any]:
        return {"optimizer": self._ready().settings, "scheduler": schedule_settings(self._schedule)}

    def begin_save(self, store_url: str, prefix: str) -> None:
        from twinkle_core.model.background_save import BackgroundSave

        if self.rank != 0:
            return
        if self._save is not None:
            raise ConfigError("a save is under way: call end_save before the next begin_save")
        self._save = BackgroundSave(self._snapshot(), store_url, prefix)

    def end_save(self, block: bool) -> tuple[FileEntry, ...] | None:
        if self._save is None:
            return None
        try:
            result = self._save.result(block=block)
        except BaseException:
            self._save = None
            raise
        if result is not None:
            self._save = None
        return result

    def save(self, folder: str, state: Mapping[str, int]) -> str:
        if self.rank != 0:
            return folder
        final = Path(folder)
        if final.exists():
            raise ConfigError(f"{final} exists already; checkpoints are never overwritten, choose another name")
        final.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{final.name}.", dir=final.parent) as scratch:
            whole = Path(scratch) / final.name
            whole.mkdir()
            files.write_snapshot(self._snapshot(), whole)
            files.write_json(whole / TRAINER_STATE_FILE, {"cur_step": self._step, **state})
            files.sync(whole / TRAINER_STATE_FILE)
            files.sync(whole)
            whole.rename(final)
        files.sync(final.parent)
        return folder

    def restore_from(self, store_url: str, prefix: str, entries: Sequence[FileEntry]) -> None:
        from storage.store import open_store
        from storage.transfer import local_folder

        with tempfile.TemporaryDirectory(prefix="restore-") as scratch:
            self.restore(str(local_folder(open_store(store_url), prefix, entries, Path(scratch))), only_weights=False)

    def restore(self, folder: str, only_weights: bool) -> None:
        """Everything is read and checked before anything is changed."""
        path = Path(folder)
        pairs: list[tuple[Path, Mapping[str, torch.Tensor]]] = [(path / files.weights_file(self._adapter is not None), self.trainable)]
        training: dict[str, Any] = {}
        if not only_weights:
            training = files.read_json(path / files.TRAINING_FILE)
            files.check_settings(training, self._settings(), path / files.TRAINING_FILE)
            pairs += [(path / files.OPTIMIZER_FILE, self._ready().tensors()), (path / files.RNG_FILE, _rng_states())]
        read = [files.read_tensors(source) for source, _ in pairs]
        for found, (source, expected) in zip(read, pairs, strict=True):
            files.check_tensors(found, expected, source)
        for found, (_, target) in zip(read[:2], pairs[:2], strict=True):
            self.placement.scatter(found, target)
        if not only_weights:
            _set_rng_states(read[2])
            self._step = int(training["cur_step"])
        if self._optimizer is not None:
            self._gradients.zero()
        self._num_micro_batches = 0


def _rng_states() -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    return states | {"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else states


def _set_rng_states(states: Mapping[str, torch.Tensor]) -> None:
    torch.set_rng_state(states["cpu"])
    if "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"])
