"""The same calls on users' classes in this process and on Ray workers."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from tests.infra.remote_classes import Countdown, Counter, Loader, NotForTheDriver, script
from twinkle_core import DeviceGroup, DeviceMesh
from twinkle_core.errors import ConfigError, DataError, WorkerLostError
from twinkle_core.infra import Runtime, initialize, resolve_group
from twinkle_core.infra.lazy import LazyCollect

MESH = DeviceMesh.from_sizes(dp_size=2)
PEERS = DeviceMesh.from_sizes(tp_size=2)


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(address="local", num_cpus=3, num_gpus=2, include_dashboard=False, log_to_driver=False, object_store_memory=200_000_000)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def workers(cluster: None) -> Iterator[Runtime]:
    groups = [DeviceGroup("pair", 2, "CPU"), DeviceGroup("one", 1, "CPU")]
    with initialize("ray", groups=groups, seed=7) as runtime:
        yield runtime


@pytest.mark.slow
def test_the_same_script_gives_the_same_on_workers(workers: Runtime):
    assert script("pair", "one")[:3] == script(None, None)[:3]


@pytest.mark.slow
def test_a_lazy_result_goes_from_worker_to_worker_and_the_driver_never_unpickles_it(workers: Runtime):
    first, second = Counter(0, remote_group="pair"), Counter(0, remote_group="one")
    lazy = first.wrap([5, 6, 7])
    assert isinstance(lazy, LazyCollect)
    assert second.unwrap(lazy).result() == [5, 6, 7]
    assert first.unwrap(second.wrap([1, 2, 3, 4, 5])) == [1, 2, 3, 4, 5]
    with pytest.raises(Exception, match="the driver unpickled it"):
        first.wrap([5]).result()
    with pytest.raises(ConfigError, match=r"lazy result of Counter.wrap lies inside another value"):
        second.unwrap([lazy])
    assert isinstance(NotForTheDriver(1), NotForTheDriver)


@pytest.mark.slow
def test_peers_get_the_same_share_and_count_once(workers: Runtime):
    split, peers = Counter(0, remote_group="pair", device_mesh=MESH), Counter(0, remote_group="pair", device_mesh=PEERS)
    assert split.add([1, 2, 3]).result() == [1, 2, 3] == peers.add([1, 2, 3]).result()
    assert split.count() == 2 and peers.count() == 1, "one answer for each data rank"
    assert split.data_rank() == 1 and peers.data_rank() == 0
    with pytest.raises(ConfigError, match="a device_mesh of 4 ranks on group 'pair', which has 2 worker"):
        Counter(0, remote_group="pair", device_mesh=DeviceMesh.from_sizes(dp_size=4))
    with pytest.raises(ConfigError, match="Counter.add_some needs at least 1 .* 1 on 2 workers are 1, 0"):
        split.add_some([1])


@pytest.mark.slow
def test_iterators_run_on_workers_and_end_when_the_last_does(workers: Runtime):
    assert list(Countdown(remote_group="pair", device_mesh=MESH)) == [[0, 1], [0]]
    assert [list(batch) for batch in Loader(2, remote_group="pair")] == [[0, 1], [2, 3]]
    loader = Loader(2, remote_group="one")
    assert [(list(a), list(b)) for a, b in zip(loader, loader, strict=True)] == [([0, 1], [0, 1]), ([2, 3], [2, 3])]


@pytest.mark.slow
def test_an_error_keeps_its_type_and_the_workers_live_on(workers: Runtime):
    counter = Counter(1, remote_group="pair", device_mesh=MESH)
    with pytest.raises(DataError, match="bad row") as raised:
        counter.fail("bad row").result()
    assert "Counter.fail" in raised.value.__notes__[0]
    assert counter.add([1]).result() == [2]
    counter.fail("nobody asks")
    with pytest.raises(DataError, match="nobody asks"):
        counter.count()
    counter.fail("nobody asks at all")
    with pytest.raises(DataError, match="nobody asks at all"):
        workers.wait()
    with pytest.raises(AttributeError, match="'local_only' of Counter .* no remote_function; those are: .*add"):
        counter.local_only()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_death_is_named_and_only_its_group_ends(workers: Runtime, number: int):
    counter, other = Counter(0, remote_group="pair", device_mesh=MESH), Counter(0, remote_group="one")
    began = time.monotonic()
    counter.die(1, number)
    with pytest.raises(WorkerLostError, match=f"worker 1 of 2 of group 'pair' died during 'Counter.die' \\({signal.Signals(number).name}"):
        other.count(), counter.count()
    assert time.monotonic() - began < 10
    assert other.add([1]).result() == [1]
    with pytest.raises(WorkerLostError, match="worker 1"):
        counter.add([1])
    assert Counter(1, remote_group="pair").add_some([1, 2]).result() == [2, 3], "the group starts anew"


@pytest.mark.slow
def test_a_time_out_says_what_was_waited_for(workers: Runtime):
    counter = Counter(0, remote_group="pair", device_mesh=MESH)
    with pytest.raises(WorkerLostError, match=r"'Counter.sleep' from worker\(s\) 1 of 2 of group 'pair' within 0.5 s, 1 answered"):
        counter.sleep(1, 20.0).result()


@pytest.mark.slow
def test_groups_that_do_not_fit_and_other_arguments_are_refused(workers: Runtime, monkeypatch: pytest.MonkeyPatch):
    groups = [DeviceGroup("pair", 2, "CPU"), DeviceGroup("one", 1, "CPU")]
    assert initialize("ray", groups=groups, seed=7) is workers
    with pytest.raises(ConfigError, match="with other arguments: seed was 7, now 8"):
        initialize("ray", groups=groups, seed=8)
    with pytest.raises(ConfigError, match="remote_group is 'pear'; .* pair, one"):
        resolve_group("pear", None, "tests.infra.workers:Echo")
    group = resolve_group("pair", MESH, "tests.infra.workers:Echo")
    assert group.call("items", [1, 2, 3], dispatch="slice_dp", collect="flatten") == [1, 2, 3]
    assert group.call("total", 1.0, collect="last_pp_first") == 3.0


SCRIPT = """
import sys
import twinkle_core
from twinkle_core import DeviceGroup
from twinkle_core.infra import remote_class, remote_function
twinkle_core.initialize("ray", groups=[DeviceGroup("a", 1, "CPU")])
@remote_class()
class Mine:
    @remote_function(dispatch="all", collect="first", lazy_collect=False)
    def read(self, name):
        import os
        return os.environ.get(name)
    @remote_function(dispatch="all")
    def write(self, path):
        import time
        time.sleep(1)
        open(path, "w").close()
mine = Mine(remote_group="a")
print([mine.read(name) for name in ("SECRET_TOKEN", "AWS_REGION", "ASKED_FOR")])
mine.write(sys.argv[1])
"""


@pytest.mark.slow
def test_a_scripts_workers_see_no_secrets_and_finish_their_last_call(tmp_path: Path):
    told = {"SECRET_TOKEN": "s3cret", "AWS_REGION": "here", "ASKED_FOR": "yes", "TWINKLE_WORKER_ENV": "ASKED_FOR"}
    environment = {name: value for name, value in os.environ.items() if name != "RAY_AUTH_MODE"} | told
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "written")],
        cwd=Path(__file__).parents[2],
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.stdout.splitlines() == ["[None, 'here', 'yes']"], run.stderr
    assert run.returncode == 0 and (tmp_path / "written").exists()
