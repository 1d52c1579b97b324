from pathlib import Path
from typing import Any

import pytest

from tasks import preprocess as module
from tasks.context import Context, RunSpec
from tasks.preprocess import public_uri, wanted_trajectories
from tasks.settings import Settings
from tests.end_to_end.conftest import in_home, run_flow, values
from twinkle_core.config import DataConfig
from twinkle_core.errors import DataError


def test_addresses_are_recorded_without_local_paths() -> None:
    assert public_uri("/home/somebody/rows.jsonl") == "rows.jsonl"
    assert public_uri("file:///home/somebody/rows.jsonl") == "rows.jsonl"
    assert public_uri("s3://bucket/rows.jsonl") == "s3://bucket/rows.jsonl"


def test_where_rows_lie_is_no_part_of_the_key(tmp_path: Path) -> None:
    keys = set()
    spec = RunSpec(run_id="keys", flow="sft", params={}, code={})
    context = Context(settings=Settings.from_env({"TWINKLE_HOME": str(tmp_path)}), spec=spec)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "rows.jsonl").write_text('{"prompt": "a", "completion": "b"}\n')
        source = {"name": "rows", "uri": str(tmp_path / folder / "rows.jsonl")}
        keys.add(wanted_trajectories(context, DataConfig.model_validate({"sources": [source]})).key)
    assert len(keys) == 1


@pytest.mark.slow
def test_a_source_that_grows_while_it_is_read_is_not_recorded(
    prefect_server: str, rows: Path, tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    growing = tmp_path / "growing.jsonl"
    growing.write_bytes(rows.read_bytes())
    real = module.preprocess

    def grows(*arguments: Any, **settings: Any) -> Any:
        with growing.open("a") as file:
            file.write('{"prompt": "late", "completion": "row"}\n')
        return real(*arguments, **settings)

    monkeypatch.setattr(module, "preprocess", grows)
    with in_home(tmp_path / "home"), pytest.raises(DataError, match="changed while it was read"):
        run_flow(values(growing, tiny_llama))
    assert not list((tmp_path / "home" / "store").glob("records/**/*.json"))


@pytest.mark.slow
def test_a_held_out_share_that_rounds_to_no_row_is_refused_before_training(
    prefect_server: str, rows: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    sources = [{"name": "rows", "uri": str(rows), "held_out": 0.001}]
    with in_home(tmp_path / "home"), pytest.raises(DataError, match="no row is held out"):
        run_flow(values(rows, tiny_llama, data={"sources": sources}))


@pytest.mark.slow
def test_rows_that_a_training_cannot_learn_from_end_it_before_they_are_encoded(
    prefect_server: str, tiny_llama: Path, tmp_path: Path
) -> None:
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(f'{{"prompt": "{i}?", "chosen": "yes", "rejected": "no"}}\n' for i in range(20)))
    with in_home(tmp_path / "home"), pytest.raises(DataError, match="20 of kind 'preference', but this flow learns from conversation and"):
        run_flow(values(pairs, tiny_llama))
    assert not list((tmp_path / "home" / "store").glob("records/encode/*.json"))
