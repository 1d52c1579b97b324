"""The scene that every kill is tried on."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from storage.artifact import ArtifactRecord, commit_record
from storage.layout import data_prefix
from storage.store import open_store
from storage.transfer import upload_folder
from tasks.settings import Settings
from tasks.train_sft import TrainSettings
from tests.chaos.harness import Ending, Result, Scene, result_of, run_victim
from tests.sharding.shard_files import write_folder
from twinkle_core.config import CheckpointConfig, LoraConfig, ModelConfig, ResourcesConfig, TrainConfig
from twinkle_core.types import IGNORE, PackedRow

DOCUMENT_TOKENS = 24
KILLS_SEEN: pytest.StashKey[Counter[tuple[str, str, str]]] = pytest.StashKey()
NUM_ROWS = 9
"""With batches of 4 over 2 epochs: 18 rows, 5 optimizer steps, the last with 2 rows."""


@pytest.fixture(scope="session")
def scene(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> Scene:
    """Shards of random rows in a store of their own: shuffle on, dropout 0.1, 4 micro-batches a step, a short last one, 2 epochs."""
    home = tmp_path_factory.mktemp("scene")
    settings = Settings.from_env({"TWINKLE_HOME": str(home)})
    store = open_store(settings.store_url)
    folder = tmp_path_factory.mktemp("shards")
    write_random_shards(folder)
    files = upload_folder(store, folder, data_prefix("shard", "0" * 64, "a1"))
    record = ArtifactRecord(
        stage="shard", version=1, key="0" * 64, attempt="a1", recipe={}, inputs={}, files=files, summary={}, provenance={"created": 0.0}
    )
    commit_record(store, record)
    train = TrainConfig(
        epochs=2, batch_size=4, micro_batch_size=1, lr=1e-2, warmup_ratio=0.2, lora=LoraConfig(rank=4, alpha=8, dropout=0.1), seed=3
    )
    return Scene(
        home=home,
        shards=record.ref(store.url),
        settings=TrainSettings(
            model=ModelConfig(source=str(tiny_llama)),
            train=train,
            checkpoint=CheckpointConfig(save_every=2, keep_last=2),
            resources=ResourcesConfig(mode="local"),
        ),
    )


@pytest.fixture
def fresh(scene: Scene, tmp_path: Path) -> Callable[[str], Scene]:
    """A copy of the scene in a home of its own."""

    def copy(name: str) -> Scene:
        shutil.copytree(scene.home, tmp_path / name)
        return scene.at(tmp_path / name)

    return copy


@pytest.fixture(scope="session")
def undisturbed(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> tuple[Result, Ending]:
    """What an uninterrupted run gives, and how many events it has."""
    home = tmp_path_factory.mktemp("undisturbed") / "home"
    shutil.copytree(scene.home, home)
    ending = run_victim(scene.at(home))
    return result_of(scene.at(home)), ending


@pytest.fixture(scope="session")
def kills_seen(pytestconfig: pytest.Config) -> Counter[tuple[str, str, str]]:
    """(scene, victim, what) -> how often; printed at the end of the run."""
    return pytestconfig.stash.setdefault(KILLS_SEEN, Counter())


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """The table of kills: how many happened, and of those how many went on from a checkpoint."""
    if not (counts := config.stash.get(KILLS_SEEN, Counter())):
        return
    terminalreporter.section("kills that happened (of them resumed from a checkpoint)")
    victims = sorted({victim for _, victim, _ in counts if victim})
    names = sorted({name for name, _, _ in counts})
    terminalreporter.write_line(f"{'scene':12}" + "".join(f"{victim:>13}" for victim in (*victims, "all", "files left", "folders left")))
    for name in (*names, "all"):
        chosen = names if name == "all" else [name]

        def total(victim: str | None, what: str, chosen: list[str] = chosen) -> int:
            return sum(n for (scene, who, which), n in counts.items() if scene in chosen and who == (victim or who) and which == what)

        cells = [f"{total(victim, 'kills')} ({total(victim, 'resumed')})" for victim in (*victims, None)]
        terminalreporter.write_line(
            f"{name:12}" + "".join(f"{cell:>13}" for cell in (*cells, *(str(total(None, what)) for what in ("files left", "folders left"))))
        )


def write_random_shards(folder: Path) -> None:
    """`NUM_ROWS` packed rows of two documents each, of random tokens, half of them supervised."""
    rng = np.random.default_rng(0)
    rows = []
    for number in range(NUM_ROWS):
        ids = rng.integers(5, 200, 2 * DOCUMENT_TOKENS).astype(np.int32)
        labels = np.roll(ids, -1)
        for start in (0, DOCUMENT_TOKENS):
            labels[start : start + DOCUMENT_TOKENS // 2] = IGNORE
            labels[start + DOCUMENT_TOKENS - 1] = IGNORE
        lengths = np.full(2, DOCUMENT_TOKENS, dtype=np.int32)
        rows.append(PackedRow(input_ids=ids, labels=labels, seq_lens=lengths, sample_ids=np.arange(2) + 2 * number))
    write_folder(folder, rows, 4096)
