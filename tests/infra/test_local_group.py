import multiprocessing
from pathlib import Path

import pytest

from tests.infra.workers import Echo, OddError
from twinkle_core.config import ResourcesConfig
from twinkle_core.errors import ConfigError, DataError, TrainingError
from twinkle_core.infra import open_group
from twinkle_core.infra.local_group import LocalGroup


def test_one_worker_in_this_process_gets_everything_and_keeps_its_error():
    group = open_group("tests.infra.workers:Echo", ResourcesConfig(mode="local"))
    assert isinstance(group, LocalGroup)
    assert group.call("items", [1, 2, 3], dispatch="slice", collect="flatten") == [1, 2, 3]
    assert group.call("total", 2.0, collect="sum") == 2.0
    with pytest.raises(DataError, match="row 3"):
        group.call("fail", 0)
    group.shutdown()
    group.shutdown()


def test_a_class_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="no class Nope"):
        LocalGroup("tests.infra.workers:Nope")
    with pytest.raises(ConfigError, match="package.module:Class"):
        LocalGroup("tests.infra.workers")


def _same_script(rank: int, meeting: str, answers: "multiprocessing.Queue[tuple]") -> None:
    group = LocalGroup(Echo, rank=rank, world_size=2, init_method=f"file://{meeting}", threads=1)
    items = group.call("items", list(range(5)), dispatch="round_robin", collect="flatten")
    total = group.call("total", 1.0, collect="none")
    try:
        group.call("fail", 1)
        error = "none"
    except DataError as caught:
        error = str(caught)
    try:
        group.call("fail_unsent", 1)
        unsent = "none"
    except (OddError, TrainingError) as caught:
        unsent = f"{type(caught).__name__}: {caught}"
    answers.put((rank, items, total, error, unsent))


@pytest.mark.slow
def test_two_processes_running_the_same_script_get_the_same_answers_and_the_same_error(tmp_path: Path):
    context = multiprocessing.get_context("spawn")
    answers = context.Queue()
    processes = [context.Process(target=_same_script, args=(rank, str(tmp_path / "meeting"), answers)) for rank in range(2)]
    for process in processes:
        process.start()
    got = sorted(answers.get(timeout=60) for _ in processes)
    for process in processes:
        process.join(30)
    expected = ([0, 2, 4, 1, 3], [3.0, 3.0], "row 3 of file x is bad")
    assert got == [(0, *expected, "TrainingError: OddError: row 3 is odd"), (1, *expected, "OddError: row 3 is odd")]
