from __future__ import annotations

import enum
import hashlib
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import NotFoundError, StorageError
from storage.fingerprint import canonical_bytes, digest_bytes, digest_file, digest_folder, fingerprint

scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4), max_leaves=12)


def strict(value: Any) -> Any:
    """A value whose Python equality is the equality that we mean: types count, but -0.0 is 0.0 and a tuple is a list."""
    if isinstance(value, dict):
        return ("dict", {key: strict(item) for key, item in value.items()})
    if isinstance(value, (list, tuple)):
        return ("list", [strict(item) for item in value])
    return (type(value).__name__, value)


def reordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(value)}
    return [reordered(item) for item in value] if isinstance(value, list) else value


@given(values, values)
def test_bytes_are_equal_exactly_when_values_are(left: Any, right: Any) -> None:
    assert (canonical_bytes(left) == canonical_bytes(right)) == (strict(left) == strict(right))


@given(values)
def test_order_of_keys_and_kind_of_sequence_do_not_count(value: Any) -> None:
    assert canonical_bytes(reordered(value)) == canonical_bytes(value)
    assert canonical_bytes((value, value)) == canonical_bytes([value, value])


@given(values)
def test_the_bytes_are_json_of_the_value(value: Any) -> None:
    assert strict(json.loads(canonical_bytes(value))) == strict(value)
    assert canonical_bytes(json.loads(canonical_bytes(value))) == canonical_bytes(value)


def test_one_and_its_likes_are_distinct_and_stated() -> None:
    likes = [1, 1.0, True, "1", [1], {"1": 1}, None, 0, 0.0, False, "", [], {}]
    assert len({canonical_bytes(value) for value in likes}) == len(likes)
    assert canonical_bytes(-0.0) == canonical_bytes(0.0) == b"0.0"
    assert canonical_bytes("é") != canonical_bytes("e\u0301")  # no normalisation


def test_a_known_value_keeps_its_bytes_for_ever() -> None:
    value = {"b": [1, 2.5, True, None], "a": {"ü": 'x"\n'}}
    assert canonical_bytes(value) == '{"a":{"ü":"x\\"\\n"},"b":[1,2.5,true,null]}'.encode()
    assert fingerprint(value) == hashlib.sha256(canonical_bytes(value)).hexdigest()


class Kind(enum.StrEnum):
    A = "a"


class Number(float):
    pass


@pytest.mark.parametrize(
    "bad",
    [
        lambda: 1,
        object(),
        {1, 2},
        b"x",
        Path("x"),
        float("nan"),
        float("inf"),
        Kind.A,
        Number(1),
        {1: 2},
        {None: 1},
        "\ud83d\ude00",
        10**5000,
    ]
    + [{"\ud800": 1}, int],
    ids=lambda bad: type(bad).__name__,
)
def test_what_has_no_canonical_form_is_refused_by_its_path(bad: Any) -> None:
    with pytest.raises(TypeError) as caught:
        canonical_bytes({"outer": [0, {"inner": bad}]})
    assert "value['outer'][1]['inner']" in str(caught.value)


def test_a_value_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(TypeError, match="nested deeper"):
        canonical_bytes(loop)


def test_a_file_has_the_digest_of_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc" * 1_000_000)
    assert digest_file(path) == digest_bytes(b"abc" * 1_000_000)
    assert digest_bytes(b"abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    with pytest.raises(NotFoundError, match="missing"):
        digest_file(tmp_path / "missing")


def make(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def test_a_folder_has_the_digest_of_its_names_and_contents(tmp_path: Path) -> None:
    files = {"a": "1", "b/c": "2"}
    whole = digest_folder(make(tmp_path / "one", files))
    assert digest_folder(make(tmp_path / "two", dict(reversed(files.items())))) == whole
    for other in ({"a": "2", "b/c": "1"}, {"a": "1", "b/d": "2"}, {"a": "1"}, {**files, "e": ""}):
        assert digest_folder(make(tmp_path / str(other), other)) != whole
    make(tmp_path / "two", {"extra": "3"})
    assert digest_folder(tmp_path / "two", names=["b/c", "a"]) == whole


def test_links_to_files_count_as_files_and_links_to_folders_are_refused(tmp_path: Path) -> None:
    make(tmp_path, {"blob": "1", "plain/a": "1"})
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "a").symlink_to(tmp_path / "blob")
    assert digest_folder(tmp_path / "linked") == digest_folder(tmp_path / "plain")
    (tmp_path / "linked" / "sub").symlink_to(tmp_path / "plain")
    with pytest.raises(StorageError, match="link to a folder"):
        digest_folder(tmp_path / "linked")
    with pytest.raises(NotFoundError):
        digest_folder(tmp_path / "missing")
