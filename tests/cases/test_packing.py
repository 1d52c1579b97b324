"""Reported faults of packing, with their right values (the case's name is in each docstring)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinkle_core.config import PackingConfig, ShardConfig, TemplateConfig
from twinkle_core.errors import DataError
from twinkle_core.packing import pack, plan
from twinkle_core.preprocessor.run import trajectory_line
from twinkle_core.processor import InputProcessor
from twinkle_core.sharding import PackedDataset, write_shards
from twinkle_core.template import Template, encode
from twinkle_core.types import IGNORE, NoProgress, PackedRow

LENGTHS = [9, 5, 4, 3, 2]
EOS = 0


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The words 1 to 99 are the tokens 1 to 99; 0 ends a text."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"</s>": EOS} | {str(number): number for number in range(1, 100)}, unk_token="</s>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    fast.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
    folder = tmp_path_factory.mktemp("words")
    fast.save_pretrained(folder)
    return folder


def rows_of(
    tmp_path: Path, tokenizer: Path, texts: list[list[int]], row_length: int, truncation: str
) -> tuple[dict[str, Any], PackedDataset]:
    """Texts of these words, to packed rows: the encode stage's report, and the rows."""
    folders = {name: tmp_path / f"{name}-{truncation}" for name in ("preprocess", "encode", "pack", "shard")}
    for folder in folders.values():
        folder.mkdir()
    lines = [trajectory_line({"messages": [], "text": " ".join(map(str, words))}) for words in texts]
    (folders["preprocess"] / "train.jsonl").write_bytes(b"".join(lines))
    (folders["preprocess"] / "held_out.jsonl").write_bytes(b"")
    config = TemplateConfig(max_length=row_length, truncation=truncation, num_proc=1)  # type: ignore[arg-type]
    report = encode(folders["preprocess"], Template(tokenizer, config), folders["encode"], NoProgress())
    plan(folders["encode"], PackingConfig(row_length=row_length), folders["pack"], NoProgress())
    write_shards(folders["encode"], folders["pack"], ShardConfig(), folders["shard"], NoProgress())
    return report["train"], PackedDataset(folders["shard"])


@pytest.mark.parametrize("capacity", [9, 16, 17])
def test_every_capacity_packs_and_keeps_the_last_bin(capacity: int) -> None:
    """PK01: odd capacities pack as even ones do, and a short last bin is not lost."""
    packed = pack(np.array(LENGTHS), capacity)
    assert len(packed) < len(LENGTHS)
    assert sorted(packed.items.tolist()) == [0, 1, 2, 3, 4]
    assert all(sum(LENGTHS[item] for item in row) <= capacity for row in packed)


@pytest.mark.parametrize("capacity", [6, 7, 8])
def test_a_sample_that_does_not_fit_is_never_cut_in_silence(capacity: int) -> None:
    """PK01: the packer refuses the sample of 9; the four others pack into fewer bins than samples."""
    with pytest.raises(DataError, match=f"sample 0 has 9 tokens, which does not fit a row of 1 to {capacity}"):
        pack(np.array(LENGTHS), capacity)
    packed = pack(np.array(LENGTHS[1:]), capacity)
    assert len(packed) < 4
    assert sorted(packed.items.tolist()) == [0, 1, 2, 3]


@pytest.mark.parametrize(("truncation", "kept", "lost", "dropped"), [("right", 20, 3, 0), ("split", 23, 0, 0), ("delete", 14, 0, 1)])
def test_the_loss_of_a_long_sample_is_told(tmp_path: Path, tokenizer: Path, truncation: str, kept: int, lost: int, dropped: int) -> None:
    """PK01: of 23 tokens in rows of 6, each rule keeps what it says, and the report adds up."""
    texts = [list(range(10 * number + 1, 10 * number + length)) for number, length in enumerate(LENGTHS)]  # and the end of text
    report, rows = rows_of(tmp_path, tokenizer, texts, 6, truncation)
    assert (report["tokens"], report["truncated_tokens"], sum(report["dropped"].values())) == (kept, lost, dropped)
    assert int(rows.num_tokens.sum()) == kept
    assert all(len(rows[number].input_ids) <= 6 for number in range(len(rows)))
    words = sorted(int(token) for number in range(len(rows)) for token in rows[number].input_ids if token != EOS)
    first = {"right": texts[0][:6], "split": texts[0], "delete": []}[truncation]
    assert words == sorted([*first, *(word for text in texts[1:] for word in text)])


def test_positions_restart_at_each_document() -> None:
    """PK04: A of three and B of four tokens have the positions 0 1 2 0 1 2 3 (their losses: tests/cases/test_loss.py)."""
    ids = np.array([11, 12, 13, 21, 22, 23, 24], dtype=np.int32)
    row = PackedRow(input_ids=ids, labels=ids, seq_lens=np.array([3, 4], dtype=np.int32), sample_ids=np.arange(2))
    assert InputProcessor().collate([row])["position_ids"].tolist() == [[0, 1, 2, 0, 1, 2, 3]]


def test_the_last_token_of_a_document_does_not_predict_the_next_document(tmp_path: Path, tokenizer: Path) -> None:
    """PK06: documents of 3 and 2 tokens in one row have 3 loss terms, not 4."""
    _, rows = rows_of(tmp_path, tokenizer, [[1, 2], [4]], 5, "raise")
    assert len(rows) == 1
    assert rows[0].input_ids.tolist() == [1, 2, EOS, 4, EOS]
    assert rows[0].labels.tolist() == [2, EOS, IGNORE, EOS, IGNORE]
    assert rows[0].num_loss_tokens == rows.num_loss_tokens[0] == 3
