import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from twinkle_core.errors import ConfigError, DataError, TrainingError, WorkerLostError
from twinkle_core.infra import guardian
from twinkle_core.infra.ray_group import RayGroup

pytestmark = pytest.mark.slow
ECHO = "tests.infra.workers:Echo"


@pytest.fixture(scope="module")
def local_ray() -> Iterator[None]:
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000)
    yield
    ray.shutdown()


def await_free_cpus(wanted: float) -> None:
    deadline = time.monotonic() + 15
    while ray.available_resources().get("CPU", 0.0) != wanted:
        assert time.monotonic() < deadline, f"CPUs free: {ray.available_resources().get('CPU', 0.0)}, wanted {wanted}"
        time.sleep(0.1)


def num_placement_groups() -> int:
    return sum(entry["state"] != "REMOVED" for entry in ray.util.placement_group_table().values())


def kill_when(started: Path, pid: int) -> None:
    deadline = time.monotonic() + 30
    while not started.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(0.3)
    os.kill(pid, signal.SIGKILL)


def test_two_actors_share_out_reduce_and_keep_the_type_of_an_error(local_ray: None):
    with RayGroup(ECHO, workers=2) as group:
        assert ray.available_resources().get("CPU", 0.0) == 0.0
        assert len(set(group.process_ids()) | {os.getpid()}) == 3
        assert group.call("items", list(range(5)), dispatch="round_robin") == [[0, 2, 4], [1, 3]]
        assert group.call("items", list(range(5)), dispatch="slice", collect="flatten") == list(range(5))
        assert group.call("total", 1.5) == [4.5, 4.5]
        assert group.call("threads") == [(1, "1"), (1, "1")]
        with pytest.raises(DataError, match="row 3 of file x is bad") as raised:
            group.call("fail", 1)
        assert type(raised.value) is DataError and "worker 1 in 'fail'" in raised.value.__notes__[0]
        with pytest.raises(TrainingError, match="worker 1 raised DataError"):
            group.call("ranks")
    assert num_placement_groups() == 0
    await_free_cpus(2.0)


@pytest.mark.parametrize(
    ("method", "busy"), [("wait_on", 0), ("reduce_without", 1)], ids=["killed while the other works", "killed inside a reduction"]
)
def test_a_killed_actor_is_seen_within_seconds_and_everything_is_given_back(local_ray: None, tmp_path: Path, method: str, busy: int):
    group = RayGroup(ECHO, workers=2)
    started = tmp_path / "started"
    killer = threading.Thread(target=kill_when, args=(started, group.process_ids()[1]))
    killer.start()
    began = time.monotonic()
    with pytest.raises(WorkerLostError, match=f"worker 1 of 2 died during '{method}'"):
        group.call(method, busy, str(started))
    assert time.monotonic() - began < 10 and started.exists()
    killer.join()
    assert num_placement_groups() == 0
    await_free_cpus(2.0)
    with pytest.raises(WorkerLostError, match="worker 1"):
        group.call("ranks")


def test_a_group_that_does_not_fit_says_what_is_needed_and_free(local_ray: None):
    with pytest.raises(ConfigError, match=r"CPU: 3 needed \(3 x 1\), 2 free of 2"):
        RayGroup(ECHO, workers=3, placement_timeout_seconds=0.5)
    with pytest.raises(ConfigError, match=r"GPU: 1 needed \(1 x 1\), 0 free of 0"):
        RayGroup(ECHO, gpus_per_worker=1, placement_timeout_seconds=0.5)
    assert num_placement_groups() == 0 and ray.is_initialized()
    await_free_cpus(2.0)


DRIVER = """
import subprocess, sys, time
from twinkle_core.infra import guardian
from twinkle_core.infra.ray_group import RayGroup
bystander = subprocess.Popen(["sleep", "100"], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
group = RayGroup("tests.infra.workers:Echo", workers=1)
print(bystander.pid, *group.process_ids(), flush=True)
if sys.argv[1] == "shutdown":
    sys.stdin.readline()
    group.shutdown()
    time.sleep(60)
group.call("wait_on", 0, sys.argv[2])
"""
GUARDIAN = "infra/guardian.py"


def ray_of(driver: int, bystander: int) -> dict[int, tuple[int, str]]:
    """pid -> (start time, command line) of all that the driver started but the bystander, and of its guardian."""
    tree = guardian.find_tree({}, lambda pid, parent: parent == driver and pid != bystander)
    found = {pid: (start, command_line(pid)) for pid, start in tree.items()}
    watching = {pid: command_line(pid) for pid in guardian.all_processes()}
    mine = [pid for pid, line in watching.items() if f"{GUARDIAN} {driver} " in line]
    return found | {pid: (guardian.all_processes()[pid][1], watching[pid]) for pid in mine}


def command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().replace("\0", " ")
    except OSError:
        return ""


@pytest.mark.parametrize("ending", ["kill", "terminate", "shutdown"])
def test_nothing_of_a_local_ray_outlives_its_driver_or_its_group(tmp_path: Path, ending: str):
    started = tmp_path / "started"
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, ending, str(started)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
        env={name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"},  # a Ray started here sets it
    )
    assert driver.stdin is not None and driver.stdout is not None and driver.stderr is not None
    bystander, worker = map(int, driver.stdout.readline().split())
    deadline = time.monotonic() + 30
    while ending != "shutdown" and not started.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert Path(f"/proc/{worker}/stat").read_text().rsplit(")", 1)[1].split()[16] == "0", "field 19 is the niceness"
    before = ray_of(driver.pid, bystander)
    lines = [line for _, line in before.values()]
    for part in ("/gcs_server", "/raylet", "ray::DashboardAgent", "ray::RuntimeEnvAgent", "ray::WorkerHost", GUARDIAN):
        assert any(part in line for line in lines), part
    assert not any("ray::IDLE" in line for line in lines)
    if ending == "shutdown":
        driver.stdin.write("go\n")
        driver.stdin.flush()
    else:
        driver.send_signal(signal.SIGKILL if ending == "kill" else signal.SIGTERM)
    deadline = time.monotonic() + 15
    while left := [line for pid, (start, line) in before.items() if guardian.is_alive(pid, start)]:
        assert time.monotonic() < deadline, f"still there: {left}"
        time.sleep(0.2)
    assert (driver.poll() is None) == (ending == "shutdown")
    assert guardian.read_stat(bystander) is not None
    os.kill(bystander, signal.SIGKILL)
    driver.kill()
    assert driver.communicate()[1] == "" or ending == "terminate"
