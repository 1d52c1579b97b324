"""Uploads to the two hubs: one commit, seen whole or not at all."""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.hub_server import FakeHubs, running_hubs
from twinkle_core.errors import ConfigError, DamagedError, StorageError
from twinkle_core.hub import upload
from twinkle_core.hub.upload import BackgroundUploads, upload_model_folder

TOKEN = "hf_secret-of-mine"
FILES = {
    "README.md": b"---\nlicense: mit\n---\n# card",
    "adapter_config.json": b"{}",
    "adapter_model.safetensors": b"weights" * 100,
    "optimizer.safetensors": b"moments" * 100,
    "tokenizer.json": b"{}" + b" " * 70_000,  # more than ModelScope takes in the commit itself
    "templates/tool_use.jinja": b"{{ tools }}",
}


@pytest.fixture
def hubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHubs]:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # the hub is on loopback
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # the large files' plain protocol; the other is not on loopback
    monkeypatch.setattr(upload, "PAUSE_SECONDS", 0.01)
    with running_hubs() as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.endpoint)  # as HF_ENDPOINT does, which is read when the client is imported
        monkeypatch.setenv("MODELSCOPE_ENDPOINT", running.endpoint)
        monkeypatch.delenv("MODELSCOPE_API_TOKEN", raising=False)
        running.token = TOKEN
        yield running


@pytest.fixture(params=["hf", "ms"])
def target(request: pytest.FixtureRequest) -> str:
    return f"{request.param}://org/name"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, data in {**FILES, ".cache/state": b"not for others"}.items():
        path = tmp_path / "checkpoint" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return tmp_path / "checkpoint"


def uploaded(hubs: FakeHubs) -> dict[str, bytes]:
    return {name: data for name, data in hubs.visible("org/name").items() if name != ".gitattributes"}


def test_a_folder_appears_in_one_commit_with_every_file(hubs: FakeHubs, target: str, folder: Path) -> None:
    commit = upload_model_folder(folder, target, TOKEN)
    assert uploaded(hubs) == FILES
    assert hubs.branches["org/name", "main"] == commit
    assert sum("/commit/" in request for request in hubs.requests) == 1
    large = {FILES["adapter_model.safetensors"], FILES["optimizer.safetensors"]}
    assert set(hubs.blobs.values()) == large | ({FILES["tokenizer.json"]} if target.startswith("ms") else set())


def test_a_second_upload_keeps_what_is_there_and_sends_what_is_new(hubs: FakeHubs, target: str, folder: Path) -> None:
    upload_model_folder(folder, target, TOKEN)
    hubs.requests.clear()
    (folder / "adapter_model.safetensors").write_bytes(b"trained on")
    (folder / "README.md").unlink()
    upload_model_folder(folder, target, TOKEN)
    assert uploaded(hubs) == {**FILES, "adapter_model.safetensors": b"trained on"}
    assert sum(request.startswith("PUT") for request in hubs.requests) == 1


@pytest.mark.parametrize("part", ["/large/", "/commit/", "/batch"])
@pytest.mark.parametrize("fault", ["cut", "lost"])
def test_a_connection_that_is_cut_is_tried_again_and_shows_no_half_model(
    hubs: FakeHubs, target: str, folder: Path, part: str, fault: str
) -> None:
    getattr(hubs, fault)[part] = 1
    upload_model_folder(folder, target, TOKEN)
    assert getattr(hubs, fault)[part] == 0, "the fault did occur"
    assert uploaded(hubs) == FILES
    assert not any(
        repo == "org/name" and 0 < len(files.keys() & FILES.keys()) < len(FILES) for (repo, _), files in hubs.repositories.items()
    )


def test_a_hub_that_stays_away_is_an_error_and_shows_nothing(hubs: FakeHubs, target: str, folder: Path) -> None:
    hubs.cut["/commit/"] = 99
    with pytest.raises(StorageError, match="cannot upload to org/name"):
        upload_model_folder(folder, target, TOKEN)
    assert hubs.cut["/commit/"] == 99 - upload.ATTEMPTS
    assert uploaded(hubs) == {}
    assert hubs.blobs, "the large files were there already"


def test_a_hub_that_lists_other_bytes_is_not_believed(hubs: FakeHubs, target: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = hubs.commit

    def damaging(repo: str, files: dict[str, bytes]) -> str:
        return whole(repo, {name: data.replace(b"moments", b"momentz") for name, data in files.items()})

    monkeypatch.setattr(hubs, "commit", damaging)
    with pytest.raises(DamagedError, match=r"optimizer\.safetensors of org/name"):
        upload_model_folder(folder, target, TOKEN)


@pytest.mark.parametrize("given", ["argument", "environment"])
def test_the_token_is_that_of_the_argument_or_the_environment_and_never_shown(
    hubs: FakeHubs, target: str, folder: Path, given: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    variable = "HF_TOKEN" if target.startswith("hf") else "MODELSCOPE_API_TOKEN"
    if given == "environment":
        monkeypatch.setenv(variable, TOKEN)
    upload_model_folder(folder, target, TOKEN if given == "argument" else None)
    assert uploaded(hubs) == FILES
    hubs.token = "another"
    with pytest.raises(ConfigError, match=f"give hub_token, or set {variable}") as caught:
        upload_model_folder(folder, target, TOKEN if given == "argument" else None)
    shown = "".join(traceback.format_exception(caught.value)) + caplog.text
    assert TOKEN not in shown


def test_what_cannot_be_uploaded_is_refused_before_the_hub_is_asked(hubs: FakeHubs, folder: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, target, message in (
        (folder, "s3://bucket/name", r"hub_model_id is 's3://bucket/name'; write hf://organisation/name"),
        (folder, "name", "write hf://organisation/name"),
        (folder, "ms://org/name@v1", "ms://organisation/name"),
        (tmp_path / "nowhere", "org/name", "nowhere does not exist"),
        (tmp_path / "empty", "org/name", "holds no file"),
    ):
        with pytest.raises(ConfigError, match=message):
            upload_model_folder(path, target, TOKEN)
    assert hubs.requests == []


def test_uploads_behind_training_raise_when_they_are_waited_for_once(
    hubs: FakeHubs, target: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    uploads = BackgroundUploads()
    uploads.begin(folder, target, TOKEN)
    uploads.wait()
    assert uploaded(hubs) == FILES
    uploads.begin(folder, target, "wrong")
    uploads.begin(folder, target, TOKEN)
    with pytest.raises(ConfigError, match="refuses org/name"):
        uploads.wait()
    assert "upload to" in caplog.text and "wrong" not in caplog.text
    uploads.wait()


def test_who_waits_for_an_upload_may_look_in_between(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = threading.Event()
    monkeypatch.setattr(upload, "upload_model_folder", lambda *_: str(done.wait(30)))
    uploads = BackgroundUploads()
    assert uploads.wait(0.0), "none was begun"
    uploads.begin(folder, "org/name", TOKEN)
    assert not uploads.wait(0.01)
    done.set()
    assert uploads.wait(30)
