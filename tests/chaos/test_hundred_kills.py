"""A hundred kills of drivers, workers, writers and uploaders: every training ends as if nothing had happened, to the bit.

Each block is a test of its own, and has to see its share of kills that happened: `-k full-ray` runs the two of a scene. The table of
what was killed is printed at the end of the run.
"""

from __future__ import annotations

import random
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from storage.store import open_store
from tests.chaos.harness import Result, Scene, result_of
from tests.chaos.laws import Journal, Seen, check_all, seen
from tests.chaos.script import MODES, PlannedKill, Script
from tests.chaos.trainings import WORKERS, run_to_the_end
from tests.chaos.worker_server import worker_server
from tests.servers import create_bucket, s3_server
from twinkle_core.config import CheckpointConfig, LoraConfig, ModelConfig, ResourcesConfig

NUM_ROWS = 9
BUCKET = "chaos"
WIDE_VOCABULARY = 17_000
"""Moments of its embedding are more than 8 MiB, which S3 gets in parts."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """How a scene differs from the one of `conftest`: 9 rows, 2 epochs, shuffle, micro-batches of one row."""

    lora: bool
    on_ray: bool
    on_s3: bool
    batch_size: int
    """18 rows are no multiple: the last accumulation window is short."""
    save_every: int
    wide: bool = False

    @property
    def workers(self) -> int:
        return 2 if self.on_ray else 1


SETTINGS = {
    "lora-local": Setting(lora=True, on_ray=False, on_s3=False, batch_size=4, save_every=2),
    "full-local": Setting(lora=False, on_ray=False, on_s3=True, batch_size=4, save_every=2, wide=True),
    "lora-ray": Setting(lora=True, on_ray=True, on_s3=True, batch_size=5, save_every=1),
    "full-ray": Setting(lora=False, on_ray=True, on_s3=False, batch_size=5, save_every=1),
}
LOCAL_SHARE = {"driver": 4, "writer": 3, "uploader": 3}
RAY_SHARE = {"driver": 2, "worker 0": 2, "worker 1": 2, "writer": 2, "uploader": 2}
BLOCKS = [(name, number) for name, setting in SETTINGS.items() for number in range(2 if setting.on_ray else 3)]


def share_of(name: str) -> dict[str, int]:
    """Kills of each victim in a block of the scene."""
    return RAY_SHARE if SETTINGS[name].on_ray else LOCAL_SHARE


@dataclass(frozen=True, kw_only=True)
class Whole:
    """An undisturbed run."""

    result: Result
    seen: Seen
    num_events: Counter[str]
    """Of each victim."""


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    """Settings of an S3, in this process's environment too."""
    with s3_server() as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        create_bucket(environment, BUCKET)
        yield environment


@pytest.fixture(scope="module")
def cluster(server: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, str]]:
    """(address, executable of its workers): one for all trainings, which outlives their drivers. Inherits the server's settings."""
    import ray

    from twinkle_core.infra.local_ray import LocalRay

    local = LocalRay()
    try:
        with worker_server(tmp_path_factory.mktemp("workers")) as executable:
            yield ray.get_runtime_context().gcs_address, executable
    finally:
        local.shutdown()


@pytest.fixture(scope="module")
def wide_llama(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny Llama with many more tokens."""
    import torch
    from transformers import AutoConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("models") / "wide-llama"
    shutil.copytree(tiny_llama, folder)
    config = AutoConfig.from_pretrained(folder)
    config.vocab_size = WIDE_VOCABULARY
    with torch.random.fork_rng():
        torch.manual_seed(1)
        LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def make(request: pytest.FixtureRequest, scene: Scene, server: dict[str, str]) -> Callable[[str, Path], Scene]:
    """A scene, by its name, in a new home and store that hold the shards."""

    def made(name: str, home: Path) -> Scene:
        setting = SETTINGS[name]
        address, executable = request.getfixturevalue("cluster") if setting.on_ray else (None, "")
        model = request.getfixturevalue("wide_llama") if setting.wide else Path(scene.settings.model.source)
        shutil.copytree(scene.home, home)
        environment = {WORKERS: executable} if setting.on_ray else {}
        if setting.on_s3:
            environment |= {**server, "TWINKLE_STORE": f"s3://{BUCKET}/{uuid.uuid4().hex}"}
            ours, theirs = scene.context().store, open_store(environment["TWINKLE_STORE"])
            for info in ours.list():
                theirs.put(info.key, ours.get(info.key))
        return replace(
            scene,
            home=home,
            environment=environment,
            settings=replace(
                scene.settings,
                model=ModelConfig(source=str(model)),
                train=scene.settings.train.model_copy(
                    update={
                        "batch_size": setting.batch_size,
                        "lora": LoraConfig(rank=4, alpha=8, dropout=0.1) if setting.lora else None,
                    }
                ),
                checkpoint=CheckpointConfig(save_every=setting.save_every, keep_last=2),
                resources=ResourcesConfig(mode="ray" if setting.on_ray else "local", workers=setting.workers, ray_address=address),
            ),
        )

    return made


@pytest.fixture(scope="module")
def undisturbed(make: Callable[[str, Path], Scene], tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Whole]:
    """What a scene gives when nobody kills it. Computed once, and held to the laws itself."""
    known: dict[str, Whole] = {}

    def whole(name: str) -> Whole:
        if name not in known:
            folder = tmp_path_factory.mktemp(name)
            scene, script = make(name, folder / "home"), Script(folder / "script")
            script.write(())
            assert run_to_the_end(scene, script) == 1
            journal = script.journal()
            events = Counter(line["victim"] for line in journal if line["kind"] == "event")
            written = {line["name"] for line in journal if line["kind"] == "event" and line["victim"] == "writer"}
            assert written == {"checkpoint_files.save_file", "checkpoint_files.write_text"}, "tensors and texts may be cut off"
            known[name] = Whole(result=result_of(scene), seen=seen(journal), num_events=events)
            left = check_all(scene, script, known[name].seen, num_rows=NUM_ROWS, on_ray=SETTINGS[name].on_ray)
            assert set(left.values()) == {0}, "who is not killed leaves nothing"
        return known[name]

    return whole


def draw_plan(rng: random.Random, left: Counter[str], num_events: Counter[str]) -> tuple[PlannedKill, ...]:
    """One to three kills of victims that the block still needs. Later ones are early in what is left of the training."""
    victims = rng.sample(sorted(left.elements()), k=min(rng.randint(1, 3), left.total()))
    return tuple(
        PlannedKill(victim=victim, event=rng.randint(1, max(1, num_events[victim] // (place + 1))), mode=rng.choice(MODES[victim]))
        for place, victim in enumerate(victims)
    )


def resumed(journal: Journal) -> list[bool]:
    """Of each kill whether what ran next went on from a checkpoint."""
    found: list[bool] = []
    for line in journal:
        if line["kind"] == "kill":
            found.append(False)
        elif found and line["kind"] == "say" and line["line"].startswith("resuming after step"):
            found[-1] = True
    return found


@pytest.mark.chaos
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("name", "number"), BLOCKS, ids=[f"{name}-{number}" for name, number in BLOCKS])
def test_killed_trainings_end_as_if_nothing_had_happened(
    name: str,
    number: int,
    make: Callable[[str, Path], Scene],
    undisturbed: Callable[[str], Whole],
    tmp_path: Path,
    kills_seen: Counter[tuple[str, str, str]],
) -> None:
    whole, setting = undisturbed(name), SETTINGS[name]
    rng, left = random.Random(f"{name} {number}"), Counter(share_of(name))
    most = 3 * left.total()
    for training in range(most):
        if not +left:
            break
        folder = tmp_path / f"training-{training}"
        scene, script = make(name, folder / "home"), Script(folder / "script")
        script.write(draw_plan(rng, left, whole.num_events))
        run_to_the_end(scene, script)
        told = f"training {training} of block {number}, {script.plan()}"
        assert result_of(scene) == whole.result, told
        litter = check_all(scene, script, whole.seen, num_rows=NUM_ROWS, on_ray=setting.on_ray)
        kills = [line for line in script.journal() if line["kind"] == "kill"]
        assert len(kills) == script.num_done()
        for line, went_on in zip(kills, resumed(script.journal()), strict=True):
            left[line["victim"]] -= 1
            kills_seen[name, line["victim"], "kills"] += 1
            kills_seen[name, line["victim"], "resumed"] += went_on
        kills_seen.update({(name, "", what): number_left for what, number_left in litter.items()})
        discard(scene, folder)
    assert not +left, f"after {most} trainings these kills have still not happened: {dict(+left)}"


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize(("since", "event", "is_reused"), [("recorded", 1, True), ("committed", 2, False)])
def test_a_kill_once_it_was_right_computes_nothing_again(
    make: Callable[[str, Path], Scene], undisturbed: Callable[[str], Whole], tmp_path: Path, since: str, event: int, is_reused: bool
) -> None:
    """The laws on kills that a seed seldom draws: when the record is there, and just after a checkpoint was committed."""
    whole = undisturbed("lora-local")
    scene, script = make("lora-local", tmp_path / "home"), Script(tmp_path / "script")
    script.write((PlannedKill(victim="driver", event=event, mode="before", since=since),))
    assert run_to_the_end(scene, script) == 2
    journal = script.journal()
    killed = next(number for number, line in enumerate(journal) if line["kind"] == "kill")
    assert any(line["kind"] == since for line in journal[:killed])
    assert [line["reused"] for line in journal if line["kind"] == "end"] == [is_reused]
    assert any(line["kind"] == "saw" for line in journal[killed:]) != is_reused
    assert result_of(scene) == whole.result
    check_all(scene, script, whole.seen, num_rows=NUM_ROWS, on_ray=False)


def discard(scene: Scene, folder: Path) -> None:
    """Frees disk and memory for the next training."""
    if "TWINKLE_STORE" in scene.environment:
        store = open_store(scene.environment["TWINKLE_STORE"])
        for info in store.list():
            store.delete(info.key)
    shutil.rmtree(folder)


def test_the_blocks_add_up_to_a_hundred_kills_and_fifteen_of_each_kind() -> None:
    totals: Counter[str] = Counter()
    for name, _ in BLOCKS:
        for victim, number in share_of(name).items():
            totals["all"] += number
            totals[name] += number
            totals[victim.split()[0]] += number
    assert totals.pop("all") >= 100
    assert set(totals) == {*SETTINGS, "driver", "worker", "writer", "uploader"}
    assert min(totals.values()) >= 15
