"""The laws of the chaos suite on journals made by hand: each is seen to fail."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.chaos.laws import Journal, check_no_damage, check_nothing_again, check_rows
from tests.chaos.script import PlannedKill, Script, Trigger

WHOLE = {(1, 0): [11, 22], (2, 0): [33, 11], (3, 0): [22, 33]}
"""Three steps of two rows: two epochs of three rows."""


def saw(step: int, rows: list[int] | None = None) -> dict[str, Any]:
    return {"kind": "saw", "step": step, "rank": 0, "rows": WHOLE[step, 0] if rows is None else rows}


def committed(step: int) -> dict[str, Any]:
    return {"kind": "committed", "step": step}


RECORDED = {"kind": "recorded"}
KILL = {"kind": "kill"}


def test_a_step_that_is_computed_again_sees_the_same_rows() -> None:
    check_rows([saw(1), saw(2), KILL, saw(2), saw(3)], WHOLE, epochs=2, num_rows=3)
    for wrong in ([22, 11], [33, 33], [33], [33, 11, 11]):
        with pytest.raises(AssertionError, match="saw other rows"):
            check_rows([saw(1), saw(2, wrong), KILL, saw(2), saw(3)], WHOLE, epochs=2, num_rows=3)


def test_no_step_is_left_out_and_no_row_is_counted_once_too_often() -> None:
    with pytest.raises(AssertionError):
        check_rows([saw(1), saw(3)], WHOLE, epochs=2, num_rows=3)
    twice = {**WHOLE, (3, 0): [22, 22]}
    with pytest.raises(AssertionError):
        check_rows([saw(1), saw(2), saw(3, [22, 22])], twice, epochs=2, num_rows=3)


@pytest.mark.parametrize(
    ("journal", "law"),
    [
        ([saw(1), committed(1), KILL, saw(1), saw(2), RECORDED], "again after the checkpoint of step 1"),
        ([saw(1), committed(1), RECORDED, KILL, saw(2)], "although the training was finished"),
        ([saw(1), committed(1), {"kind": "end", "reused": False}], "ended without a record"),
    ],
)
def test_what_was_right_is_not_computed_again(journal: Journal, law: str) -> None:
    check_nothing_again([saw(1), committed(1), saw(2), KILL, saw(2), committed(2), RECORDED, KILL, {"kind": "end", "reused": True}])
    with pytest.raises(AssertionError, match=law):
        check_nothing_again(journal)


def test_a_damaged_checkpoint_is_told() -> None:
    check_no_damage([{"kind": "say", "line": "resuming after step 2"}])
    with pytest.raises(AssertionError):
        check_no_damage([{"kind": "say", "line": "checkpoint of step 2 is not used: model.safetensors is missing"}])


VICTIM = """
import sys
from pathlib import Path
from tests.chaos.script import Script, Trigger
trigger = Trigger(Script(Path(sys.argv[1])), outlives_kills=True)
write = trigger.wrap("writer", "write", lambda: print("whole", flush=True), half=lambda: print("half", flush=True))
other = trigger.wrap("driver", "other", lambda: None)
for _ in range(3):
    other()
    write()
"""


@pytest.mark.parametrize(
    ("kill", "printed"),
    [
        (PlannedKill(victim="writer", event=2, mode="before"), ["whole"]),
        (PlannedKill(victim="writer", event=2, mode="half"), ["whole", "half"]),
        (PlannedKill(victim="writer", event=2, mode="after"), ["whole", "whole"]),
        (PlannedKill(victim="driver", event=3, mode="before"), ["whole", "whole"]),
    ],
    ids=["before", "half", "after", "other"],
)
def test_a_process_dies_at_its_event_and_only_once(tmp_path: Path, kill: PlannedKill, printed: list[str]) -> None:
    script = Script(tmp_path)
    script.write((kill,))
    ended = _run_victim(tmp_path)
    assert (ended.returncode, ended.stdout.split()) == (-signal.SIGKILL, printed)
    assert script.num_done() == 1
    assert [line["victim"] for line in script.journal() if line["kind"] == "kill"] == [kill.victim]
    assert _run_victim(tmp_path).returncode == 0, "let through"


def _run_victim(folder: Path) -> subprocess.CompletedProcess[str]:
    root = Path(__file__).parents[2]
    return subprocess.run(
        [sys.executable, "-c", VICTIM, str(folder)], cwd=root, env={**os.environ, "PYTHONPATH": str(root)}, capture_output=True, text=True
    )


def test_a_worker_that_saw_the_kill_of_another_serves_no_later_one(tmp_path: Path) -> None:
    script = Script(tmp_path)
    script.write((PlannedKill(victim="worker 1", event=1, mode="before"), PlannedKill(victim="writer", event=1, mode="before")))
    doomed = Trigger(script, outlives_kills=False)
    (tmp_path / "killed-0").touch()
    assert doomed.wrap("writer", "write", lambda: "lives")() == "lives"
