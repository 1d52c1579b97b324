import json
from pathlib import Path

import pytest

from tests.architecture.stage_versions import FILE, Found, declared, digest, problems, updated

STAGES = {"preprocess", "encode", "pack", "shard", "train", "export", "evaluate", "publish"}
A, B = "a" * 64, "b" * 64


def record(version: int, sha256: str, *reasons: str) -> dict:
    return {"pack": {"version": version, "sha256": sha256, "same_output": list(reasons)}}


def now(version: int, sha256: str) -> dict[str, Found]:
    return {"pack": Found(version=version, sha256=sha256)}


def test_no_stage_changed_without_a_new_version_or_a_reason() -> None:
    found = declared()
    assert found.keys() >= STAGES
    assert problems(found, json.loads(FILE.read_text())) == []


def test_changed_code_under_an_old_version_is_a_problem() -> None:
    assert problems(now(1, A), record(1, A)) == []
    assert "changed code under version 1" in problems(now(1, B), record(1, A))[0]
    assert "new version 2" in problems(now(2, B), record(1, A))[0]
    assert "went back" in problems(now(1, A), record(2, A))[0]
    assert "is new" in problems(now(1, A), {})[0]
    assert "no longer declared" in problems({}, record(1, A))[0]


def test_a_change_is_recorded_with_a_version_or_a_reason_only() -> None:
    with pytest.raises(ValueError, match="changed code") as caught:
        updated({**now(1, B), "shard": Found(version=1, sha256=A)}, {**record(1, A), "shard": record(1, A)["pack"]}, None)
    assert "shard" not in str(caught.value)
    assert updated(now(1, B), record(1, A, "renamed"), "typo in a comment") == record(1, B, "renamed", "typo in a comment")
    assert updated(now(2, B), record(1, A, "renamed"), None) == record(2, B)
    with pytest.raises(ValueError, match="went back"):
        updated(now(1, A), record(2, A), "really")


def test_stages_are_read_from_the_task_files_and_their_modules_hashed(tmp_path: Path) -> None:
    (tmp_path / "tasks").mkdir()
    (tmp_path / "lib" / "inner").mkdir(parents=True)
    (tmp_path / "tasks" / "pack.py").write_text("STAGE = Stage(name='pack', version=3, modules=('lib',))\n")
    (tmp_path / "lib" / "inner" / "a.py").write_text("x = 1\n")
    before = declared(tmp_path)
    assert before["pack"].version == 3
    (tmp_path / "lib" / "inner" / "a.py").write_text("x = 2\n")
    assert declared(tmp_path)["pack"].sha256 != before["pack"].sha256
    (tmp_path / "lib" / "inner" / "a.py").write_text("VERSION = 4\n")
    (tmp_path / "tasks" / "pack.py").write_text(
        "from lib.inner.a import VERSION\nMODULES = ('lib',)\nSTAGE = Stage(name='pack', version=VERSION, modules=MODULES)\n"
    )
    assert declared(tmp_path)["pack"] == Found(version=4, sha256=digest(tmp_path, ("lib",)))
    with pytest.raises(FileNotFoundError, match="lib.missing"):
        digest(tmp_path, ("lib.missing",))
