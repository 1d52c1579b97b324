from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from storage.store import open_store
from tests.checkpoint.training import Training, outcome, write_shards
from tests.model.tiny_models import save_model


@pytest.fixture(scope="session")
def training(tmp_path_factory: pytest.TempPathFactory) -> Training:
    top = tmp_path_factory.mktemp("training")
    return Training(model_folder=save_model(top / "base", "qwen2"), shards=write_shards(top / "shards"))


@pytest.fixture(scope="session")
def finished(training: Training, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A store in which the training has ended undisturbed, with the checkpoints of steps 5 and 4; and its outcome."""
    url = tmp_path_factory.mktemp("finished") / "store"
    said: list[str] = []
    last = training.run(str(url), said)
    assert said == []
    assert last.step == 5
    return url, outcome(open_store(str(url)), last)
