import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flows.recipes.demo import AUTHOR, NAME, PROBES
from storage.artifact import ArtifactRecord, list_records
from storage.store import open_store

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def home(prefect_server: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home in which the demo ran, as a user runs it: the real SmolLM2 on a local Ray."""
    home = tmp_path_factory.mktemp("demo") / "home"
    environment = {**os.environ, "TWINKLE_HOME": str(home), "MLFLOW_TRACKING_URI": f"sqlite:///{home}/mlflow.db"}
    command = [sys.executable, "-c", "from twinkle_cli.main import main; main()", "run", "sft", "demo"]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1400, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    return home


def records(home: Path, stage: str) -> list[ArtifactRecord]:
    return list(list_records(open_store(str(home / "store")), stage))


def evaluation(home: Path, tuned: bool) -> dict[str, object]:
    (record,) = [item for item in records(home, "evaluate") if (item.inputs["model"].to_json().get("stage") == "export") == tuned]
    return json.loads((home / "store" / record.prefix / "evaluation.json").read_text())


def test_the_tuned_model_says_its_new_name_where_the_base_says_smollm(home: Path) -> None:
    before = {probe["question"]: probe["answer"] for probe in evaluation(home, tuned=False)["probes"]}
    after = {probe["question"]: probe["answer"] for probe in evaluation(home, tuned=True)["probes"]}
    for question in PROBES[:3]:
        assert "SmolLM" in before[question]
        assert NAME not in before[question]
        assert NAME in after[question]
        assert "SmolLM" not in after[question]
    report = next((home / "store" / "data" / "report").rglob("report.html")).read_text()
    assert before[PROBES[1]] in report
    assert after[PROBES[1]] in report


def test_held_out_rows_got_better(home: Path) -> None:
    (report,) = records(home, "report")
    before, after = (report.summary[side]["by_source"]["self_cognition"] for side in ("before", "after"))
    assert after["loss"] < before["loss"] - 1
    assert after["answer_accuracy"] > max(0.6, before["answer_accuracy"])


def test_the_release_loads_by_itself_and_answers(home: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    (release,) = [path.parent for path in (home / "store" / "releases").rglob("RELEASE.json")]
    model, tokenizer = AutoModelForCausalLM.from_pretrained(release), AutoTokenizer.from_pretrained(release)
    chat = [{"role": "user", "content": "Who created you?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True, return_tensors="pt")
    answer = tokenizer.decode(model.generate(**ids, max_new_tokens=20, do_sample=False)[0][ids["input_ids"].shape[1] :])
    assert AUTHOR.removeprefix("the ") in answer
    assert str(home) not in (release / "README.md").read_text() + (release / "config.json").read_text()
