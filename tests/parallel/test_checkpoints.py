"""Checkpoints of models that lie in parts: each rank writes its own behind training, and any number of ranks goes on from them."""

from __future__ import annotations

import errno
import json
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from storage.artifact import FileEntry
from storage.store import open_store
from tests.model.tiny_models import SIZES, batch, save_model
from tests.parallel.ranks import run_ranks
from twinkle_core.checkpoint.export import export
from twinkle_core.checkpoint.folders import folder_problems
from twinkle_core.config import ExportConfig, LoraConfig
from twinkle_core.device_mesh import DeviceMesh
from twinkle_core.errors import DamagedError, DataError
from twinkle_core.infra.local_group import LocalGroup
from twinkle_core.model import TRANSFORMERS_WORKER, TransformersModel, background_save, checkpoint_files, saved_folder
from twinkle_core.model.parallel import sharded_files
from twinkle_core.model.parallel.sharded_files import read_parts, read_whole, write_parts
from twinkle_core.model.restoring import StoredCheckpoint
from twinkle_core.model.trained_weights import read_trained

LORA = LoraConfig(rank=4, target_modules=("q_proj", "down_proj"), dropout=0.1)
NUM_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a model lies on its ranks."""

    world_size: int
    sizes: dict[str, int] = field(default_factory=dict)
    lora: bool = False
    settings: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "AdamW"


@dataclass(frozen=True, kw_only=True)
class Course:
    """What all ranks are to do."""

    store: str
    start: tuple[FileEntry, ...] | None = None
    """Files under 'runs/saved' to go on from."""
    save_after: int | None = None
    """Optimizer steps after which it is saved there."""
    num_steps: int = NUM_STEPS


def opened(rank: int, folder: Path, form: Form) -> TransformersModel:
    group = LocalGroup(TRANSFORMERS_WORKER, rank=rank, world_size=form.world_size, init_method="unused: the group is joined")
    mesh = DeviceMesh.from_sizes(world_size=form.world_size, **form.sizes) if form.sizes else None
    model = TransformersModel(folder, group=group, device_mesh=mesh, mixed_precision="no", **form.settings)
    if form.lora:
        model.add_adapter_to_model("default", LORA)
    model.set_optimizer(form.optimizer, lr=0.01)
    model.set_lr_scheduler("linear", num_training_steps=NUM_STEPS + 1, num_warmup_steps=0)
    return model


def step(model: TransformersModel, number: int) -> tuple[float, float]:
    """Loss and norm of optimizer step `number`."""
    return model.forward_backward(batch(3 + number, seed=number), seed=(1, number)).loss, model.clip_grad_and_step(1.0)


def course(rank: int, folder: Path, form: Form, what: Course) -> dict[str, Any]:
    """Losses and norms of the steps, the weights at the end, and the files that were saved on the way."""
    model = opened(rank, folder, form)
    if what.start is not None:
        model.restore_from(what.store, "runs/saved", what.start)
    said: list[tuple[float, float]] = []
    for number in range(model.cur_step, what.num_steps):
        said.append(step(model, number))
        if model.cur_step == what.save_after:
            model.begin_save(what.store, "runs/saved")
    return {"said": said, "weights": model.get_state_dict(), "saved": model.end_save()}


def run(folder: Path, form: Form, what: Course) -> list[dict[str, Any]]:
    return run_ranks(form.world_size, course, folder.parent, folder, form, what)


def base(tmp_path: Path, architecture: str) -> Path:
    if architecture != "qwen3_moe":
        return save_model(tmp_path / "model", architecture)
    torch.manual_seed(7)
    sizes = {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "tie_word_embeddings": False}
    AutoModelForCausalLM.from_config(Qwen3MoeConfig(**{**SIZES, **sizes, "initializer_range": 0.2})).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def store_url(tmp_path: Path) -> str:
    return open_store(str(tmp_path / "store")).url


def assert_same(got: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> None:
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_array_equal(got[name], value, err_msg=name)


ALONE, PAIR = Form(world_size=1), Form(world_size=2, sizes={"fsdp_size": 2})
LORA_PAIR = replace(PAIR, lora=True)
EXPERTS = Form(world_size=2, sizes={"dp_size": 2, "ep_size": 2})
FORMS: dict[str, tuple[str, Form, Form]] = {
    "fsdp full": ("qwen3", PAIR, ALONE),
    "fsdp lora": ("qwen3", LORA_PAIR, Form(world_size=1, lora=True)),
    "fsdp lora, added late": ("qwen3", replace(LORA_PAIR, settings={"memory_efficient_init": True}), LORA_PAIR),
    "offload": ("qwen2", replace(PAIR, settings={"fsdp_config": {"cpu_offload": True}}), Form(world_size=2)),
    "momentum": ("qwen3", replace(PAIR, optimizer="RMSprop"), Form(world_size=1, optimizer="RMSprop")),
    "tp": ("qwen3", Form(world_size=2, sizes={"tp_size": 2}), PAIR),
    "ep": ("qwen3_moe", EXPERTS, PAIR),
    "dp lora": ("qwen3", Form(world_size=2, lora=True), LORA_PAIR),
    "hsdp full": ("qwen3", Form(world_size=4, sizes={"dp_size": 2, "fsdp_size": 2}), PAIR),
    "ring lora": ("qwen3", Form(world_size=2, sizes={"cp_size": 2}, lora=True), LORA_PAIR),
    "fsdp x tp": ("qwen3", Form(world_size=4, sizes={"fsdp_size": 2, "tp_size": 2}), PAIR),
    "ep x fsdp": ("qwen3_moe", Form(world_size=4, sizes={"fsdp_size": 4, "ep_size": 2}), EXPERTS),
}
"""Name → architecture, form, and another form that goes on from its checkpoint."""
WHOLE = ("dp lora", "fsdp lora, added late", "ring lora")
"""Forms in which what is trained is whole on every rank."""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", FORMS)
def test_resumed_is_uninterrupted_to_the_bit_and_near_it_in_another_form(name: str, tmp_path: Path, store_url: str) -> None:
    architecture, form, other = FORMS[name]
    folder = base(tmp_path, architecture)
    whole = run(folder, form, Course(store=store_url, save_after=1))
    entries = whole[0]["saved"]
    assert all(rank["saved"] == entries for rank in whole), "the script of every rank is told all files"
    names = [entry.path for entry in entries]
    assert len({path.rpartition("/")[2] for path in names if "part-" in path}) == (0 if name in WHOLE else form.world_size), names
    assert ("optimizer.safetensors" in names) == (name in WHOLE)

    again = run(folder, form, Course(store=store_url, start=entries))
    assert again[0]["said"] == whole[0]["said"][1:]
    assert_same(again[0]["weights"], whole[0]["weights"])

    elsewhere = run(folder, other, Course(store=store_url, start=entries))
    if "ring" not in name:  # which draws its dropout for parts of rows
        np.testing.assert_allclose(elsewhere[0]["said"], whole[0]["said"][1:], rtol=1e-3)
    moved, stayed = (run(folder, each, Course(store=store_url, start=entries, num_steps=1)) for each in (other, form))
    assert_same(moved[0]["weights"], stayed[0]["weights"])


def hop(rank: int, folder: Path, form: Form, store: str, source: str, entries: Sequence[FileEntry], target: str) -> Sequence[FileEntry]:
    """Goes on from `source` and saves as `target` without a step."""
    model = opened(rank, folder, form)
    model.restore_from(store, source, entries)
    model.begin_save(store, target)
    return model.end_save() or ()


def contents(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint, whole, whatever files they lie in."""
    optimizer = folder / "optimizer"
    moments = read_whole(optimizer) if optimizer.is_dir() else load_file(folder / "optimizer.safetensors")
    weights = {f"weights/{name}": tensor.numpy() for name, tensor in read_trained(folder).items()}
    return weights | {f"optimizer/{name}": tensor.numpy() for name, tensor in moments.items()}


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("axis", ["fsdp_size", "dp_size"])
def test_four_ranks_to_two_to_one_to_three_lose_no_bit(axis: str, lora: bool, tmp_path: Path, store_url: str) -> None:
    folder, root = save_model(tmp_path / "model", "qwen3"), Path(tmp_path / "store")
    sizes = {4: {"dp_size": 2, "fsdp_size": 2} if axis == "fsdp_size" else {"dp_size": 4}, 2: {axis: 2}, 1: {}, 3: {axis: 3}}
    forms = {ranks: Form(world_size=ranks, sizes=given, lora=lora) for ranks, given in sizes.items()}
    entries = run(folder, forms[4], Course(store=store_url, save_after=2, num_steps=2))[0]["saved"]
    expected = contents(root / "runs/saved")
    assert any(np.abs(value).max() > 0 for name, value in expected.items() if name.endswith("exp_avg_sq"))
    assert {float(value) for name, value in expected.items() if name.endswith(".step")} == {2.0}
    source = "runs/saved"
    for ranks in (2, 1, 3):
        target = f"runs/at-{ranks}"
        entries = run_ranks(ranks, hop, tmp_path, folder, forms[ranks], store_url, source, entries, target)[0]
        assert_same(contents(root / target), expected)
        source = target
    if axis == "fsdp_size":
        sizes_of_parts = [entry.stat().st_size for entry in (root / "runs/saved/weights").glob("part-*")]
        assert len(sizes_of_parts) == 4
        assert max(sizes_of_parts) < 1.5 * min(sizes_of_parts), "replicas share the writing"
    exported(folder, root / source, lora, tmp_path / "exported", expected)


def exported(base_folder: Path, checkpoint: Path, lora: bool, out: Path, expected: dict[str, np.ndarray]) -> None:
    """An export of the parts holds what was trained."""
    export(base_folder, checkpoint, ExportConfig(form="adapter" if lora else "merged", dtype="float32"), out)
    if lora:
        found = load_file(out / "adapter_model.safetensors")
        export(base_folder, checkpoint, ExportConfig(form="merged", dtype="float32"), out.parent / "merged")
        assert AutoModelForCausalLM.from_pretrained(out.parent / "merged").config.model_type == "qwen3"
    else:
        found = {name: value.detach() for name, value in AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32).named_parameters()}
    trained = {name.removeprefix("weights/"): value for name, value in expected.items() if name.startswith("weights/")}
    assert_same({name: value.numpy() for name, value in found.items()}, trained)


FULL_DISK = OSError(errno.ENOSPC, "No space left on device", "part")


def failing(is_here: bool, pause_seconds: float = 0.0) -> Callable[..., None]:
    """Stands for what writes: the disk of one rank is full, that of the others slow."""

    def write(*args: Any, **kwargs: Any) -> None:
        if is_here:
            raise FULL_DISK
        threading.Event().wait(pause_seconds)

    return write


def seconds_until_heard(function: Callable[[], object]) -> float:
    began = time.monotonic()
    with pytest.raises(OSError, match="No space left") as caught:
        function()
    assert caught.value.errno == errno.ENOSPC
    return time.monotonic() - began


def failures(rank: int, folder: Path, store: str) -> dict[str, Any]:
    """What each rank hears when one of them cannot write, and how the next try goes."""
    model = opened(rank, folder, PAIR)
    step(model, 0)
    heard: dict[str, Any] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(background_save, "write_snapshot", failing(rank == 1, pause_seconds=45))
        model.begin_save(store, "runs/failed")
        heard["behind"] = seconds_until_heard(model.end_save)
    model.begin_save(store, "runs/next")
    heard["next"] = model.end_save()
    saved = folder.parent / "by-hand"
    places: list[tuple[str, Any, str, int]] = [
        ("part", sharded_files, "write_tensors", 1),
        ("index", sharded_files, "sync", 0),
        ("index of the weights", checkpoint_files, "write_json", 0),
    ]
    for place, module, where, who in places:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(saved_folder, "SHARD_BYTES", 30_000)
            patch.setattr(module, where, failing(rank == who))
            heard[place] = seconds_until_heard(lambda: model.save("x", saved))
    path = model.save("x", saved)
    assert path is not None and folder_problems(path) == []
    heard["by hand"] = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    return heard | {"cut": cut_and_damaged(rank, folder, model, path)}


def cut_and_damaged(rank: int, folder: Path, model: TransformersModel, path: Path) -> list[str]:
    """Weights in several files are resumed from; a damaged part of one rank is refused by all, and changes nothing on any."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(saved_folder, "SHARD_BYTES", 30_000)
        cut = model.save("cut", path.parent)
    assert cut is not None
    fresh = opened(rank, folder, PAIR)
    fresh.resume_from_checkpoint(cut)
    assert_same(fresh.get_state_dict(), model.get_state_dict())

    damaged = path / "optimizer" / "part-00001-of-00002.safetensors"
    dist.barrier()
    if rank == 0:
        damaged.write_bytes(damaged.read_bytes()[:-20])
    dist.barrier()
    assert [problem.split()[0] for problem in folder_problems(path)] == [f"optimizer/{damaged.name}"]
    step(model, 1)
    before = model.get_state_dict()
    with pytest.raises(DamagedError, match=damaged.name):
        model.resume_from_checkpoint(path)
    assert_same(model.get_state_dict(), before)
    model.resume_from_checkpoint(path, resume_only_model=True)
    return sorted(file.name for file in cut.glob("model*"))


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_rank_that_fails_is_heard_by_all_at_once_and_the_next_save_works(tmp_path: Path, store_url: str) -> None:
    folder = save_model(tmp_path / "model", "qwen3")
    for heard in run_ranks(2, failures, tmp_path, folder, store_url, limit_seconds=150):
        slowest = max(heard[name] for name in ("behind", "part", "index", "index of the weights"))
        assert slowest < 30, "far from the end of the other rank's write, or a time-out"
        assert any("part-00001" in entry.path for entry in heard["next"])
        assert "model.safetensors" in heard["by hand"], "weights by hand are whole"
        assert {f"optimizer/{name}" for name in ("index.json", "part-00000-of-00002.safetensors")} < set(heard["by hand"])
        assert len(heard["cut"]) > 3 and "model.safetensors.index.json" in heard["cut"]
    assert folder_problems(tmp_path / "by-hand" / "cut") == []
    (problem,) = folder_problems(tmp_path / "by-hand" / "x")
    assert problem.startswith("optimizer/part-00001-of-00002.safetensors has "), "which was cut short"
    left = [path.name for path in (tmp_path / "by-hand").iterdir()]
    assert sorted(left) == ["cut", "x"], "no draft of a failed save is left"
    whole = AutoModelForCausalLM.from_pretrained(tmp_path / "by-hand" / "cut", dtype=torch.float32)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "by-hand" / "x", dtype=torch.float32)
    assert_same(*({name: value.detach().numpy() for name, value in each.named_parameters()} for each in (whole, again)))


def fetched(rank: int, folder: Path, form: Form, store: str, entries: Sequence[FileEntry]) -> list[str]:
    """The parts that a rank asks a store for."""
    model = opened(rank, folder, form)
    asked: list[str] = []
    original = StoredCheckpoint.fetch

    def fetch(self: StoredCheckpoint, names: Iterable[str]) -> None:
        asked.extend(names := list(names))
        original(self, names)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StoredCheckpoint, "fetch", fetch)
        model.restore_from(store, "runs/saved", entries)
    return sorted(name for name in asked if "part-" in name)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_rank_fetches_the_parts_that_overlap_its_own(tmp_path: Path, store_url: str) -> None:
    folder = save_model(tmp_path / "model", "qwen3")
    saved = run(folder, PAIR, Course(store=store_url, save_after=1, num_steps=1))[0]["saved"]
    asked = run_ranks(2, fetched, tmp_path, folder, PAIR, store_url, saved)
    assert asked == [[f"{kind}/part-0000{rank}-of-00002.safetensors" for kind in ("optimizer", "weights")] for rank in range(2)]
    assert len(run_ranks(1, fetched, tmp_path, folder, ALONE, store_url, saved)[0]) == 4


def test_parts_of_a_folder_are_written_and_read_whole(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(3.0), "c": torch.arange(4, dtype=torch.int64)}
    write_parts(tmp_path, tensors, 0, 1)
    assert_same({name: value.numpy() for name, value in read_whole(tmp_path).items()}, {k: v.numpy() for k, v in tensors.items()})


def test_damage_is_named_and_changes_nothing(tmp_path: Path) -> None:
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor(3.0)}
    write_parts(tmp_path, tensors, 0, 1)
    target = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    read_parts(tmp_path, target)
    assert all(torch.equal(target[name], tensor) for name, tensor in tensors.items())
    for tensor in target.values():
        tensor.fill_(9.0)
    with pytest.raises(DataError, match=r"b is unexpected; a is torch.float32 \[2, 3\], the model has torch.float32 \[3, 2\]"):
        read_parts(tmp_path, {"a": torch.zeros(3, 2)})
    whole = (tmp_path / "index.json").read_text()
    index = json.loads(whole)
    index["tensors"]["a"]["parts"][0]["shape"] = [1, 3]
    for text, message in (
        (json.dumps(index), "3 of 6 values of a"),
        (whole.replace('"whole.safetensors"', '"../whole.safetensors"'), "names files outside its folder"),
        ("[]", r"index\.json is not understood"),
        ("{}", r"index\.json is not understood"),
        (whole.replace('"start"', '"begin"'), r"index\.json is not understood"),
        (whole[:-9], r"index\.json cannot be read"),
    ):
        (tmp_path / "index.json").write_text(text)
        with pytest.raises(DamagedError, match=message):
            read_parts(tmp_path, target)
    (tmp_path / "index.json").write_text(whole)
    data = (tmp_path / "whole.safetensors").read_bytes()
    (tmp_path / "whole.safetensors").write_bytes(data[:-2])
    with pytest.raises(DamagedError, match=r"whole\.safetensors: .* cannot be read"):
        read_parts(tmp_path, target)
    (tmp_path / "whole.safetensors").unlink()
    with pytest.raises(DamagedError, match=r"whole\.safetensors missing"):
        read_parts(tmp_path, target)
    (tmp_path / "index.json").unlink()
    with pytest.raises(DamagedError, match=r"index\.json cannot be read"):
        read_parts(tmp_path, target)
    assert all(bool((tensor == 9.0).all()) for tensor in target.values())
