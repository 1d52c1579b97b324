import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from twinkle_core.infra import guardian

ROOT = """
import signal, subprocess, sys
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(["sleep", "60"])
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"])
    yield process
    process.kill()
    process.wait()


def start_time(pid: int) -> int:
    stat = guardian.read_stat(pid)
    assert stat is not None
    return stat[1]


def test_a_pid_that_was_given_to_another_process_is_left_alone(sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guardian, "GRACE_SECONDS", 0.2)
    started = start_time(sleeper.pid)
    guardian.end({sleeper.pid: started - 1})
    assert sleeper.poll() is None
    guardian.end({sleeper.pid: started})
    assert sleeper.wait(5) == -signal.SIGTERM


def test_a_process_that_ignores_the_request_is_killed_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guardian, "GRACE_SECONDS", 0.2)
    (tmp_path / "root.py").write_text(ROOT)
    root = subprocess.Popen([sys.executable, "-u", str(tmp_path / "root.py")], stdout=subprocess.PIPE, text=True)
    assert root.stdout is not None
    child = int(root.stdout.readline())
    started = start_time(child)
    guardian.end({root.pid: start_time(root.pid)})
    assert root.wait(5) == -signal.SIGKILL
    deadline = time.monotonic() + 5
    while guardian.is_alive(child, started):  # it ignores the request too: what is ignored stays so in a child
        assert time.monotonic() < deadline
        time.sleep(0.02)
    root.stdout.close()


def test_only_children_that_run_from_the_folder_are_noted_and_none_after_the_word(
    sleeper: subprocess.Popen[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "root.py").write_text(ROOT)
    root = subprocess.Popen([sys.executable, "-u", str(tmp_path / "root.py")], stdout=subprocess.PIPE, text=True)
    assert root.stdout is not None
    child = int(root.stdout.readline())
    read, write = os.pipe()
    rounds: list[float] = []

    def select_once(reads: list[int], writes: list[int], others: list[int], seconds: float) -> tuple[list[int], list[int], list[int]]:
        rounds.append(seconds)
        return reads if len(rounds) == word_at else [], [], []

    monkeypatch.setattr(guardian.select, "select", select_once)
    word_at = 2  # said while it waits: what it noted before counts
    assert set(guardian.watch(os.getpid(), str(tmp_path), read)) == {root.pid, child}
    rounds.clear()
    word_at = 1  # said while it looks: what it finds may be the next Ray
    assert guardian.watch(os.getpid(), str(tmp_path), read) == {}
    for pid in (root.pid, child):
        os.kill(pid, signal.SIGKILL)
    root.wait()
    root.stdout.close()
    os.close(read)
    os.close(write)


def test_the_end_of_the_driver_is_seen_though_another_process_holds_the_pipe(sleeper: subprocess.Popen[bytes]) -> None:
    read, write = os.pipe()
    sleeper.kill()
    began = time.monotonic()
    assert guardian.watch(sleeper.pid, "/nowhere", read) == {}
    assert time.monotonic() - began < 5
    os.close(read)
    os.close(write)


def test_the_guardian_imports_only_the_standard_library() -> None:
    paths = "[str(getattr(module, '__file__', '')) for module in sys.modules.values()]"
    code = f"import runpy, sys; runpy.run_path({guardian.__file__!r}); print(*{paths}, *sys.modules)"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True)
    assert "select" in done.stdout.split() and "site-packages" not in done.stdout and "twinkle_core" not in done.stdout.split()


@pytest.mark.slow
def test_the_notice_about_tokens_is_quiet_and_errors_show(caplog: pytest.LogCaptureFixture) -> None:
    from twinkle_core.infra.local_ray import NOTICES, quiet_notices

    logger = logging.getLogger(NOTICES)
    ray_logger = logging.getLogger("ray")
    ray_logger.addHandler(caplog.handler)
    with quiet_notices():
        logger.warning("tokens are on")
        logger.error("no token")
        logging.getLogger("ray._private.node").warning("disk is full")
    logger.warning("afterwards")
    ray_logger.removeHandler(caplog.handler)
    assert {record.message for record in caplog.records} == {"no token", "disk is full", "afterwards"}
