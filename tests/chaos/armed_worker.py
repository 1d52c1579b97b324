"""A worker of a model that notes which rows it sees, and dies where the script of its training says so."""

from __future__ import annotations

import os
import shutil
import tempfile
import uuid
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from storage.local import FileStore
from tests.chaos.script import Script, Trigger
from twinkle_core.model import checkpoint_files
from twinkle_core.model.spec import ModelSpec
from twinkle_core.model.transformers_worker import TransformersWorker

ROW_TOKENS = 48
"""Length of every row of the scenes."""
WORKER_EVENTS = ("add_adapter_to_model", "restore_from", "forward_backward", "clip_grad_and_step", "begin_save", "end_save")
PART_OPERATIONS = ("CreateMultipartUpload", "UploadPart", "CompleteMultipartUpload")


class ArmedWorker(TransformersWorker):
    """Events of 'worker RANK' are its methods, those of the 'writer' files of a checkpoint, those of the 'uploader' puts and parts."""

    def arm(self, folder: str) -> None:
        """Once, before anything else. Later scratch folders are below `folder`."""
        script = Script(Path(folder))
        tempfile.tempdir = str(script.folder / "tmp")
        self._script, self._seen = script, []
        trigger = Trigger(script, outlives_kills=False)
        for name in WORKER_EVENTS:
            setattr(self, name, trigger.wrap(f"worker {self.rank}", name, getattr(self, name)))
        trigger.patch("writer", checkpoint_files, "save_file", half=_half_of(checkpoint_files.save_file, argument=1))
        trigger.patch("writer", checkpoint_files, "write_text", half=_half_of(checkpoint_files.write_text, argument=0))
        trigger.patch("uploader", FileStore, "upload", half=_upload_half)
        _patch_s3(trigger)

    def load(self, spec: ModelSpec) -> tuple[int, int]:
        answer = super().load(spec)
        self.model.get_input_embeddings().register_forward_pre_hook(self._see)
        return answer

    def _see(self, _module: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        """Whatever tokens go through the model while gradients are wanted, by row."""
        if torch.is_grad_enabled() and inputs[0].numel() % ROW_TOKENS == 0:
            self._seen += [zlib.crc32(row.numpy().tobytes()) for row in inputs[0].reshape(-1, ROW_TOKENS)]

    def forward_backward(self, *args: Any) -> tuple[int, float, float]:
        self._seen = []
        step = self.state().step + 1
        answer = super().forward_backward(*args)
        self._script.note("saw", step=step, rank=self.rank, rows=self._seen)
        return answer


def _half_of(write: Any, *, argument: int) -> Any:
    """Writes the file, and cuts it in half."""

    def half(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        os.truncate(args[argument], os.path.getsize(args[argument]) // 2)

    return half


def _upload_half(store: FileStore, path: Path, key: str) -> None:
    """What a copy that is cut off leaves: half of the bytes under a scratch name of the store."""
    scratch = store._root / ".tmp" / uuid.uuid4().hex
    scratch.parent.mkdir(exist_ok=True)
    shutil.copyfile(path, scratch)
    os.truncate(scratch, path.stat().st_size // 2)


def _patch_s3(trigger: Trigger) -> None:
    """Whole uploads, and the requests of those that go in parts: after the first part is in the middle."""
    from botocore.client import BaseClient

    from storage.s3 import S3Store

    trigger.patch("uploader", S3Store, "upload")
    original = BaseClient._make_api_call

    def call(client: Any, operation: str, arguments: Mapping[str, Any]) -> Any:
        if operation not in PART_OPERATIONS:
            return original(client, operation, arguments)
        return trigger.wrap("uploader", operation, original)(client, operation, arguments)

    BaseClient._make_api_call = call
