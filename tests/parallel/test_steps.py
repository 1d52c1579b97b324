"""The pieces of a step, scores, and several adapters: on a sharded model what they are on one process, with ends that are uneven."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.model.tiny_models import packed_row, save_model
from tests.parallel.bodies import open_model
from tests.parallel.oracle import packed_rows, padded_rows, save_adapter
from tests.parallel.ranks import run_ranks

RTOL = 1e-5


def pieces(rank: int, folder: Path, adapters: dict[str, Path], sizes: dict[str, int] | None) -> dict[str, Any]:
    """One row for all ranks, then three: through forward, calculate_loss and backward, for each adapter, one step each."""
    model, worker = open_model(rank, folder, sizes)
    for name, path in adapters.items():
        model.add_adapter_to_model(name, path, 2)
    for name in adapters:
        model.set_optimizer("SGD", lr=0.5, adapter_name=name)
    found: dict[str, Any] = {}
    for name in adapters:
        seen: list[Any] = []
        for rows in (packed_rows(1), [*padded_rows(2), packed_row(4, 3)]):
            seen.append([float(row["loss_sum"]) for row in model.forward(rows, adapter_name=name)])
            seen.append([float(model.calculate_loss(adapter_name=name))])
            model.backward(adapter_name=name)
            norm = model.clip_grad_norm(0.5, adapter_name=name)
            model.step(adapter_name=name)
            model.zero_grad(adapter_name=name)
        seen.append([float(norm or 0.0)])
        for rows in (packed_rows(1), packed_rows(5)):
            seen.append([row["loss_sum"] for row in model.forward_only(rows, micro_batch_size=2, adapter_name=name)])
            seen.append([row["loss_sum"] for row in model.forward_only(rows, adapter_name=name, disable_lora=True)])
        found[name] = {"seen": seen, "weights": {key: value.copy() for key, value in model.get_state_dict(adapter_name=name).items()}}
    return found


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Path]]:
    folder = save_model(tmp_path_factory.mktemp("base"), "llama")
    targets = {"one": ["q_proj", "down_proj"], "two": ["v_proj", "up_proj"]}
    return folder, {name: save_adapter(tmp_path_factory.mktemp(name), folder, target_modules=wanted) for name, wanted in targets.items()}


@pytest.mark.slow
@pytest.mark.parametrize("sizes", [{"fsdp_size": 2}, {"dp_size": 2, "fsdp_size": 2}, {"tp_size": 2}], ids=str)
def test_pieces_scores_and_adapters_are_those_of_one_process(
    sizes: dict[str, int], made: tuple[Path, dict[str, Path]], tmp_path: Path
) -> None:
    alone = run_ranks(1, pieces, tmp_path, *made, None)[0]
    spread = run_ranks(int(np.prod(list(sizes.values()))), pieces, tmp_path, *made, sizes)
    for name, right in alone.items():
        assert not np.allclose(right["seen"][-2], right["seen"][-1], rtol=1e-3), "the adapter must change the scores"
        for rank in spread:
            assert [len(one) for one in rank[name]["seen"]] == [len(one) for one in right["seen"]]
            np.testing.assert_allclose(np.concatenate(rank[name]["seen"]), np.concatenate(right["seen"]), rtol=RTOL)
        for key, value in right["weights"].items():
            got = spread[0][name]["weights"][key]
            np.testing.assert_allclose(got, value, rtol=RTOL, atol=RTOL * np.abs(value).max(), err_msg=key)
