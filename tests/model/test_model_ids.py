"""The addresses that a model may have: each gives the same weights as the folder, to a model by hand and to a stage of the pipeline.

A .gguf file is trained by the programs of the cookbook."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.store import open_store
from tasks import base_model
from tasks.context import Context, RunSpec
from tasks.settings import Settings
from tests.hub_server import FakeHubs, running_hubs
from tests.servers import create_bucket, s3_server
from twinkle_core.config import ModelConfig
from twinkle_core.hub.resolve import check_scheme
from twinkle_core.model import TransformersModel


@pytest.fixture
def hubs(monkeypatch: pytest.MonkeyPatch, tiny_llama: Path) -> Iterator[FakeHubs]:
    from huggingface_hub import constants

    with running_hubs() as running:
        running.commit("org/tiny", {path.name: path.read_bytes() for path in tiny_llama.iterdir()})
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # the hub is on loopback
        monkeypatch.setattr(constants, "ENDPOINT", running.endpoint)  # as HF_ENDPOINT does, which is read when the client is imported
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.endpoint + "/{repo_id}/resolve/{revision}/{filename}")
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", running.endpoint)
        yield running


def check(model_id: str, folder: Path, cache: Path) -> None:
    check_scheme(model_id)  # what a flow's settings are checked with
    context = Context(
        settings=Settings.from_env({"TWINKLE_HOME": str(cache)}), spec=RunSpec(run_id="run-1", flow="sft", params={}, code={})
    )
    stage = base_model.resolve(context, ModelConfig(source=model_id))
    assert stage.digest == base_model.resolve(context, ModelConfig(source=str(folder))).digest
    assert stage.public_uri is None or stage.public_uri.startswith(model_id.split("@")[0])
    expected = TransformersModel(folder).get_state_dict()
    found = TransformersModel(model_id, cache_dir=cache).get_state_dict()
    assert found.keys() == expected.keys()
    assert all((found[name] == expected[name]).all() for name in expected)


@pytest.mark.parametrize("model_id", ["hf://org/tiny", "ms://org/tiny", "ms://org/tiny@master"])
def test_a_model_of_a_hub(hubs: FakeHubs, model_id: str, tiny_llama: Path, tmp_path: Path) -> None:
    check(model_id, tiny_llama, tmp_path)
    assert "model.safetensors" in hubs.fetched


@pytest.mark.slow
def test_a_model_in_a_store(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with s3_server() as environment:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        create_bucket(environment, "models")
        store = open_store("s3://models/base/tiny")
        for path in tiny_llama.iterdir():
            store.upload(path, path.name)
        check("s3://models/base/tiny", tiny_llama, tmp_path)
