"""Which files an address means, locally and in stores: lists, folders, globs, and names that only look like globs."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from storage.store import open_store
from tests.servers import create_bucket, s3_server
from twinkle_core.config import SourceConfig
from twinkle_core.errors import ConfigError, DataError, StorageError
from twinkle_core.preprocessor.sources import open_source

NAMES = ["b.jsonl", "a.jsonl", "sub/c.jsonl", "sub/deep/d.jsonl", "[x]/e.jsonl", "x/f.jsonl", "star*/g.jsonl", "[a].jsonl", "café q.jsonl"]


@pytest.fixture(scope="module")
def s3_environment() -> Iterator[dict[str, str]]:
    with s3_server() as environment:
        create_bucket(environment, "rows")
        yield environment


@pytest.fixture(params=["local", "memory", pytest.param("s3", marks=pytest.mark.slow)])
def top(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A place that holds NAMES, each with one row that says its name; documents and hidden files beside them."""
    if request.param == "local":
        url = str(tmp_path / "rows")
    elif request.param == "memory":
        url = f"memory://places-{os.path.basename(tmp_path)}/rows"
    else:
        for variable, value in request.getfixturevalue("s3_environment").items():
            monkeypatch.setenv(variable, value)
        url = f"s3://rows/{os.path.basename(tmp_path)}"
    store = open_store(url)
    for name in NAMES:
        store.put(name, json.dumps({"name": name}).encode())
    for name in ("README.md", "LICENSE", ".hidden.jsonl", "_SUCCESS", "sub/.cache/z.jsonl"):
        store.put(name, b"not for reading")
    return url


def names(*uris: str) -> list[str]:
    """What the rows say, in order, after a look that their places say it too."""
    found = list(open_source(SourceConfig(name="s", uri=uris[0] if len(uris) == 1 else uris)).rows())
    assert all(row["name"].endswith(place.file or "") for place, row in found)
    return [row["name"] for _, row in found]


def test_a_folder_gives_all_files_below_it_by_name_without_documents_and_hidden_ones(top: str) -> None:
    assert names(top) == names(f"{top}/") == sorted(NAMES)
    assert names(f"{top}/sub") == ["sub/c.jsonl", "sub/deep/d.jsonl"]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.jsonl", ["[a].jsonl", "a.jsonl", "b.jsonl", "café q.jsonl"]),
        ("?.jsonl", ["a.jsonl", "b.jsonl"]),
        ("[bz].jsonl", ["b.jsonl"]),
        ("[!b].jsonl", ["a.jsonl"]),
        ("**/*.jsonl", sorted(NAMES)),
        ("sub/**", ["sub/c.jsonl", "sub/deep/d.jsonl"]),
        ("**/deep/*", ["sub/deep/d.jsonl"]),
        ("*/?.jsonl", ["[x]/e.jsonl", "star*/g.jsonl", "sub/c.jsonl", "x/f.jsonl"]),
        ("s*/*.jsonl", ["star*/g.jsonl", "sub/c.jsonl"]),
        ("café*.jsonl", ["café q.jsonl"]),
    ],
)
def test_a_glob_matches_within_the_parts_of_a_path(top: str, pattern: str, expected: list[str]) -> None:
    assert names(f"{top}/{pattern}") == expected


@pytest.mark.parametrize(("name", "expected"), [("[a].jsonl", ["[a].jsonl"]), ("[x]", ["[x]/e.jsonl"]), ("[x]/*.jsonl", ["[x]/e.jsonl"]),
                                                ("star*/*", ["star*/g.jsonl"]), ("star*", ["star*/g.jsonl"])])  # fmt: skip
def test_a_name_that_exists_is_no_pattern(top: str, name: str, expected: list[str]) -> None:
    assert names(f"{top}/{name}") == expected


def test_the_same_holds_for_each_part_behind_a_pattern(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    for name in ("one/[q].jsonl", "one/q.jsonl", "two/q.jsonl", ".kept/q.jsonl"):
        store.put(name, json.dumps({"name": name}).encode())
    assert names(f"{tmp_path}/*/[q].jsonl") == ["one/[q].jsonl", "two/q.jsonl"]
    assert names(f"{tmp_path}/.kept/[q].jsonl") == [".kept/q.jsonl"]


def test_a_list_is_read_in_its_own_order_and_files_of_one_name_are_told_apart(top: str) -> None:
    assert names(f"{top}/b.jsonl", f"{top}/sub", f"{top}/a.jsonl") == ["b.jsonl", "sub/c.jsonl", "sub/deep/d.jsonl", "a.jsonl"]
    twice = open_source(SourceConfig(name="s", uri=(f"{top}/a.jsonl", f"{top}/a.jsonl")))
    assert [str(place) for place, _ in twice.rows()] == ["a.jsonl (1), line 1", "a.jsonl (2), line 1"]


@pytest.mark.parametrize("name", ["none.jsonl", "none/", "none*.jsonl", "a.jsonl/b.jsonl", "[z].jsonl"])
def test_what_is_not_there_is_named(top: str, name: str) -> None:
    with pytest.raises(DataError, match=r"source 's': (there is no file and no folder|no data file in) .*(none|a\.jsonl|\[z\])"):
        names(f"{top}/{name}")


def test_a_file_of_unknown_type_is_named_and_not_passed_over(top: str) -> None:
    open_store(top).put("sub/table.xlsx", b"")
    with pytest.raises(ConfigError, match=r"holds sub/table\.xlsx"):
        names(top)
    with pytest.raises(ConfigError, match=r"table\.xlsx' is of no known type; known are \.jsonl"):
        names(f"{top}/sub/table.xlsx")
    assert names(f"{top}/**/*.jsonl") == sorted(NAMES)


def test_an_empty_file_is_fine_beside_others_and_no_file_is_left_open(top: str) -> None:
    open_store(top).put("sub/0.jsonl", b"")
    assert names(f"{top}/sub") == ["sub/c.jsonl", "sub/deep/d.jsonl"]
    with pytest.raises(DataError, match=r"no rows in 0\.jsonl"):
        names(f"{top}/sub/0.jsonl")


def test_a_file_that_grows_or_comes_after_the_digest_changes_that_of_a_source_opened_again(top: str) -> None:
    def digest() -> str:
        return open_source(SourceConfig(name="s", uri=top)).digest()

    first = digest()
    assert first == digest()
    open_store(top).put("a.jsonl", b'{"name": "other"}')
    second = digest()
    open_store(top).put("z.jsonl", b'{"name": "late"}')
    assert len({first, second, digest()}) == 3


def test_a_link_to_a_folder_is_refused_since_it_may_hold_itself(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}")
    (tmp_path / "loop").symlink_to(tmp_path)
    for uri in (tmp_path, tmp_path / "**" / "*.jsonl"):
        with pytest.raises(DataError, match="loop is a link to a folder"):
            names(str(uri))


@pytest.mark.parametrize("pattern", ["", "/*.jsonl", "/**", "/?.*"])
def test_a_link_to_nothing_and_a_pipe_are_refused_not_passed_over(pattern: str, tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_bytes(b'{"name": "a.jsonl"}')
    (tmp_path / ".#a.jsonl").symlink_to("nobody@nowhere")  # an editor's lock: hidden, so no data
    assert names(f"{tmp_path}{pattern}") == ["a.jsonl"]
    (tmp_path / "b.jsonl").symlink_to(tmp_path / "gone")
    with pytest.raises(DataError, match="source 's': b.jsonl in .* is no file"):
        names(f"{tmp_path}{pattern}")
    (tmp_path / "b.jsonl").unlink()
    os.mkfifo(tmp_path / "c.jsonl")
    with pytest.raises(DataError, match="source 's': c.jsonl in .* is no file"):
        names(f"{tmp_path}{pattern}")


def test_a_path_may_be_relative_and_a_file_a_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text('{"name": "b.jsonl"}')
    (tmp_path / "b.jsonl").symlink_to("a.jsonl")
    monkeypatch.chdir(tmp_path)
    above = f"../{tmp_path.name}"
    assert names("b.jsonl") == names("b*") == names("./b.jsonl") == names(f"{above}/b.jsonl") == names(f"{above}/b*") == ["b.jsonl"]
    (tmp_path / "a.jsonl").write_text('{"name": "a.jsonl"}')
    (tmp_path / "b.jsonl").unlink()
    assert names(".") == names("*.jsonl") == ["a.jsonl"]


@pytest.mark.slow
def test_a_glob_in_a_bucket_lists_no_more_than_its_folder(s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in s3_environment.items():
        monkeypatch.setenv(variable, value)
    store = open_store("s3://rows")
    store.put("listing/[exp-1]/a.jsonl", b'{"name": "a.jsonl"}')
    listed: list[str] = []
    real = type(store).list

    def listing(self: Any, prefix: str = "") -> Any:
        listed.append(prefix)
        return real(self, prefix)

    monkeypatch.setattr(type(store), "list", listing)
    assert names("s3://rows/listing/[exp-1]/*.jsonl") == ["a.jsonl"]
    assert names("s3://rows/listing/[exp-1]/a.jsonl") == ["a.jsonl"]
    assert listed and all(prefix.startswith("listing/[exp-1]") for prefix in listed)


@pytest.mark.slow
def test_only_the_endpoint_of_the_settings_is_asked(s3_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    real = socket.getaddrinfo

    def resolve(host: Any, *rest: Any, **named: Any) -> Any:
        asked.append(host)
        return real(host, *rest, **named)

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    for variable, value in s3_environment.items():
        monkeypatch.setenv(variable, value)
    open_store("s3://rows").put("endpoint/a.jsonl", b'{"name": "a.jsonl"}')
    for uri in ("s3://rows/endpoint", "s3://rows/endpoint/*.jsonl", "s3://rows/endpoint/a.jsonl"):
        assert names(uri) == ["a.jsonl"]
        open_source(SourceConfig(name="s", uri=uri)).digest()
    assert set(asked) == {"127.0.0.1"}
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StorageError, match="s3://rows"):
        names("s3://rows/endpoint/a.jsonl")
