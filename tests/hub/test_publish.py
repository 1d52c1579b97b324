from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from storage.artifact import ArtifactRef
from storage.store import Store, open_store
from twinkle_core.errors import ConfigError, DamagedError, DataError
from twinkle_core.hub.publish import Release, publish_folder, read_release, verify_release

NOON = datetime(2026, 11, 28, 12, tzinfo=UTC)
REFS = {"export": ArtifactRef(stage="export", key="ab" * 32, uri="/secret/store/records/x.json", digest="cd" * 32)}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    path = tmp_path / "model"
    path.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (path / name).write_text("{}")
    (path / "model.safetensors").write_bytes(b"weights")
    (path / "chat_template.jinja").write_text("{{ messages }}")
    (path / "README.md").write_text("# card")
    (path / "report.html").write_text("<p>took 5 s</p>")
    return path


@pytest.fixture
def target(tmp_path: Path) -> str:
    return str(tmp_path / "releases")


def publish(folder: Path, target: str, created: datetime = NOON) -> Release:
    return publish_folder(folder, target=target, name="ada", created=created, artifacts=REFS, volatile={"report.html"})


def contents(target: str) -> dict[str, bytes]:
    store = open_store(target)
    return {info.key: store.get(info.key) for info in store.list("")}


def test_a_release_holds_every_file_and_says_what_it_was_made_of(folder: Path, target: str) -> None:
    release = publish(folder, target)
    stored = contents(target)
    prefix = f"ada/{release.version}"
    assert {key for key in stored if key.startswith(prefix)} == {f"{prefix}/{path.name}" for path in folder.iterdir()} | {
        f"{prefix}/RELEASE.json"
    }
    said = json.loads(stored[f"{prefix}/RELEASE.json"])
    assert said["artifacts"]["export"] == {"stage": "export", "key": "ab" * 32, "digest": "cd" * 32}
    assert said["created"] == "2026-11-28T12:00:00+00:00"
    assert b"/secret" not in stored[f"{prefix}/RELEASE.json"]
    assert json.loads(stored["ada/LATEST.json"])["version"] == release.version
    assert verify_release(open_store(target), release) == []


def test_publishing_the_same_again_changes_nothing_and_returns_the_same(folder: Path, target: str) -> None:
    first = publish(folder, target)
    stored = contents(target)
    (folder / "report.html").write_text("<p>took 7 s</p>")
    assert publish(folder, target, NOON + timedelta(days=1)) == first
    assert contents(target) == stored


class Cut(Exception):
    pass


def test_a_release_cut_off_at_any_write_is_invisible_and_the_next_call_finishes_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = publish(folder, str(tmp_path / "whole"))
    whole = contents(str(tmp_path / "whole"))
    kind = type(open_store(str(tmp_path)))
    cuts = 0
    for allowed in range(20):
        target, left = str(tmp_path / f"cut{allowed}"), [allowed]
        with monkeypatch.context() as patch:
            for method in ("upload", "put_if_absent", "compare_and_swap"):
                patch.setattr(kind, method, _cutting(getattr(kind, method), left))
            try:
                publish(folder, target)
                break
            except Cut:
                cuts += 1
        half = contents(target)
        is_visible = f"ada/{expected.version}/RELEASE.json" in half
        assert is_visible == (allowed == len(whole) - 1)
        assert "ada/LATEST.json" not in half
        assert publish(folder, target).version == expected.version
        assert contents(target) == whole
    assert cuts == len(whole) > 5


def _cutting(real: Any, left: list[int]) -> Any:
    def method(*args: Any) -> Any:
        if left[0] < 0:  # one write of the store made by another: counted already
            return real(*args)
        if left[0] == 0:
            raise Cut
        count, left[0] = left[0], -1
        try:
            return real(*args)
        finally:
            left[0] = count - 1

    return method


def test_a_half_release_of_another_publisher_keeps_its_report_and_names_it_right(folder: Path, target: str) -> None:
    version = publish(folder, str(folder.parent / "scratch")).version
    store = open_store(target)
    store.put(f"ada/{version}/report.html", b"<p>theirs</p>")
    release = publish(folder, target)
    assert store.get(f"ada/{version}/report.html") == b"<p>theirs</p>"
    assert verify_release(store, release) == []


def test_other_content_is_another_version_and_latest_points_to_the_newest(folder: Path, target: str) -> None:
    old = publish(folder, target)
    (folder / "model.safetensors").write_bytes(b"better weights")
    new = publish(folder, target, NOON + timedelta(hours=1))
    assert old.version != new.version
    store = open_store(target)
    assert json.loads(store.get("ada/LATEST.json"))["version"] == new.version
    (folder / "model.safetensors").write_bytes(b"weights")
    assert publish(folder, target, NOON + timedelta(hours=2)) == old
    assert json.loads(store.get("ada/LATEST.json"))["version"] == new.version


def test_a_missing_file_of_a_standing_release_is_put_back_or_named(folder: Path, target: str) -> None:
    release = publish(folder, target)
    store = open_store(target)
    key = f"ada/{release.version}/model.safetensors"
    store.delete(key)
    assert verify_release(store, release) == ["model.safetensors is missing"]
    publish(folder, target)
    assert store.get(key) == b"weights"
    store.put(key, b"weightz")
    assert "model.safetensors has sha256" in verify_release(store, release)[0]
    store.delete(f"ada/{release.version}/report.html")
    (folder / "report.html").write_text("other")
    with pytest.raises(DamagedError, match="report.html"):
        publish(folder, target)


def test_an_unreadable_release_file_is_named(folder: Path, target: str) -> None:
    release = publish(folder, target)
    store: Store = open_store(target)
    store.put(f"ada/{release.version}/RELEASE.json", b"{half")
    with pytest.raises(DamagedError, match="RELEASE.json"):
        read_release(store, "ada", release.version)


@pytest.mark.parametrize("missing", ["config.json", "model.safetensors", "tokenizer_config.json", "tokenizer.json", "chat_template.jinja"])
def test_a_folder_that_does_not_stand_alone_is_refused(folder: Path, target: str, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(DataError, match="cannot be published: it has no"):
        publish(folder, target)
    assert contents(target) == {}


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("adapter_config.json", '{"base_model_name_or_path": "/scratch/user1/run42/base"}'),
        ("config.json", '{"deep": [{"_name_or_path": "C:\\\\Users\\\\me\\\\base"}]}'),
        ("config.json", '{"x": "file:///x"}'),
        ("README.md", "trained from /home/me/base, see"),
    ],
)
def test_a_local_path_is_never_published(folder: Path, target: str, name: str, body: str) -> None:
    (folder / name).write_text(body)
    with pytest.raises(DataError, match=f"{name} holds the local path"):
        publish(folder, target)
    assert contents(target) == {}


def test_public_names_and_urls_are_no_local_paths(folder: Path, target: str) -> None:
    (folder / "config.json").write_text('{"_name_or_path": "org/name", "token": "/think", "slash": "/"}')
    (folder / "README.md").write_text("see https://host/home/page and hf://org/name, either/or, 1/2")
    publish(folder, target)


def test_wrong_calls_are_refused(folder: Path, target: str) -> None:
    with pytest.raises(ConfigError, match="time zone"):
        publish(folder, target, datetime(2026, 1, 1))
    with pytest.raises(DataError, match="volatile files other.html"):
        publish_folder(folder, target=target, name="ada", created=NOON, artifacts={}, volatile=["other.html"])
    (folder / "RELEASE.json").write_text("{}")
    with pytest.raises(DataError, match="RELEASE.json"):
        publish(folder, target)
