"""Models of the two hubs: pinned, verified, and only files that a model is made of."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.hub_server import running_hubs
from twinkle_core.errors import ConfigError, DamagedError, StorageError
from twinkle_core.hub.model_files import files_of
from twinkle_core.hub.resolve import resolve_model


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    import modelscope_hub._download as client
    import modelscope_hub._legacy_api as listing
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # the hub is on loopback
    monkeypatch.setattr(client, "DOWNLOAD_INTEGRITY_RETRY_BACKOFF", 0.01)
    monkeypatch.setattr(listing, "REPO_TREE_PAGE_MAX_ATTEMPTS", 1)
    with running_hubs() as running:
        yield running


@pytest.fixture(params=["hf", "ms"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


FILES = {
    "config.json": b'{"model_type": "llama"}',
    "model.safetensors": b"weights, first version",
    "tokenizer.json": b"{}",
    "tokenizer_config.json": b"{}",
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"# card",
    "modeling_evil.py": b"raise SystemExit",
    "pytorch_model.bin": b"pickle",
    "consolidated.safetensors": b"another layout",
    "onnx/config.json": b"{}",
    "additional_chat_templates/tool_use.jinja": b"{{ tools }}",
    "encoding/encoding_dsv4.py": b"raise SystemExit",
}
ALLOWED = [
    "additional_chat_templates/tool_use.jinja",
    "chat_template.jinja",
    "config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
]


def test_a_branch_is_pinned_to_its_commit_and_only_allowed_files_are_fetched(hub: Any, scheme: str, tmp_path: Path) -> None:
    sha = hub.commit("org/name", FILES)
    model = resolve_model(f"{scheme}://org/name", tmp_path, endpoint=hub.endpoint)
    assert model.name == "org/name"
    assert model.public_uri == f"{scheme}://org/name@{sha if scheme == 'hf' else 'master'}"  # ModelScope tells no commit of a branch
    assert sorted(hub.fetched) == ALLOWED
    folder = model.materialise()
    assert [name for name in files_of(folder) if not name.startswith(".")] == ALLOWED
    assert (folder / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_another_commit_is_another_model_and_an_old_one_can_be_named(hub: Any, scheme: str, tmp_path: Path) -> None:
    old = hub.commit("org/name", FILES)
    first = resolve_model(f"{scheme}://org/name", tmp_path, endpoint=hub.endpoint)
    new = hub.commit("org/name", {**FILES, "model.safetensors": b"weights, second version"})
    second = resolve_model(f"{scheme}://org/name", tmp_path, endpoint=hub.endpoint)
    assert old != new
    assert first.digest != second.digest
    assert first.tokenizer_digest == second.tokenizer_digest
    if scheme == "hf":
        assert second.public_uri == f"hf://org/name@{new}"
        assert resolve_model("org/name", tmp_path, endpoint=hub.endpoint) == second, "hf:// may be left out"
    third = resolve_model(f"{scheme}://org/name@{old}", tmp_path, endpoint=hub.endpoint)
    assert (third.digest, third.public_uri) == (first.digest, f"{scheme}://org/name@{old}")


def test_a_pinned_commit_that_was_fetched_needs_no_network(hub: Any, scheme: str, tmp_path: Path) -> None:
    sha = hub.commit("org/name", FILES)
    first = resolve_model(f"{scheme}://org/name@{sha}", tmp_path, endpoint=hub.endpoint)
    asked = len(hub.requests)
    assert asked
    assert resolve_model(f"{scheme}://org/name@{sha}", tmp_path, endpoint=hub.endpoint) == first
    assert len(hub.requests) == asked


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_damaged_download_is_noticed_and_the_next_try_fetches_it_anew(hub: Any, scheme: str, tmp_path: Path, name: str) -> None:
    hub.commit("org/name", FILES)
    hub.damaged[name] = 99
    with pytest.raises(DamagedError, match=name):
        resolve_model(f"{scheme}://org/name", tmp_path, endpoint=hub.endpoint)
    hub.damaged.clear()
    model = resolve_model(f"{scheme}://org/name", tmp_path, endpoint=hub.endpoint)
    assert (model.path / name).read_bytes() == FILES[name]


def test_a_file_damaged_in_the_cache_is_fetched_anew(hub: Any, scheme: str, tmp_path: Path) -> None:
    hub.commit("org/name", FILES)
    model = resolve_model(f"{scheme}://org/name", tmp_path, endpoint=hub.endpoint)
    (model.path / "model.safetensors").write_bytes(b"weights, fjrst version")
    try:
        again = resolve_model(f"{scheme}://org/name", tmp_path, endpoint=hub.endpoint)
    except DamagedError:
        again = resolve_model(f"{scheme}://org/name", tmp_path, endpoint=hub.endpoint)
    assert again == model
    assert (model.path / "model.safetensors").read_bytes() == FILES["model.safetensors"]


def test_what_is_not_there_is_said_in_one_clear_error(hub: Any, scheme: str, tmp_path: Path) -> None:
    hub.commit("org/name", FILES)
    branch = {"hf": "main", "ms": "master"}[scheme]
    with pytest.raises(ConfigError, match=f"no repository org/other at {branch}"):
        resolve_model(f"{scheme}://org/other", tmp_path, endpoint=hub.endpoint)
    with pytest.raises(ConfigError, match="no (revision 'v9' of repository org/name|repository org/name at v9)"):
        resolve_model(f"{scheme}://org/name@v9", tmp_path, endpoint=hub.endpoint)
    hub.commit("org/pickled", {"config.json": b"{}", "pytorch_model.bin": b"x", "tokenizer.json": b"{}"})
    with pytest.raises(ConfigError, match="only pytorch_model.bin"):
        resolve_model(f"{scheme}://org/pickled", tmp_path, endpoint=hub.endpoint)
    hub.commit("org/adapter", {"adapter_config.json": b"{}", "adapter_model.safetensors": b"x"})
    with pytest.raises(ConfigError, match="adapter alone"):
        resolve_model(f"{scheme}://org/adapter", tmp_path, endpoint=hub.endpoint)


def test_a_hub_that_cannot_be_reached_is_a_storage_error(hub: Any, scheme: str, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot fetch repository org/name"):
        resolve_model(f"{scheme}://org/name", tmp_path, endpoint="http://127.0.0.1:9")
