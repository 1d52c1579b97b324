"""Losses over hidden states, logits, embeddings and scores: of a sharded model what one process gives, else refused on every rank."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.tiny_models import VOCABULARY, packed_row, save_model
from tests.parallel.ranks import run_ranks
from twinkle_core.device_mesh import DeviceMesh
from twinkle_core.errors import ConfigError
from twinkle_core.infra.local_group import LocalGroup
from twinkle_core.model import TRANSFORMERS_WORKER, TransformersModel
from twinkle_core.types import DocumentKind, PackedRow

LOSSES: dict[str, dict[str, Any]] = {
    "FusedLinearCrossEntropyLoss": {},
    "GKDLoss": {},
    "InfonceLoss": {"use_batch": False},
    "RewardModelLoss": {},
    "MSELoss": {},
}
OF_SCORES = ("RewardModelLoss", "MSELoss")
KINDS = {
    "InfonceLoss": (DocumentKind.ANCHOR, DocumentKind.POSITIVE, DocumentKind.NEGATIVE),
    "RewardModelLoss": (DocumentKind.CHOSEN, DocumentKind.REJECTED),
}


def rows_for(loss: str) -> list[PackedRow]:
    """Three rows for two ranks: in the second round one rank has nothing to do but to join."""
    kinds = KINDS.get(loss, (DocumentKind.PLAIN, DocumentKind.PLAIN))
    lengths = ((5, 3, 4), (3, 6, 2), (4, 4, 5))
    made = [packed_row(*given[: len(kinds)], seed=index) for index, given in enumerate(lengths)]
    return [replace(one, kinds=np.array([int(kind) for kind in kinds], dtype=np.int8)) for one in made]


def inputs_for(loss: str, rows: list[PackedRow]) -> dict[str, Any]:
    generator = np.random.default_rng(5)
    if loss == "GKDLoss":
        return {"teacher_logits": [generator.normal(size=(one.num_loss_tokens, VOCABULARY)).astype(np.float32) for one in rows]}
    if loss == "MSELoss":
        return {"targets": [generator.normal(size=len(one.seq_lens)) for one in rows]}
    return {}


def learned(rank: int, folder: Path, sizes: dict[str, int] | None, world_size: int, losses: tuple[str, ...]) -> dict[str, Any]:
    """By loss: its value, the norm and the weights after one step; or the message of the refusal."""
    group = LocalGroup(TRANSFORMERS_WORKER, rank=rank, world_size=world_size, init_method="unused: the group is joined")
    mesh = None if sizes is None else DeviceMesh.from_sizes(world_size=world_size, **sizes)
    found: dict[str, Any] = {}
    for loss in losses:
        settings: dict[str, Any] = {"model_cls": "AutoModelForSequenceClassification", "num_labels": 1} if loss in OF_SCORES else {}
        model = TransformersModel(folder, group=group, device_mesh=mesh, mixed_precision="no", **settings)
        model.set_optimizer("SGD", lr=0.1)
        rows = rows_for(loss)
        try:
            model.set_loss(loss, **LOSSES[loss])
            output = model.forward_backward(rows, **inputs_for(loss, rows))
            found[loss] = (output.loss, float(model.clip_grad_and_step(1e9)), model.get_state_dict())
        except ConfigError as error:
            found[loss] = str(error)
    return found


@pytest.mark.slow
def test_a_sharded_model_learns_what_one_process_learns(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model", "qwen3")
    alone = run_ranks(1, learned, tmp_path, folder, None, 1, tuple(LOSSES))[0]
    for ranks in run_ranks(2, learned, tmp_path, folder, {"fsdp_size": 2}, 2, tuple(LOSSES)):
        for loss, (value, norm, weights) in ranks.items():
            np.testing.assert_allclose([value, norm], alone[loss][:2], rtol=1e-5, err_msg=loss)
            assert weights.keys() == alone[loss][2].keys()
            for name, weight in weights.items():
                np.testing.assert_allclose(weight, alone[loss][2][name], rtol=1e-5, atol=1e-7, err_msg=f"{loss} {name}")


@pytest.mark.parametrize(
    ("sizes", "losses", "message"),
    [
        ({"ulysses_size": 2, "dp_size": 2}, ("FusedLinearCrossEntropyLoss", "RewardModelLoss"), "the mesh cuts rows over ranks"),
        ({"cp_size": 2}, ("InfonceLoss", "FusedLinearCrossEntropyLoss"), "the mesh cuts rows over ranks"),
        ({"tp_size": 2}, ("FusedLinearCrossEntropyLoss",), "needs the whole head, which tp_size splits"),
    ],
    ids=["ulysses", "ring", "tp"],
)
def test_what_no_rank_has_whole_is_refused_on_every_rank(
    sizes: dict[str, int], losses: tuple[str, ...], message: str, tmp_path: Path
) -> None:
    folder = save_model(tmp_path / "untied", "llama")
    for ranks in run_ranks(2, learned, tmp_path, folder, sizes, 2, losses):
        for loss in losses:
            assert isinstance(ranks[loss], str) and message in ranks[loss]
