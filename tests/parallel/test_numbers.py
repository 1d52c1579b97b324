"""What training gave is on every rank: one may look alone, and what is not finite on one is named by all."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.tiny_models import packed_row, save_model
from tests.parallel.ranks import run_ranks
from twinkle_core.config import LoraConfig
from twinkle_core.device_mesh import DeviceMesh
from twinkle_core.errors import DataError, TrainingError
from twinkle_core.infra.local_group import LocalGroup
from twinkle_core.model import TRANSFORMERS_WORKER, TransformersModel
from twinkle_core.processor.base import InputProcessor
from twinkle_core.types import PackedRow

ROWS = [packed_row(5), packed_row(6, 4), packed_row(9)]


class Picky(InputProcessor):
    """Refuses a row of six tokens, which only one of two ranks has."""

    def collate(self, rows: Any) -> dict[str, Any]:
        if len(rows[0].input_ids) == 6:
            raise DataError("six tokens")
        return super().collate(rows)


def poisoned(row: PackedRow) -> PackedRow:
    return replace(row, loss_weights=np.full(len(row.input_ids), np.inf, dtype=np.float32))


def error_of(call: Any) -> str:
    try:
        call()
    except (TrainingError, DataError) as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def learnt(rank: int, world_size: int, folder: Path, mesh: DeviceMesh | None, out: Path) -> dict[str, Any]:
    group = LocalGroup(TRANSFORMERS_WORKER, rank=rank, world_size=world_size, init_method="unused: joined", device_mesh=mesh)
    model = TransformersModel(folder, group=group, device_mesh=mesh, seed=1, mixed_precision="no")
    model.add_adapter_to_model("default", LoraConfig(rank=2, dropout=0.0))
    model.set_optimizer("AdamW", lr=1e-2)
    output = model.forward_backward(ROWS)
    found: dict[str, Any] = {"counts": (output.num_loss_tokens, output.loss_weight)}
    if rank == 0:
        found["early"] = output.loss  # alone, and before the step
    norm = model.clip_grad_and_step(0.1)
    found["norm"] = float(norm) if rank == 0 else None
    found["second"] = model.forward_backward(ROWS, micro_batch_size=2).loss
    if world_size == 1 or (mesh is not None and mesh.cp_world_size > 1):
        return found
    model.clip_grad_and_step()
    model.set_processor(Picky)
    found["picky"] = error_of(lambda: model.forward_backward([packed_row(5), packed_row(6)]))
    model.set_processor("InputProcessor")
    model.zero_grad()
    bad = model.forward_backward([packed_row(5), poisoned(packed_row(6))])
    model.clip_grad_and_step()
    if rank == 0:
        found["bad"] = error_of(lambda: bad.loss)
    found["save"] = error_of(lambda: model.save("x", out))
    return found


@pytest.mark.slow
def test_a_rank_may_look_alone_and_all_know_of_a_loss_that_is_not_finite(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "llama", num_hidden_layers=1)
    [alone] = run_ranks(1, learnt, tmp_path, 1, folder, None, tmp_path / "alone")
    two = run_ranks(2, learnt, tmp_path, 2, folder, None, tmp_path / "two")
    ring = run_ranks(2, learnt, tmp_path, 2, folder, DeviceMesh.from_sizes(world_size=2, cp_size=2), tmp_path / "ring")
    for ranks in (two, ring):
        assert ranks[0]["early"] == pytest.approx(alone["early"], rel=1e-5)
        assert ranks[0]["norm"] == pytest.approx(alone["norm"], rel=1e-4)
        for rank in ranks:
            assert rank["counts"] == alone["counts"] == (sum(row.num_loss_tokens for row in ROWS),) * 2
            assert rank["second"] == pytest.approx(alone["second"], rel=1e-4)
    assert [rank["picky"] for rank in two] == ["DataError: six tokens"] * 2
    assert two[0]["bad"].startswith("TrainingError: loss of micro-batch 1 is inf at optimizer step 3")
    assert all(rank["save"].startswith(two[0]["bad"]) for rank in two)
    assert not (tmp_path / "two").exists()
