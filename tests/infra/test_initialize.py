"""Local mode, and what `initialize`, `remote_class` and `remote_function` refuse."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.infra.remote_classes import Counter, script
from twinkle_core import DeviceGroup, DeviceMesh, get_device_placement
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.infra import initialize, remote_class, remote_function, resolve_group
from twinkle_core.infra.environment import Torchrun, torchrun
from twinkle_core.infra.placement_drawing import draw_groups

ROOT = Path(__file__).parents[2]
MESH = DeviceMesh.from_sizes(dp_size=2)


def test_local_mode_gives_plain_objects():
    with initialize("local", groups=[DeviceGroup("pair", 2, "CPU"), DeviceGroup("one", 1, "CPU")]):
        assert script("pair", "one") == [[[10, 11], [12, 13], [14, 15]], 3, [1111, 1112, 1113], True]
        assert script(None, None) == script("pair", "one")
        with pytest.raises(ConfigError, match="remote_group is 'pear'; initialize.. was given: pair, one"):
            Counter(1, remote_group="pear")
    assert type(Counter(1)) is Counter and Counter.__name__ == "Counter" and Counter(1).local_only() == 1


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: initialize("http"), "mode is 'http'; known: local, ray"),
        (lambda: initialize("ray"), "'ray' without groups"),
        (lambda: initialize("local", global_device_mesh=MESH), "2 ranks, but 1 process.* torchrun --nproc_per_node=2"),
        (lambda: initialize("ray", groups=[DeviceGroup("a", 16, "GPU", gpus_per_worker=16)]), "16 is more than nproc_per_node 8"),
        (lambda: remote_function(dispatch="slcie"), "dispatch is 'slcie'; known: all, slice"),
        (lambda: remote_function(collect="avg"), "collect is 'avg'; known: none"),
        (lambda: remote_class(execute="some"), "execute is 'some'; known: first, peer, all"),
        (lambda: remote_function(execute=max), "execute is <built-in function max>; known: first, peer, all$"),
        (lambda: remote_function(timeout=0), "timeout is 0"),
        (lambda: resolve_group(None, MESH, "tests.infra.workers:Echo"), "Echo: a device_mesh of 2 ranks, but 1 process"),
    ],
)
def test_wrong_arguments_are_refused(make, message: str):
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_notifier_hears_of_an_error_once_and_a_failing_one_hides_nothing():
    heard: list[str] = []
    with initialize("local", name="nightly", notifier=heard.append):
        with pytest.raises(DataError, match="bad"):
            Counter(0).fail("bad")
    assert heard == ["nightly: Counter.fail raised DataError: bad"]
    with initialize("local", notifier=lambda message: 1 / 0):
        with pytest.raises(DataError, match="bad"):
            Counter(0).fail("bad")
    with pytest.raises(DataError):
        Counter(0).fail("nobody to tell")


def test_a_class_derived_from_a_remote_class_is_one():
    @remote_class(execute="first")
    class Twice(Counter):
        def __init__(self) -> None:
            super().__init__(2)

    assert Twice(remote_group="any").add([1]) == [3]
    with pytest.raises(ConfigError, match="is a remote_class already"):
        remote_class()(Twice)


def test_the_placement_is_drawn():
    mesh = DeviceMesh.from_sizes(pp_size=2, tp_size=2)
    with initialize("local", groups=[DeviceGroup("model", [0, 1, 2, 4], "GPU"), DeviceGroup("data", 2, "CPU")]):
        assert get_device_placement() == (
            "local\n+- group 'model': 4 worker(s) on cuda 0-2, 4\n|  +- (nothing placed)\n"
            "+- group 'data': 2 worker(s) on cpu 0-1\n|  +- (nothing placed)"
        )
    assert draw_groups("ray", [DeviceGroup("model", 4, "GPU")], None, {("model", "Scorer"): mesh}).splitlines() == [
        "ray",
        "+- group 'model': 4 worker(s) on cuda 0-3",
        "|  +- Scorer",
        "|  |  mesh pp 2 x dp 1 x tp 2",
        "|  |  rank 0: data=0 pp=0 dp=0 tp=0",
        "|  |  rank 1: data=0 pp=0 dp=0 tp=1",
        "|  |  rank 2: data=0 pp=1 dp=0 tp=0",
        "|  |  rank 3: data=0 pp=1 dp=0 tp=1",
    ]
    assert get_device_placement() == "local: 1 process(es), this one is rank 0"


TORCHRUN = """
import sys
import twinkle_core
from twinkle_core import DeviceMesh
from twinkle_core.infra import resolve_group
from tests.infra.remote_classes import Counter
mesh = DeviceMesh.from_sizes(dp_size=2)
with twinkle_core.initialize("local", global_device_mesh=mesh):
    counter = Counter(10, remote_group="pair")
    group = resolve_group(None, None, "tests.infra.workers:Echo")
    total = group.call("total", 1.0, collect="last_pp_first")
    print(group.call("items", [1, 2, 3], dispatch="slice_dp"), total, counter.data_rank(), flush=True)
"""


@pytest.mark.slow
def test_two_processes_of_torchrun_run_the_same_script():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    told = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", TORCHRUN], cwd=ROOT, env={**os.environ, **told, "RANK": str(rank)}, stdout=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    said = [process.communicate(timeout=100)[0].strip() for process in processes]
    assert said == ["[[1, 2], [3]] 3.0 0", "[[1, 2], [3]] 3.0 1"]


def test_half_of_torchruns_variables_is_refused():
    assert torchrun({"RANK": "1", "WORLD_SIZE": "2"}) == Torchrun(rank=1, world_size=2) and torchrun({}) is None
    for environ in ({"RANK": "0"}, {"RANK": "2", "WORLD_SIZE": "2"}, {"RANK": "x", "WORLD_SIZE": "2"}):
        with pytest.raises(ConfigError, match="start the script with torchrun"):
            torchrun(environ)
