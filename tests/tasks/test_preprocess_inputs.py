"""What the preprocess stage's key is made of."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tasks.context import Context, RunSpec
from tasks.preprocess import public_uri, wanted_trajectories
from tasks.settings import Settings
from twinkle_core.config import DataConfig, validate
from twinkle_core.errors import ConfigError

CODE = "def f(row):\n    return row\n\n\ndef keep(trajectory):\n    return True\n"


def context(home: Path, trusted: Path | None) -> Context:
    environ = {"TWINKLE_HOME": str(home)} | ({"TWINKLE_TRUSTED_CODE": str(trusted)} if trusted else {})
    spec = RunSpec(run_id="r", flow="sft", params={}, code={})
    return Context(settings=Settings.from_env(environ), spec=spec)


def key(folder: Path, trusted: Path | None, **source: Any) -> str:
    config = validate(DataConfig, {"sources": [{"name": "rows", "uri": str(folder / "rows.jsonl"), **source}]})
    return wanted_trajectories(context(folder, trusted), config).key


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "rows.jsonl").write_text('{"query": "q", "response": "a"}\n')
    (tmp_path / "mine_in_key.py").write_text(CODE)
    return tmp_path


def test_the_users_code_is_an_input_by_its_content_and_not_by_its_place(folder: Path) -> None:
    before = key(folder, folder, processor="mine_in_key.py:f")
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "mine_in_key.py").write_text(CODE)
    assert key(folder, folder / "elsewhere", processor="mine_in_key.py:f") == before
    (folder / "mine_in_key.py").write_text(CODE + "# changed\n")
    assert key(folder, folder, processor="mine_in_key.py:f") != before


def test_filters_of_the_users_own_are_inputs_too(folder: Path) -> None:
    config = validate(
        DataConfig, {"sources": [{"name": "rows", "uri": str(folder / "rows.jsonl")}], "filters": [{"name": "mine_in_key.py:keep"}]}
    )
    wanted = wanted_trajectories(context(folder, folder), config)
    assert set(wanted.inputs) == {"source rows", "code mine_in_key.py:keep"}
    with pytest.raises(ConfigError, match="set TWINKLE_TRUSTED_CODE"):
        wanted_trajectories(context(folder, None), config)


def test_settings_of_every_kind_enter_the_key(folder: Path) -> None:
    keys = {key(folder, None, **source) for source in (
        {}, {"columns": {"query": "prompt"}}, {"weight": 2.0}, {"processor": "GSM8KProcessor"},
        {"processor": "GSM8KProcessor", "processor_args": {"add_assistant": True}},
    )}  # fmt: skip
    assert len(keys) == 5


def test_of_local_files_only_names_are_recorded() -> None:
    assert public_uri(("/home/somebody/a.jsonl", "s3://bucket/b.jsonl")) == "a.jsonl and 1 more"
    assert public_uri(("/home/somebody/a.jsonl",)) == "a.jsonl"
    assert public_uri("s3://bucket/b.jsonl") == "s3://bucket/b.jsonl"
