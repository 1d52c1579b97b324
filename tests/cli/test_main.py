import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.architecture.sources import ROOT

COMMAND = [sys.executable, "-c", "from twinkle_cli.main import main; main()"]
HEAVY = ("torch", "transformers", "ray", "prefect", "mlflow", "datasets", "boto3")


def twinkle(*arguments: str, cwd: Path, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], cwd=cwd, env=_environment(), capture_output=True, text=True, timeout=seconds, check=False)


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT)}


def seconds_of(*arguments: str, cwd: Path) -> float:
    """The best of three: the machine may be busy with something else."""
    best = float("inf")
    for _ in range(3):
        start = time.monotonic()
        twinkle(*arguments, cwd=cwd)
        best = min(best, time.monotonic() - start)
    return best


def test_help_and_refusals_answer_within_a_second(tmp_path: Path) -> None:
    (tmp_path / "wrong.yaml").write_text("train: {lrr: 1}\n")
    assert seconds_of("--help", cwd=tmp_path) < 1
    assert seconds_of("run", "sft", "wrong.yaml", cwd=tmp_path) < 1


REFUSALS = [
    (["run", "stf", "demo"], "unknown flow 'stf': did you mean 'sft'?"),
    (["run", "sft", "dmeo"], "did you mean 'demo'?"),
    (["run", "sft", "gone.yaml"], "there is no recipe and no file 'gone.yaml'"),
    (["run", "sft", "demo", "--set", "train.lrr=1e-4"], "unknown key 'train.lrr': did you mean 'lr'?"),
    (["run", "sft", "demo", "--set", "train.lr=fast"], "'train.lr' is 'fast'"),
    (["run", "sft", "demo", "--set", "template.max_length=4096"], "packing.row_length 512 is less than template.max_length 4096"),
    (["run", "sft", "demo", "--data", "gone.jsonl"], "gone.jsonl"),
    (["run", "sft", "demo", "--model", "./gone"], "gone"),
    (["run", "sft", "demo", "--store", "gopher://x"], "unknown scheme 'gopher'"),
    (["run", "sft", "twice.yaml"], "twice.yaml, line 2, column 1: key 'a' stands twice"),
    (["run", "sft"], "'model' is missing"),
    (["init", "there.yaml"], "'there.yaml' exists"),
    (["artifacts", "show", "abc"], "no artifact's key begins with 'abc'"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSALS, ids=[message for _, message in REFUSALS])
def test_a_wrong_command_is_refused_with_one_message(arguments: list[str], message: str, tmp_path: Path) -> None:
    (tmp_path / "twice.yaml").write_text("a: 1\na: 2\n")
    (tmp_path / "there.yaml").write_text("mine")
    run = twinkle(*arguments, cwd=tmp_path)
    assert run.returncode == 2, run.stderr
    assert message in run.stderr
    assert "Traceback" not in run.stderr
    assert (tmp_path / "there.yaml").read_text() == "mine"


def test_a_refused_recipe_loads_nothing_heavy(tmp_path: Path) -> None:
    script = (
        "import json, sys\nfrom twinkle_cli.main import main\n"
        "sys.argv = ['twinkle', 'run', 'sft', 'demo', '--set', 'train.lrr=1']\n"
        "try:\n  main()\nexcept SystemExit as end:\n  assert end.code == 2\n"
        f"print(json.dumps([part for part in {HEAVY!r} if part in sys.modules]))"
    )
    run = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=_environment(), capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(run.stdout.splitlines()[-1]) == []


def test_a_recipe_that_init_wrote_is_accepted_but_for_the_rows_that_are_not_there(tmp_path: Path) -> None:
    assert twinkle("init", "r.yaml", cwd=tmp_path).returncode == 0
    run = twinkle("run", "sft", "r.yaml", "--dry-run", cwd=tmp_path)
    assert run.returncode == 2
    assert "rows.jsonl" in run.stderr
    assert twinkle("init", "r.yaml", "--force", cwd=tmp_path).returncode == 0


def test_down_with_nothing_running_says_so(tmp_path: Path) -> None:
    run = twinkle("down", cwd=tmp_path)
    assert (run.returncode, run.stdout.strip()) == (0, "nothing was running")
