"""A fine-tune spread over its workers: what is refused before it starts, and what is the same whatever the mesh."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.launch import check
from flows.params import SFTParams
from storage.store import Store, open_store
from tests.model.tiny_models import packed_row
from tests.sharding.shard_files import write_folder
from twinkle_core.config import CheckpointConfig, LoraConfig, ResourcesConfig, TrainConfig, validate
from twinkle_core.errors import ConfigError
from twinkle_core.infra.group import WorkerGroup
from twinkle_core.model.parallel.expert_parallel import KNOWN
from twinkle_core.sharding import PackedDataset
from twinkle_core.trainer import mesh, run
from twinkle_core.trainer.mesh import check_model, check_resources, mesh_of, num_data_ranks
from twinkle_core.trainer.run import SFTJob, fresh_state, run_sft
from twinkle_core.trainer.sft import CLOCK_FIELDS, History
from twinkle_core.types import NoProgress

NUM_ROWS = 9
"""With batches of 4 over 2 epochs: 5 optimizer steps, the last with 2 rows."""
FULL, LORA = TrainConfig(lora=None), TrainConfig()


@pytest.mark.parametrize(
    ("values", "shape", "data_ranks"),
    [
        ({"workers": 3}, None, 3),
        ({"workers": 2, "fsdp": 2}, (1, 2, 1, 1), 2),
        ({"workers": 8, "fsdp": 2, "tp": 2}, (2, 2, 1, 2), 4),
        ({"workers": 4, "cp": 2}, (2, 1, 2, 1), 2),
        ({"workers": 4, "fsdp": 4, "ulysses": 2}, (1, 4, 1, 1), 2),
        ({"workers": 4, "fsdp": 2, "ep": 4}, (2, 2, 1, 1), 4),
    ],
)
def test_workers_make_up_a_mesh_and_those_that_share_rows_count_once(
    values: dict[str, int], shape: tuple[int, ...] | None, data_ranks: int
) -> None:
    made = mesh_of(ResourcesConfig(**values))
    assert (None if made is None else made.mesh.shape) == shape
    assert num_data_ranks(ResourcesConfig(**values)) == data_ranks


def test_accumulation_counts_data_ranks_not_workers(tmp_path: Path) -> None:
    job: Any = SFTJob(
        train_key="k",
        model_folder=tmp_path,
        shards=None,  # type: ignore[arg-type]
        train=TrainConfig(batch_size=8, lora=None),
        checkpoint=CheckpointConfig(),
        resources=ResourcesConfig(workers=4, tp=2),
    )
    state = fresh_state(job)
    assert (state.gradient_accumulation_steps, state.world_size) == (4, 4)


REFUSED = [
    ({"workers": 3, "fsdp": 2}, FULL, "resources.workers 3 is not a multiple of fsdp 2 x cp 1 x tp 1 = 2: set resources.workers to 4"),
    ({"mode": "local", "cp": 2}, FULL, "resources.workers 1 is not a multiple"),
    ({"workers": 2, "ulysses": 4}, FULL, "ulysses_size 4 does not divide"),
    ({"workers": 4, "ulysses": 2, "cp": 2}, FULL, "ulysses_size 2 and cp_size 2 together"),
    ({"workers": 4, "tp": 2, "ep": 2}, FULL, "ep_size 2 goes with dp_size and fsdp_size alone"),
    ({"workers": 2, "tp": 2, "memory_efficient_init": True}, LORA, "set resources.memory_efficient_init to false"),
    ({"workers": 2, "cpu_offload": True}, FULL, "set resources.fsdp above 1"),
    ({"workers": 2, "cp": 2, "memory_efficient_init": True}, FULL, "set resources.fsdp, tp or ep above 1"),
]


@pytest.mark.parametrize(("values", "train", "message"), REFUSED, ids=[message[:40] for _, _, message in REFUSED])
def test_what_cannot_work_is_refused_in_the_form(values: dict[str, Any], train: TrainConfig, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_resources(ResourcesConfig(**values), train)
    assert message in str(caught.value)
    form = {"model": {"source": "m"}, "data": {"sources": [{"name": "r", "uri": "r.jsonl"}]}, "train": train.model_dump()}
    with pytest.raises(ConfigError) as caught:
        validate(SFTParams, {**form, "resources": values})
    assert message in str(caught.value)


DENSE = {"model_type": "llama", "num_attention_heads": 6, "num_key_value_heads": 3}
EXPERTS = {"model_type": "qwen3_moe", "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 6}


@pytest.mark.parametrize(
    ("config", "values", "message"),
    [
        (DENSE, {"ep": 2, "workers": 2}, r"resources.ep 2 is for models with experts \(qwen3_moe\); the base model is 'llama'"),
        (DENSE, {"ulysses": 4, "workers": 4}, "resources.ulysses 4 does not divide the 6 attention heads"),
        (DENSE, {"tp": 2, "workers": 2}, "resources.tp 2 does not divide the 3 key-value heads"),
        (DENSE | {"attention_dropout": 0.1}, {"cp": 2, "workers": 2}, "use resources.ulysses"),
        (DENSE | {"layer_types": ["sliding_attention"]}, {"cp": 2, "workers": 2}, "use resources.ulysses"),
        (DENSE | {"attn_logit_softcapping": 50.0}, {"cp": 2, "workers": 2}, "soft-capped attention, .* use resources.ulysses"),
        (DENSE | {"kv_lora_rank": 8}, {"cp": 2, "workers": 2}, "latent attention, .* use resources.ulysses"),
        (DENSE | {"layer_types": ["linear_attention"]}, {"cp": 2, "workers": 2}, "recurrent layers, .* use resources.fsdp"),
        (
            {"model_type": "qwen3_5", "text_config": DENSE | {"layer_types": ["linear_attention", "full_attention"]}},
            {"ulysses": 2, "workers": 2},
            r"resources.ulysses 2: the base model \(.qwen3_5.\) has recurrent layers",
        ),
        (EXPERTS, {"ep": 4, "workers": 4}, "resources.ep 4 does not divide the 6 experts"),
        ({"model_type": "gemma3", "text_config": DENSE}, {"ulysses": 4, "workers": 4}, "6 attention heads"),
    ],
)
def test_what_the_base_model_does_not_have_is_refused(config: dict[str, Any], values: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_model(ResourcesConfig(**values), config)
    check_model(ResourcesConfig(workers=4, fsdp=4), config)


def test_models_whose_experts_are_spread_are_the_librarys() -> None:
    assert set(mesh.SPREAD_EXPERTS) == set(KNOWN)


def test_the_dry_run_and_the_loop_refuse_before_anything_starts(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "a", "completion": "b"}\n')
    resources = {"workers": 2, "ep": 2}
    values = {"model": {"source": str(tiny_llama)}, "data": {"sources": [{"name": "r", "uri": str(rows)}]}, "resources": resources}
    with pytest.raises(ConfigError, match=r"resources\.ep 2 is for models with experts"):
        check("sft", values)
    monkeypatch.setattr(run, "open_group", lambda *_: pytest.fail("a group was opened"))
    with pytest.raises(ConfigError, match=r"resources\.ep 2 is for models with experts"):
        trained(tmp_path, tiny_llama, ResourcesConfig(**resources), LORA)
    assert not (tmp_path / "store").exists(), "no attempt was begun"


class NoTracker:
    def resume(self, history: History, *, is_current: Callable[[], bool]) -> None:
        pass

    def log(self, row: dict[str, object]) -> None:
        pass


class At(NoProgress):
    """Calls a function once, when a step is reached."""

    def __init__(self, step: int, do: Callable[[], None]) -> None:
        self._step, self._do = step, do
        self.done = False

    def advance(self, amount: int = 1, **facts: float | str) -> None:
        if facts.get("step") == self._step and not self.done:
            self.done = True
            self._do()


class Stop(Exception):
    """Ends a training from its progress."""


def stop() -> None:
    raise Stop


def trained(
    folder: Path, model: Path, resources: ResourcesConfig, train: TrainConfig, progress: Any = None
) -> tuple[list[dict[str, Any]], dict[str, str], list[str]]:
    """History without the clock, digests of the last checkpoint's files, and what was said, of a fine-tune in `folder`."""
    if not (folder / "shards").exists():
        write_folder(folder / "shards", [packed_row(5, 4 + number % 3, seed=number) for number in range(NUM_ROWS)], 4)
    job = SFTJob(
        train_key="0" * 64,
        model_folder=model,
        shards=PackedDataset(folder / "shards"),
        train=train,
        checkpoint=CheckpointConfig(save_every=2),
        resources=resources,
    )
    store: Store = open_store(str(folder / "store"))
    says: list[str] = []
    last = run_sft(job, store=store, tracker=NoTracker(), progress=progress or NoProgress(), say=says.append)
    lines = [json.loads(line) for line in store.get(f"{last.prefix}/history.jsonl").decode().splitlines()]
    rows = [{name: value for name, value in line.items() if name not in CLOCK_FIELDS} for line in lines]
    return rows, {file.path: file.sha256 for file in last.files if not file.volatile}, says


def train_config(lora: bool) -> TrainConfig:
    adapter = LoraConfig(rank=4, dropout=0.1) if lora else None
    return TrainConfig(epochs=2, batch_size=4, lr=1e-2, lora=adapter)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("lora", [True, False], ids=["lora", "full"])
def test_killed_and_resumed_on_the_same_mesh_to_the_bit_and_on_another_in_the_same_order(
    lora: bool, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups: list[WorkerGroup] = []

    def opened(*args: Any) -> WorkerGroup:
        groups.append(open_group(*args))
        return groups[-1]

    open_group = run.open_group
    monkeypatch.setattr(run, "open_group", opened)
    pair, train = ResourcesConfig(workers=2, fsdp=2), train_config(lora)
    rows, files, _ = trained(tmp_path / "whole", tiny_llama, pair, train)
    assert len(rows) == 5
    assert {f"{kind}/part-0000{rank}-of-00002.safetensors" for kind in ("weights", "optimizer") for rank in (0, 1)} <= files.keys()

    kept = {info.key.split("/")[3] for info in open_store(str(tmp_path / "whole" / "store")).list("data/train") if "part-" in info.key}
    assert len(kept) == 2, f"checkpoints of steps 4 and 5 are kept, of step 2 no part is left: {kept}"

    kill = At(3, lambda: os.kill(groups[-1].process_ids()[1], signal.SIGKILL))  # type: ignore[attr-defined]
    again, their_files, says = trained(tmp_path / "killed", tiny_llama, pair, train, kill)
    assert kill.done
    assert any("Rebuilding the worker group (1 of 3)" in line for line in says)
    assert any("resuming after step 2" in line for line in says)
    assert (again, their_files) == (rows, files)

    with pytest.raises(Stop):
        trained(tmp_path / "moved", tiny_llama, pair, train, At(3, stop))
    moved, _, says = trained(tmp_path / "moved", tiny_llama, ResourcesConfig(mode="local"), train)
    assert any("resuming after step 2" in line for line in says)
    for mine, theirs in zip(moved, rows, strict=True):
        near = ("loss", "grad_norm")
        assert {name: mine[name] for name in mine if name not in near} == {name: theirs[name] for name in theirs if name not in near}
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=1e-5)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
