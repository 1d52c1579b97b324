"""Scratch folders: gone at the end, those of the dead swept by the next, those of the living left alone."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from storage.scratch import PREFIX, scratch_folder

HOLDER = """
import sys
from storage.scratch import scratch_folder
with scratch_folder() as folder:
    (folder / "weights").write_bytes(b"w" * 1000)
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", None)
    return tmp_path


def holder() -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen([sys.executable, "-c", HOLDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def test_what_a_killed_process_left_goes_with_the_next_and_a_live_ones_stays(temporary: Path) -> None:
    dead, left = holder()
    live, held = holder()
    try:
        os.kill(dead.pid, signal.SIGKILL)
        dead.wait()
        assert (left / "weights").exists(), "a killed process removes nothing"
        with scratch_folder() as folder:
            assert list(folder.iterdir()) == []
            assert not left.parent.exists()
            assert (held / "weights").exists()
    finally:
        live.communicate()
    assert live.returncode == 0 and list(temporary.iterdir()) == []


def test_an_error_inside_leaves_nothing(temporary: Path) -> None:
    with pytest.raises(FileNotFoundError), scratch_folder() as folder:
        (folder / "nowhere" / "weights").write_text("w")
    assert list(temporary.iterdir()) == []


def test_a_folder_without_a_lock_is_somebody_elses(temporary: Path) -> None:
    other = temporary / f"{PREFIX}of-another-kind"
    other.mkdir()
    with scratch_folder():
        assert other.is_dir()
