"""Data sets as people have them, from rows to shards: what became of each row is counted, and the counts add up."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.tokenizers import tokenizer_files
from twinkle_core.config import DataConfig, PackingConfig, ShardConfig, TemplateConfig
from twinkle_core.packing.run import plan
from twinkle_core.preprocessor import preprocess
from twinkle_core.sharding.reader import PackedDataset
from twinkle_core.sharding.writer import write_shards
from twinkle_core.template import Template
from twinkle_core.template.run import encode
from twinkle_core.types import IGNORE, DocumentKind, NoProgress

MAX_LENGTH = 4096
EXAMPLES = {
    "gsm8k/train.jsonl": ("PLAIN", 1),
    "gsm8k/test.jsonl": ("PLAIN", 1),
    "llamafactory/alpaca_en_demo.json": ("PLAIN", 1),
    "llamafactory/alpaca_zh_demo.json": ("PLAIN", 1),
    "llamafactory/c4_demo.jsonl": ("PLAIN", 1),
    "llamafactory/dpo_en_demo.json": ("CHOSEN REJECTED", 2),
    "llamafactory/glaive_toolcall_en_demo.json": ("PLAIN", 1),
    "llamafactory/identity.json": ("PLAIN", 1),
    "llamafactory/kto_en_demo.json": ("DESIRABLE UNDESIRABLE", 1),
    "llamafactory/reason_tool_use_demo_50.jsonl": ("PLAIN", 1),
    "llamafactory/v1_sft_demo.jsonl": ("PLAIN", 1),
}
"""File → kinds of its documents, and documents of a sample."""


@pytest.fixture(scope="module")
def template() -> Template:
    return Template(tokenizer_files("qwen3"), TemplateConfig(max_length=MAX_LENGTH, truncation="delete"))


@pytest.mark.slow
@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_file_reaches_shards(name: str, shared_data: Path, template: Template, tmp_path: Path) -> None:
    kinds, documents_a_sample = EXAMPLES[name]
    folders = {stage: tmp_path / stage for stage in ("preprocess", "encode", "pack", "shard")}
    for folder in folders.values():
        folder.mkdir()
    data = DataConfig(sources=({"name": "rows", "uri": str(shared_data / name)},))
    rows = preprocess(data, folders["preprocess"], NoProgress())
    encoded = encode(folders["preprocess"], template, folders["encode"], NoProgress())
    packing = PackingConfig(row_length=MAX_LENGTH * documents_a_sample)
    planned = plan(folders["encode"], packing, folders["pack"], NoProgress())
    write_shards(folders["encode"], folders["pack"], ShardConfig(rows_per_shard=64), folders["shard"], NoProgress())

    read = (shared_data / name).read_text(encoding="utf-8")
    num_rows = len(json.loads(read)) if name.endswith(".json") else len(read.split("\n")) - read.endswith("\n")
    assert rows["train"] + rows["held_out"] == rows["sources"]["rows"]["rows"] == num_rows
    for side in ("train", "held_out"):
        assert _came_to(encoded[side]) == rows[side]
    learnt = encoded["train"]
    assert planned["samples"] == learnt["samples"] > 0.6 * rows["train"]
    assert learnt["documents"] == documents_a_sample * learnt["samples"]

    packed = PackedDataset(folders["shard"])
    assert packed.num_tokens.sum() == planned["tokens"] == learnt["tokens"]
    assert packed.num_loss_tokens.sum() == learnt["supervised_tokens"] > 0
    assert packed.num_documents.sum() == learnt["documents"]
    assert " ".join(packed.index["kinds"]) == kinds
    ids = np.concatenate([packed[i].sample_ids for i in range(len(packed))])
    assert (np.bincount(ids) == documents_a_sample).all()
    for i in range(len(packed)):
        row = packed[i]
        assert len(row.input_ids) <= packing.row_length
        assert (row.labels[np.cumsum(row.seq_lens) - 1] == IGNORE).all()
        if documents_a_sample == 2:
            assert row.kinds.tolist() == [DocumentKind.CHOSEN, DocumentKind.REJECTED] * (len(row.seq_lens) // 2)


def _came_to(side: dict[str, Any]) -> int:
    """Conversations of a report of the encode stage: each gave a sample, or was dropped or refused for a stated reason."""
    assert side["conversations"] == side["samples"] + sum(side["dropped"].values()) + side["refused"]
    return int(side["conversations"])
