from __future__ import annotations

import os
from pathlib import Path

import pytest

from storage.errors import StorageError
from storage.uri import Location, join, parse, resolve_inside


@pytest.mark.parametrize(
    ("text", "scheme", "root"),
    [
        ("file:///abs/folder", "file", "/abs/folder"),
        ("/abs/folder/", "file", "/abs/folder"),
        ("file:///", "file", "/"),
        ("s3://bucket", "s3", "bucket"),
        ("s3://bucket/a/b/", "s3", "bucket/a/b"),
        ("memory://name", "memory", "name"),
        ("/with%20percent", "file", "/with%20percent"),
    ],
)
def test_a_location_reads_as_written_and_reads_back_from_its_url(text: str, scheme: str, root: str) -> None:
    location = parse(text)
    assert (location.scheme, location.root) == (scheme, root)
    assert parse(location.url) == location


def test_a_plain_relative_path_is_made_absolute() -> None:
    assert parse("rel/path") == Location(scheme="file", root=os.path.join(os.getcwd(), "rel/path"))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "file://",
        "file://host/x",
        "s3://",
        "s3://b",
        "s3://Bucket/x",
        "s3://bucket//x",
        "s3://bucket/../x",
        "memory://",
        "memory://a/../b",
    ]
    + ["gs://bucket/x", "http://host/x", "/a/../b", "../a", "~/store", "file:///a/../b", "a\0b"],
)
def test_a_location_that_is_not_plain_is_refused_by_its_text(text: str) -> None:
    with pytest.raises(StorageError) as caught:
        parse(text)
    assert repr(text) in str(caught.value) or repr(text.partition("://")[2]) in str(caught.value)


def test_join_puts_one_slash_between_parts() -> None:
    assert join("s3://bucket/a/", "b", "c/d") == "s3://bucket/a/b/c/d"
    assert join("", "a", "b") == "a/b"
    assert join("/", "a") == "/a"
    assert join("base") == "base"


@pytest.mark.parametrize("part", ["", "..", "a/..", "/a", "a/", "a//b", "a\\b", ".", "a\0"])
def test_join_refuses_parts_that_are_not_plain(part: str) -> None:
    with pytest.raises(StorageError, match="refused"):
        join("base", "ok", part)


def test_a_path_resolves_inside_its_root_only(tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "in").mkdir(parents=True)
    (tmp_path / "secret").write_text("x")
    (tmp_path / "root-beside").mkdir()
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "up").symlink_to("..")
    (root / "beside").symlink_to(tmp_path / "root-beside")
    (root / "fine").symlink_to("in")
    assert resolve_inside(root, "in/file") == root.resolve() / "in" / "file"
    assert resolve_inside(root, "fine/file") == root.resolve() / "in" / "file"
    for relative in ("link", "up/secret", "beside/file"):
        with pytest.raises(StorageError, match="leaves"):
            resolve_inside(root, relative)
    for relative in ("../secret", "/etc/passwd", "in/../../secret"):
        with pytest.raises(StorageError, match="refused"):
            resolve_inside(root, relative)
