import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from storage.artifact import list_records
from storage.store import open_store
from tests.end_to_end.conftest import computed, in_home, run_flow, values

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]
Finished = tuple[Path, dict[str, str]]
FROM_TRAIN = ["train", "export", "evaluate", "report", "publish"]


def test_a_release_loads_by_itself_and_comes_with_card_and_report(finished: Finished) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    release = Path(finished[1]["release"])
    model, tokenizer = AutoModelForCausalLM.from_pretrained(release), AutoTokenizer.from_pretrained(release)
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Who are you?"}], add_generation_prompt=True, return_tensors="pt")
    ids = ids if not hasattr(ids, "input_ids") else ids["input_ids"]
    assert model.generate(ids, max_new_tokens=4).shape[1] > ids.shape[1]
    assert "base_model" in (release / "README.md").read_text()
    report = (release / "report.html").read_text()
    assert "Who are you?" in report
    assert json.loads((release / "RELEASE.json").read_text())["name"] == "tiny"


def test_training_improved_the_held_out_loss(finished: Finished) -> None:
    (record,) = list_records(open_store(str(finished[0] / "store")), "report")
    before, after = record.summary["before"]["all"], record.summary["after"]["all"]
    assert after["loss"] < before["loss"] - 0.3
    assert before["documents"] == after["documents"] == 8


def test_the_same_run_again_recomputes_nothing_and_is_quick(finished: Finished, rows: Path, tiny_llama: Path) -> None:
    store = open_store(str(finished[0] / "store"))
    before = {record.key: record.attempt for record in list_records(store)}
    with in_home(finished[0]):
        began = time.monotonic()
        again = run_flow(values(rows, tiny_llama))
        seconds = time.monotonic() - began
    assert again == finished[1]
    assert {record.key: record.attempt for record in list_records(store)} == before
    assert seconds < 10


@pytest.mark.parametrize(
    ("change", "stages"),
    [
        ({"evaluate__max_new_tokens": 9}, ["evaluate base", "evaluate", "report", "publish"]),
        ({"train__lr": 2e-2}, FROM_TRAIN),
        ({"publish__name": "other"}, ["report", "publish"]),
        ({"resources__workers": 1, "resources__cpus_per_worker": 2, "checkpoint__save_every": 7}, []),
        ({"resources": {"mode": "ray", "workers": 2, "ray_address": "10.0.0.1:6379"}}, []),
        ({"packing__algorithm": "none"}, ["pack", "shard", *FROM_TRAIN]),
    ],
)
def test_a_change_computes_what_depends_on_it_and_nothing_else(
    finished: Finished, rows: Path, tiny_llama: Path, change: dict[str, Any], stages: list[str]
) -> None:
    planned = computed(finished[0], values(rows, tiny_llama, **change))
    assert sorted(planned) == sorted(stages)


def test_another_chat_template_computes_encode_and_all_after_it(finished: Finished, rows: Path, tiny_llama: Path) -> None:
    turns = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}<|im_end|>{% endfor %}"
    template = turns + "{% if add_generation_prompt %}[assistant]{% endif %}"
    planned = computed(finished[0], values(rows, tiny_llama, template__chat_template=template))
    assert "preprocess" not in planned
    assert {"encode", "pack", "shard", "evaluate base", *FROM_TRAIN} == set(planned)


def test_the_same_bytes_elsewhere_are_the_same_data_and_model(finished: Finished, rows: Path, tiny_llama: Path, tmp_path: Path) -> None:
    import shutil

    moved_rows, moved_model = tmp_path / "elsewhere.jsonl", tmp_path / "model"
    shutil.copyfile(rows, moved_rows)
    shutil.copytree(tiny_llama, moved_model)
    assert computed(finished[0], values(moved_rows, moved_model)) == []
    moved_rows.write_text(rows.read_text() + '{"prompt": "new", "completion": "row"}\n')
    assert "preprocess" in computed(finished[0], values(moved_rows, moved_model))


def test_after_an_evaluation_change_only_evaluation_and_publishing_run(copy_of: Callable[[], Path], rows: Path, tiny_llama: Path) -> None:
    home = copy_of()
    store = open_store(str(home / "store"))
    before = {record.key for record in list_records(store)}
    with in_home(home):
        run_flow(values(rows, tiny_llama, evaluate__max_new_tokens=9))
    new = [record.stage for record in list_records(store) if record.key not in before]
    assert sorted(new) == ["evaluate", "evaluate", "publish", "report"]


def test_a_deleted_release_is_published_again(copy_of: Callable[[], Path], finished: Finished, rows: Path, tiny_llama: Path) -> None:
    import shutil

    home = copy_of()
    shutil.rmtree(home / "store" / "releases")
    planned = computed(home, values(rows, tiny_llama))
    assert planned == ["publish"]
    with in_home(home):
        released = run_flow(values(rows, tiny_llama))["release"]
    assert (Path(released) / "RELEASE.json").exists()


def test_a_damaged_weight_file_is_named_and_recomputed_to_the_same_bytes(copy_of: Callable[[], Path], rows: Path, tiny_llama: Path) -> None:
    home = copy_of()
    store = open_store(str(home / "store"))
    (train,) = list_records(store, "train")
    path = home / "store" / train.prefix / "adapter_model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with in_home(home):
        run_flow(values(rows, tiny_llama))
    (again,) = list_records(store, "train")
    assert again.digest == train.digest
    assert again.attempt != train.attempt


def test_a_gate_that_does_not_pass_releases_nothing(copy_of: Callable[[], Path], rows: Path, tiny_llama: Path) -> None:
    from twinkle_core.errors import GateError

    home = copy_of()
    with in_home(home), pytest.raises(GateError, match="answer accuracy|held-out loss"):
        run_flow(values(rows, tiny_llama, publish={"name": "strict", "max_loss_increase": -100.0}))
    assert not (home / "store" / "releases" / "strict").exists()
