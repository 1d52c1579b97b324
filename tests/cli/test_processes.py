import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from twinkle_cli import processes
from twinkle_cli.processes import ProcessId

FAMILY = """
import subprocess, sys, time
deaf = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(600)"
child = subprocess.Popen([sys.executable, '-c', deaf], stdout=subprocess.PIPE)
child.stdout.readline()
apart = subprocess.Popen([sys.executable, '-c', deaf], start_new_session=True, stdout=subprocess.PIPE)
apart.stdout.readline()
print('ready', flush=True)
time.sleep(600)
"""


def start_family(tmp_path: Path) -> ProcessId:
    log = tmp_path / "log"
    leader = processes.start([sys.executable, "-c", FAMILY], os.environ, log, tmp_path)
    deadline = time.monotonic() + 30
    while "ready" not in log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return leader


def test_stop_ends_the_whole_family_even_members_that_ignore_the_signal_or_left_the_group(tmp_path: Path) -> None:
    leader = start_family(tmp_path)
    members = processes.tree(leader.pid)
    assert len(members) == 3
    assert processes.stop(leader, grace_seconds=1)
    assert [member for member in members if member.alive()] == []
    assert not processes.stop(leader)


def test_a_number_that_was_given_out_again_is_never_hit(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True) as bystander:
        try:
            identity = processes.identify(bystander.pid)
            assert identity is not None
            for stale in (replace(identity, start_ticks=identity.start_ticks - 1), replace(identity, boot_id="another boot")):
                assert not stale.alive()
                assert not processes.stop(stale)
                processes._signal(stale, signal.SIGKILL)
            with pytest.raises(subprocess.TimeoutExpired):
                bystander.wait(0.3)
        finally:
            bystander.kill()


def test_a_command_that_ends_at_once_is_not_alive(tmp_path: Path) -> None:
    process = processes.start(["true"], os.environ, tmp_path / "log", tmp_path)
    deadline = time.monotonic() + 10
    while process.alive():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert not processes.stop(process)


@pytest.mark.parametrize("pid", [2**22 + 5, 0])
def test_no_process_has_such_a_number(pid: int) -> None:
    assert processes.identify(pid) is None
