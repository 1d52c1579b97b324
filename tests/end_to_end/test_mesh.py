"""A whole flow whose training is spread over two workers."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoModelForCausalLM

from storage.artifact import list_records, verify_record
from storage.store import open_store
from tests.end_to_end.conftest import computed, in_home, run_flow, values

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


def test_a_flow_trains_on_shards_publishes_whole_weights_and_is_reused_on_another_mesh(
    prefect_server: str, rows: Path, tiny_llama: Path, tmp_path: Path
) -> None:
    settings = values(rows, tiny_llama, resources={"workers": 2, "fsdp": 2}, train__lora=None, train__lr=1e-3)
    home = tmp_path / "home"
    with in_home(home):
        release = Path(run_flow(settings)["release"])
        assert computed(home, settings) == []
        assert computed(home, values(rows, tiny_llama, train__lora=None, train__lr=1e-3)) == [], "the mesh is no part of a key"
    store = open_store(str(home / "store"))
    (record,) = list_records(store, "train")
    assert verify_record(store, record) == []
    names = {entry.path for entry in record.files}
    assert {f"weights/part-0000{rank}-of-00002.safetensors" for rank in (0, 1)} < names
    assert "model.safetensors" not in names
    AutoModelForCausalLM.from_pretrained(release)
