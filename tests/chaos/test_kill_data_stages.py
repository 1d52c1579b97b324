"""SIGKILL of encode, pack and shard at any event: run again, they end with the digests of an undisturbed run."""

from __future__ import annotations

import functools
import json
import multiprocessing
import random
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from storage.artifact import ArtifactRecord, ArtifactRef, commit_record, list_records, verify_record
from storage.layout import data_prefix, run_use_key
from storage.store import Store, open_store
from storage.transfer import upload_folder
from tasks.context import Context, RunSpec
from tasks.settings import Settings
from tests.chaos.harness import Counter, Kill
from twinkle_cli.collect import collect
from twinkle_core.config import ModelConfig, PackingConfig, ShardConfig, TemplateConfig
from twinkle_core.preprocessor.run import trajectory_line

EVENTS: tuple[tuple[str, str], ...] = (
    ("storage.local:FileStore", "put"),
    ("storage.local:FileStore", "put_if_absent"),
    ("storage.local:FileStore", "compare_and_swap"),
    ("storage.local:FileStore", "upload"),
    ("storage.local:FileStore", "_rename"),
    ("twinkle_core.template.run", "_record_batch"),
    ("twinkle_core.template.run", "_write_part"),
    ("twinkle_core.packing.run", "_write"),
    ("twinkle_core.sharding.writer", "_record_batch"),
    ("twinkle_core.sharding.writer", "_write_shard"),
)
STAGES = ("encode", "pack", "shard")
PART_ROWS = 40
NUM_ROWS = 400
VICTIM_SECONDS = 120


@dataclass(frozen=True, kw_only=True)
class DataScene:
    """A store with trajectories, from which the three stages are run."""

    home: Path
    model: Path
    trajectories: ArtifactRef
    num_proc: int

    @property
    def context(self) -> Context:
        settings = Settings.from_env({"TWINKLE_HOME": str(self.home)})
        return Context(settings=settings, spec=RunSpec(run_id="chaos", flow="sft", params={}, code={}))

    @property
    def store(self) -> Store:
        return self.context.store

    def digests(self) -> dict[str, str]:
        """Of the finished stages; their files are read and compared on the way."""
        records = [record for record in list_records(self.store) if record.stage in STAGES]
        assert [problem for record in records for problem in verify_record(self.store, record)] == []
        return {record.stage: record.digest for record in records}

    def half_done(self) -> bool:
        """Whether the stage that was killed has finished parts."""
        unfinished = set(STAGES) - set(self.digests())
        return any(".parts/" in info.key and info.key.split("/")[1] in unfinished for info in self.store.list("data"))


@pytest.fixture(scope="module")
def make_scene(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., DataScene]:
    """A scene in a home of its own; always the same rows."""
    folder = tmp_path_factory.mktemp("trajectories")
    rng = random.Random(1)
    for side, num_rows in (("train", NUM_ROWS), ("held_out", 50)):
        rows: list[Any] = []
        for _ in range(num_rows):
            answer = {"role": "assistant", "content": " ".join(rng.choices(["one", "two", "three", "four"], k=rng.randint(1, 30)))}
            rows.append({"messages": [{"role": "user", "content": "count"}, answer], "user_data": [("source", "rows")]})
        (folder / f"{side}.jsonl").write_bytes(b"".join(map(trajectory_line, rows)))

    def make(num_proc: int = 1) -> DataScene:
        home = tmp_path_factory.mktemp("home")
        store = open_store(Settings.from_env({"TWINKLE_HOME": str(home)}).store_url)
        files = upload_folder(store, folder, data_prefix("preprocess", "0" * 64, "a1"))
        record = ArtifactRecord(
            stage="preprocess", version=1, key="0" * 64, attempt="a1", recipe={}, inputs={}, files=files, summary={},
            provenance={"created": 0.0},
        )  # fmt: skip
        commit_record(store, record)
        return DataScene(home=home, model=tiny_llama, trajectories=record.ref(store.url), num_proc=num_proc)

    return make


def run_stages(scene: DataScene) -> None:
    """Encode, pack, shard, as a flow would call them."""
    from prefect.logging import disable_run_logger

    from tasks import encode, pack, shard
    from twinkle_core.template import run

    encode.encode = functools.partial(run.encode, part_rows=PART_ROWS)  # type: ignore[assignment]
    run.PROCESS_BYTES, run.THREAD_BYTES = 1, 0
    template = TemplateConfig(max_length=120, truncation="split", num_proc=scene.num_proc)
    with disable_run_logger():
        encoded = encode.encode_task.fn(scene.context, ModelConfig(source=str(scene.model)), template, scene.trajectories).data
        plan = pack.pack_task.fn(scene.context, PackingConfig(row_length=128), encoded).data
        shard.shard_task.fn(scene.context, ShardConfig(rows_per_shard=16), encoded, plan)


def victim(scene: DataScene, kill: Kill | None, report: Any) -> None:
    counter = Counter(kill, EVENTS)
    counter.install()
    try:
        run_stages(scene)
    except BaseException as error:
        report.send(repr(error))
        raise
    report.send(counter.count)


def run_victim(scene: DataScene, kill: Kill | None = None) -> int | None:
    """Runs the stages in a child process; the number of events, None where it was killed."""
    spawner = multiprocessing.get_context("forkserver")
    spawner.set_forkserver_preload(["torch", "transformers", "prefect", "pyarrow", "tests.chaos.test_kill_data_stages"])
    ours, theirs = spawner.Pipe(duplex=False)
    process = spawner.Process(target=victim, args=(scene, kill, theirs))
    process.start()
    theirs.close()
    process.join(VICTIM_SECONDS)
    if process.exitcode is None:
        process.kill()
        raise TimeoutError(f"the victim did not end in {VICTIM_SECONDS} s")
    if process.exitcode == -signal.SIGKILL:
        return None
    answer = ours.recv()
    assert process.exitcode == 0, answer
    return int(answer)


@pytest.fixture(scope="module")
def undisturbed(make_scene: Callable[..., DataScene]) -> tuple[dict[str, str], int]:
    """Digests of the three stages, and the number of events."""
    scene = make_scene()
    num_events = run_victim(scene)
    assert num_events is not None
    return scene.digests(), num_events


def check_kills(scene: DataScene, undisturbed: tuple[dict[str, str], int], seed: int) -> tuple[int, int]:
    """Kills the stages up to three times, lets them end, and compares; (kills, those that left a stage half done)."""
    expected, num_events = undisturbed
    rng = random.Random(seed)
    num_kills = num_half = 0
    for _ in range(rng.choice([1, 1, 2, 3])):
        if run_victim(scene, Kill(event=rng.randint(1, num_events), before=rng.random() < 0.5)) is None:
            num_kills += 1
            num_half += scene.half_done()
    assert run_victim(scene) is not None
    assert scene.digests() == expected, f"seed {seed}"
    return num_kills, num_half


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_killed_stages_end_as_if_nothing_had_happened(
    make_scene: Callable[..., DataScene], undisturbed: tuple[dict[str, str], int]
) -> None:
    counts = [check_kills(make_scene(num_proc=1 + (seed == 2)), undisturbed, seed) for seed in range(4)]
    assert all(num_kills for num_kills, _ in counts)
    assert sum(num_half for _, num_half in counts) >= 2, "kills hit stages that had finished parts"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_a_killed_stage_has_finished_is_not_made_again(
    make_scene: Callable[..., DataScene], undisturbed: tuple[dict[str, str], int]
) -> None:
    """Killed late in encode, the next run has few events left of it."""
    expected, num_events = undisturbed
    scene = make_scene()
    for event in range(num_events // 2, num_events, 3):  # the last third of encode, wherever pack begins
        if run_victim(scene, Kill(event=event, before=True)) is None and scene.half_done():
            break
    assert scene.half_done()
    again = run_victim(scene)
    assert again is not None
    assert again < num_events * 0.8
    assert scene.digests() == expected


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_scene_has_what_the_law_speaks_of(make_scene: Callable[..., DataScene], undisturbed: tuple[dict[str, str], int]) -> None:
    digests, num_events = undisturbed
    assert set(digests) == set(STAGES)
    assert num_events > 60
    scene = make_scene(num_proc=2)
    assert run_victim(scene) is not None
    assert scene.digests() == digests, "however many processes encode"
    records = {record.stage: record for record in list_records(scene.store)}
    assert sum(entry.path.startswith("train-") for entry in records["encode"].files) == NUM_ROWS // PART_ROWS
    report = json.loads(scene.store.get(f"{records['encode'].prefix}/report.json"))
    assert report["train"]["split"] > 0
    assert sum(entry.path.startswith("shard-") for entry in records["shard"].files) > 5


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(2))
def test_a_kill_then_gc_and_a_damaged_part_then_two_that_go_on_at_once(
    make_scene: Callable[..., DataScene], undisturbed: tuple[dict[str, str], int], seed: int
) -> None:
    """What the run in progress has finished outlives `artifacts gc`, a damaged part is made again, and one of two computes."""
    expected, num_events = undisturbed
    rng, scene = random.Random(seed), make_scene(num_proc=2)
    for event in range(num_events // 3 + seed, num_events, 4):
        if run_victim(scene, Kill(event=event, before=True)) is None and scene.half_done():
            break
    assert scene.half_done()
    before = {info.key for info in scene.store.list("data") if ".parts/" in info.key}
    scene.store.put(run_use_key("chaos", "preprocess", scene.trajectories.key), b"")  # as the run's first stage has done
    collect(scene.store.url, keep_last=0, min_age_hours=0, dry_run=False, now=time.time() + 60, say=lambda line: None)
    unfinished = set(STAGES) - set(scene.digests())
    assert any(info.key in before and info.key.split("/")[1] in unfinished for info in scene.store.list("data"))
    parts = sorted(info.key for info in scene.store.list("data") if info.key.endswith(".arrow") and info.key.split("/")[1] in unfinished)
    damaged = rng.choice(parts)
    scene.store.put(damaged, scene.store.get(damaged)[:-9] + b"elsewhere")
    with ThreadPoolExecutor(2) as both:
        assert None not in both.map(run_victim, [scene, scene])
    assert scene.digests() == expected


@pytest.mark.chaos
@pytest.mark.timeout(1800)
def test_thirty_random_kills(make_scene: Callable[..., DataScene], undisturbed: tuple[dict[str, str], int]) -> None:
    kills = half = 0
    seed = 100
    while kills < 30:
        num_kills, num_half = check_kills(make_scene(num_proc=1 + seed % 3), undisturbed, seed)
        kills, half, seed = kills + num_kills, half + num_half, seed + 1
    assert half >= 10
