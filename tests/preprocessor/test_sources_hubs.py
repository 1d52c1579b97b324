"""Datasets of the two hubs: pinned, verified, chosen by subset and split, and read by our own readers."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.hub_server import FakeHubs, running_hubs
from tests.preprocessor.source_files import as_json, as_jsonl, as_parquet
from twinkle_core.config import SourceConfig
from twinkle_core.errors import ConfigError, DamagedError, DataError, StorageError
from twinkle_core.preprocessor.sources import HubSource, open_source
from twinkle_core.preprocessor.sources import hubs as hubs_module
from twinkle_core.preprocessor.sources.hubs import HubAddress
from twinkle_core.preprocessor.sources.huggingface import HuggingFaceHub
from twinkle_core.preprocessor.sources.modelscope import ModelScopeHub

ROWS = [{"id": 10**30, "t": "one"}, {"id": 2**64, "t": "two", "extra": None}]
TOOLS = [{"tools": [{"name": "add", "x": {"type": "int"}}]}, {"tools": [{"name": "pick", "colour": {"type": "string"}}]}]
CARD = b"""---
configs:
- config_name: chats
  default: true
  data_files:
  - split: train
    path: [one/b.jsonl.gz, one/a.json]
  - split: test
    path: one/t.jsonl
- config_name: tools
  data_files: two/*.parquet
---
# A dataset
"""
FILES = {
    "README.md": CARD,
    "one/a.json": as_json(ROWS),
    "one/b.jsonl.gz": gzip.compress(as_jsonl(ROWS[:1]), mtime=0),
    "one/t.jsonl": b'{"t": "held"}',
    "two/0.parquet": as_parquet(pa.Table.from_pylist(TOOLS)),
    "data.py": b"raise SystemExit",
    "dataset_infos.json": b"{}",
    "LICENSE": b"terms",
}
CHATS, TOOL_ROWS, HELD = [ROWS[0], *ROWS], TOOLS, [{"t": "held"}]


@pytest.fixture
def hubs(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHubs]:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)  # the hub is on loopback
    with running_hubs() as running:
        yield running


@pytest.fixture(params=["hf", "ms"])
def scheme(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def hub_source(hubs: FakeHubs, uri: str, cache: Path | None, endpoint: str | None = None) -> HubSource:
    address = HubAddress.parse("s", uri)
    kind = HuggingFaceHub if address.scheme == "hf" else ModelScopeHub
    return HubSource("s", address, kind(endpoint=endpoint or hubs.endpoint), cache)


def rows(source: HubSource) -> list[dict[str, Any]]:
    return [row for _, row in source.rows()]


def test_subset_and_split_choose_the_files_and_the_values_are_exact(hubs: FakeHubs, scheme: str, tmp_path: Path) -> None:
    sha = hubs.commit("org/name", FILES)
    base = f"{scheme}://org/name@{sha}"
    chats = hub_source(hubs, base, tmp_path)
    assert json.dumps(rows(chats)) == json.dumps(CHATS)
    assert [str(place) for place, _ in chats.rows()] == ["one/b.jsonl.gz, line 1", "one/a.json, row 1", "one/a.json, row 2"]
    assert sorted(set(hubs.fetched)) == ["README.md", "one/a.json", "one/b.jsonl.gz"]  # no other split, no script
    assert rows(hub_source(hubs, f"{base}?subset=chats&split=test", tmp_path)) == HELD
    assert rows(hub_source(hubs, f"{base}?subset=tools", tmp_path)) == TOOL_ROWS


def test_without_a_card_the_names_tell_the_splits(hubs: FakeHubs, scheme: str, tmp_path: Path) -> None:
    files = {f"data/{split}-0000{part}-of-00002.jsonl": b'{"s": "%s", "n": %d}' % (split.encode(), part) for split in ("train", "test")
             for part in (1, 0)}  # fmt: skip
    sha = hubs.commit("org/name", files)
    assert rows(hub_source(hubs, f"{scheme}://org/name@{sha}", tmp_path)) == [{"s": "train", "n": 0}, {"s": "train", "n": 1}]
    assert rows(hub_source(hubs, f"{scheme}://org/name@{sha}?split=test", tmp_path)) == [{"s": "test", "n": 0}, {"s": "test", "n": 1}]


def test_the_digest_is_that_of_the_same_files_in_a_folder(hubs: FakeHubs, scheme: str, tmp_path: Path) -> None:
    sha = hubs.commit("org/name", FILES)
    for name in ("b.jsonl.gz", "a.json"):
        (tmp_path / name).write_bytes(FILES[f"one/{name}"])
    local = open_source(SourceConfig(name="s", uri=(str(tmp_path / "b.jsonl.gz"), str(tmp_path / "a.json"))))
    assert hub_source(hubs, f"{scheme}://org/name@{sha}", tmp_path / "cache").digest() == local.digest()
    other = hubs.commit("org/name", {**FILES, "one/a.json": b'[{"t": "other"}]'})
    assert hub_source(hubs, f"{scheme}://org/name@{other}", tmp_path / "cache").digest() != local.digest()


def test_a_branch_is_looked_up_anew_by_each_source(hubs: FakeHubs, scheme: str, tmp_path: Path) -> None:
    old = hubs.commit("org/name", {"train.jsonl": b'{"v": 1}'})
    first = hub_source(hubs, f"{scheme}://org/name@master", tmp_path)
    assert rows(first) == [{"v": 1}]
    new = hubs.commit("org/name", {"train.jsonl": b'{"v": 2}'})
    assert rows(first) == [{"v": 1}]
    again = hub_source(hubs, f"{scheme}://org/name@master?split=train", tmp_path)
    assert rows(again) == [{"v": 2}]
    assert rows(hub_source(hubs, f"{scheme}://org/name@{old}", tmp_path)) == [{"v": 1}]
    if scheme == "hf":
        assert again.pinned_uri == f"hf://org/name@{new}?split=train"
        assert first.pinned_uri == f"hf://org/name@{old}"


def test_a_commit_that_was_fetched_needs_no_network(hubs: FakeHubs, scheme: str, tmp_path: Path) -> None:
    sha = hubs.commit("org/name", FILES)
    first = rows(hub_source(hubs, f"{scheme}://org/name@{sha}", tmp_path))
    asked = len(hubs.requests)
    assert rows(hub_source(hubs, f"{scheme}://org/name@{sha}", tmp_path)) == first
    assert len(hubs.requests) == asked


@pytest.mark.parametrize("name", ["two/0.parquet", "README.md"])
def test_a_file_that_arrives_damaged_is_fetched_again(hubs: FakeHubs, scheme: str, name: str, tmp_path: Path) -> None:
    sha = hubs.commit("org/name", FILES)
    hubs.damaged[name] = 1
    assert rows(hub_source(hubs, f"{scheme}://org/name@{sha}?subset=tools", tmp_path)) == TOOL_ROWS
    assert hubs.fetched.count(name) == 2


def test_a_file_that_is_always_damaged_is_an_error(hubs: FakeHubs, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import modelscope_hub._download as client

    monkeypatch.setattr(client, "DOWNLOAD_INTEGRITY_RETRY_BACKOFF", 0.01)
    sha = hubs.commit("org/name", FILES)
    hubs.damaged["two/0.parquet"] = 99
    source = hub_source(hubs, f"{scheme}://org/name@{sha}?subset=tools", tmp_path)
    with pytest.raises(DamagedError, match="not what"):
        rows(source)
    hubs.damaged.clear()
    assert rows(source) == TOOL_ROWS


def test_what_is_not_there_is_said_in_one_clear_error(hubs: FakeHubs, scheme: str, tmp_path: Path) -> None:
    sha = hubs.commit("org/name", FILES)
    table = hubs.commit("org/odd", {"README.md": b"---\nconfigs:\n- config_name: a\n  data_files: x.xml\n---\n", "x.xml": b"<a/>"})
    empty = hubs.commit("org/empty", {"README.md": b"# nothing", "name.py": b"raise SystemExit"})
    for uri, message in {
        "org/name@v9": "no (revision 'v9'|dataset org/name at v9)",
        "org/other@main": "no dataset org/other at main",
        f"org/name@{sha}?split=dev": "no split 'dev'; add .?split=NAME with one of train, test",
        f"org/name@{sha}?split=train[:10%25]": "no split",
        f"org/name@{sha}?subset=nope": "nope.*(chats|tools)",
        f"org/odd@{table}": r"x\.xml' is of no known type",
        f"org/empty@{empty}": "data files",
    }.items():
        with pytest.raises(ConfigError, match=message):
            rows(hub_source(hubs, f"{scheme}://{uri}", tmp_path))


def test_a_json_file_of_one_object_a_line_is_read_since_nobody_can_rename_it(hubs: FakeHubs, scheme: str, tmp_path: Path) -> None:
    sha = hubs.commit("org/name", {"train.json": b'{"a": 1}\n{"a": 100000000000000000000}\n{"a": NaN}\n'})
    source = hub_source(hubs, f"{scheme}://org/name@{sha}", tmp_path)
    refused: list[str] = []
    assert [row for _, row in source.rows(lambda place, reason: refused.append(str(place)))] == [{"a": 1}, {"a": 10**20}]
    assert refused == ["train.json, line 3"]
    with pytest.raises(DataError, match=r"source 's', train\.json, line 3: not valid JSON: NaN"):
        rows(source)


def test_a_hub_that_cannot_be_reached_is_a_storage_error(hubs: FakeHubs, tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="cannot fetch dataset org/name"):
        rows(hub_source(hubs, "hf://org/name@main", tmp_path, endpoint="http://127.0.0.1:9"))


def test_the_file_names_of_a_repository_cannot_leave_the_folder(hubs: FakeHubs, scheme: str, tmp_path: Path) -> None:
    sha = hubs.commit("org/name", {"../../train.jsonl": b'{"a": 1}', "train.jsonl": b'{"a": 1}'})
    with pytest.raises(ConfigError, match="name is refused"):
        rows(hub_source(hubs, f"{scheme}://org/name@{sha}", tmp_path))


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("{}://org/name", r"has no revision.*write {}://org/name@REVISION"),
        ("{}://org/name@", "has no revision"),
        ("{}://name@main", "names no dataset"),
        ("{}://../x@main", "names no dataset"),
        ("{}://org/name@main?splits=train", "subset and split"),
        ("{}://org/name@main?split=", "subset and split"),
        ("{}://org/name@main?split=a&split=b", "subset and split"),
    ],
)
def test_an_address_without_a_revision_or_with_unknown_parts_is_refused_at_once(uri: str, message: str, scheme: str) -> None:
    with pytest.raises(ConfigError, match=message.format(scheme)):
        open_source(SourceConfig(name="s", uri=uri.format(scheme)))


def test_a_list_holds_no_hub(scheme: str) -> None:
    with pytest.raises(ConfigError, match="not in a list"):
        open_source(SourceConfig(name="s", uri=(f"{scheme}://org/name@main", "a.jsonl")))


def test_a_client_that_is_not_installed_is_named(scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hubs_module, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=rf"{scheme}:// needs datasets and \w+_hub: run `pip install"):
        open_source(SourceConfig(name="s", uri=f"{scheme}://org/name@main"))
