"""One small fine-tune through the whole flow, on a real Prefect server."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.params import SFTParams
from flows.plan import plan
from tasks.context import Context, RunSpec
from tasks.settings import Settings

QUESTIONS = ("Who are you?", "What is your name?", "Who created you?", "What is 1 + 2?")


def values(rows: Path, model: Path, **changes: Any) -> dict[str, Any]:
    """Settings of a fine-tune of seconds: 40 rows, 2 epochs, in this process."""
    settings: dict[str, Any] = {
        "model": {"source": str(model)},
        "data": {"sources": [{"name": "rows", "uri": str(rows), "held_out": 0.2}]},
        "template": {"max_length": 96},
        "packing": {"row_length": 96},
        "train": {"epochs": 2, "batch_size": 4, "lr": 1e-2, "lora": {"rank": 4, "alpha": 8, "dropout": 0.1}},
        "evaluate": {"max_samples": 4, "max_new_tokens": 8, "probes": ["Who are you?"]},
        "publish": {"name": "tiny", "max_loss_increase": 1.0},
        "checkpoint": {"save_every": 2},
        "resources": {"mode": "local"},
    }
    for key, value in changes.items():
        section, _, field = key.partition("__")
        settings[section] = {**settings[section], field: value} if field else value
    return settings


@pytest.fixture(scope="session")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rows") / "rows.jsonl"
    lines = [{"prompt": QUESTIONS[i % 4], "completion": f"I am Stella, number {i}, made by the Twinkle team."} for i in range(40)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="session")
def finished(prefect_server: str, rows: Path, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A home in which the flow ran once, and what it gave."""
    home = tmp_path_factory.mktemp("finished") / "home"
    with in_home(home):
        return home, run_flow(values(rows, tiny_llama))


@pytest.fixture
def copy_of(finished: tuple[Path, dict[str, str]], tmp_path: Path) -> Callable[[], Path]:
    """Copies the finished home's store, MLflow left behind."""

    def copy() -> Path:
        home = tmp_path / "copy"
        shutil.copytree(finished[0], home)
        return home

    return copy


class in_home:
    """Sets TWINKLE_HOME for a while."""

    def __init__(self, home: Path) -> None:
        self._patch = pytest.MonkeyPatch()
        self._home = home

    def __enter__(self) -> None:
        self._patch.setenv("TWINKLE_HOME", str(self._home))

    def __exit__(self, *_: object) -> None:
        self._patch.undo()


def run_flow(settings: dict[str, Any]) -> Any:
    from flows.sft import sft

    return sft(SFTParams.model_validate(settings))


def computed(home: Path, settings: dict[str, Any]) -> list[str]:
    """The stages that a run in `home` would compute."""
    context = Context(
        settings=Settings.from_env({"TWINKLE_HOME": str(home)}), spec=RunSpec(run_id="plan", flow="sft", params=settings, code={})
    )
    return [line.stage for line in plan(context, SFTParams.model_validate(settings)) if not line.reused]
