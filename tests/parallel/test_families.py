"""Families of models x forms: the gradients of one process, documents that teach each other nothing, or a refusal that says why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.families.families import FAMILIES, save_family
from tests.parallel.bodies import open_model
from tests.parallel.oracle import assert_same, oracle
from tests.parallel.ranks import run_ranks
from twinkle_core.errors import ConfigError
from twinkle_core.processor.base import InputProcessor
from twinkle_core.types import IGNORE, PackedRow

FORMS: dict[str, dict[str, int]] = {
    "ddp2": {"dp_size": 2},
    "fsdp2": {"fsdp_size": 2},
    "ulysses2": {"dp_size": 2, "ulysses_size": 2},
    "ring2": {"cp_size": 2},
    "tp2": {"tp_size": 2},
}
RECURRENT = "recurrent layers, which need whole rows"
REFUSED: dict[tuple[str, str], str] = {
    ("qwen3_5", "ulysses2"): RECURRENT,
    ("qwen3_5", "ring2"): RECURRENT,
    ("qwen3_5_moe", "ulysses2"): RECURRENT,
    ("qwen3_5_moe", "ring2"): RECURRENT,
    **{(name, "ring2"): "sliding-window layers" for name in ("mistral", "gemma2", "gemma3", "gemma4", "gpt_oss")},
    **{(name, "ring2"): "latent attention" for name in ("deepseek_v2", "deepseek_v3")},
    **{(name, "tp2"): "as 'moe_tp_experts'; known: colwise" for name in ("qwen3_moe", "qwen3_5_moe", "deepseek_v3")},
    ("deepseek_v2", "tp2"): "as 'mla_kv_a_proj'; known: colwise",
    ("gpt_oss", "tp2"): "no tensor-parallel plan in transformers",
}
SAMPLE = ("gpt_oss", "qwen3_5")
"""Windows with sinks, and recurrent layers: what the fast suite looks at."""
WORDS = {"before": (3, 40), "learnt": (40, 90), "behind": (90, 128)}
"""Tokens of each of three documents in a row, so that a rank knows which it has."""
TOLERANCE = 2e-5
"""Of each gradient's largest value: eager attention is the reference here."""
ILL_CONDITIONED = {"qwen3_5": 2e-4, "gemma4": 1e-4}
"""Tiny models of these are 5e-5 off their float64 gradients in plain transformers too."""


def three_documents() -> PackedRow:
    """9, 12 and 7 tokens, of which the second document alone is learnt."""
    generator = np.random.default_rng(3)
    lengths = (9, 12, 7)
    parts = [generator.integers(*words, length) for words, length in zip(WORDS.values(), lengths, strict=True)]
    ids = np.concatenate(parts).astype(np.int32)
    labels = np.full(len(ids), IGNORE, dtype=np.int32)
    labels[9:20] = ids[10:21]
    return PackedRow(input_ids=ids, labels=labels, seq_lens=np.array(lengths, dtype=np.int32), sample_ids=np.arange(3, dtype=np.int64))


def learnt_row(*lengths: int) -> PackedRow:
    ids = np.random.default_rng(lengths).integers(3, 128, sum(lengths)).astype(np.int32)
    labels = np.roll(ids, -1)
    labels[np.cumsum(lengths) - 1] = IGNORE
    sample_ids = np.arange(len(lengths), dtype=np.int64)
    return PackedRow(input_ids=ids, labels=labels, seq_lens=np.array(lengths, dtype=np.int32), sample_ids=sample_ids)


ROWS = [learnt_row(7, 5), three_documents(), learnt_row(11)]


class Merged(InputProcessor):
    """Drops the boundaries between documents: what must not happen."""

    def collate(self, rows: Sequence[Any]) -> dict[str, Any]:
        batch = super().collate(rows)
        return batch | {"seq_lens": [sum(batch["seq_lens"])]}


def taught(model: Any, worker: Any) -> dict[str, float]:
    """Of the second document's loss, the largest gradient at the embeddings of each document, over all ranks."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    def keep(_module: torch.nn.Module, inputs: tuple[torch.Tensor, ...], embeddings: torch.Tensor) -> None:
        embeddings.retain_grad()
        seen.append((inputs[0], embeddings))

    handle = worker.model.get_input_embeddings().register_forward_hook(keep)
    model.forward_backward([three_documents()])
    handle.remove()
    largest = dict.fromkeys(WORDS, 0.0)
    for ids, embeddings in seen:
        if embeddings.grad is None:
            continue
        for name, (first, last) in WORDS.items():
            chosen = embeddings.grad[(ids >= first) & (ids < last)]
            largest[name] = max([largest[name], *chosen.abs().flatten().tolist()])
    return largest


def results(rank: int, folder: Path, forms: Sequence[str]) -> dict[str, Any]:
    """For each form: gradients of `ROWS`, what documents teach each other with and without boundaries; or why it is refused."""
    found: dict[str, Any] = {}
    for form in forms:
        try:
            model, worker = open_model(rank, folder, FORMS[form])
        except ConfigError as error:
            found[form] = str(error)
            continue
        model.set_optimizer("AdamW", lr=1e-3)
        output = model.forward_backward(ROWS)
        norm = model.clip_grad_norm(1e9)
        whole = worker.placement.gather({name: parameter.grad for name, parameter in worker.state().parameters.items()})
        model.zero_grad()
        answer: dict[str, Any] = {"loss": float(output.loss_sum), "num_loss_tokens": output.num_loss_tokens, "weight": output.loss_weight}
        answer |= {"norm": float(norm or 0.0), "gradients": {name: value.numpy() for name, value in whole.items()}}
        answer["apart"] = taught(model, worker)
        model.set_processor(Merged())
        answer["merged"] = taught(model, worker)
        found[form] = answer
        dist.barrier()
    return found


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in SAMPLE else pytest.mark.slow) for name in FAMILIES])
def test_a_family_in_each_form(name: str, tmp_path: Path) -> None:
    folder = save_family(name, tmp_path / name)
    right = oracle(folder, None, ROWS, 1e9, attention="eager")
    ranks = run_ranks(2, results, tmp_path, folder, list(FORMS))
    for form in FORMS:
        answers = [rank[form] for rank in ranks]
        if (name, form) in REFUSED or any(isinstance(answer, str) for answer in answers):
            for answer in answers:
                assert re.search(REFUSED.get((name, form), "nothing is refused here"), str(answer)), f"{name} in {form}: {answer}"
            continue
        for answer in answers:
            assert_same(answer, right, ILL_CONDITIONED.get(name, TOLERANCE))
        apart, merged = ({words: max(answer[kind][words] for answer in answers) for words in WORDS} for kind in ("apart", "merged"))
        assert apart["before"] == 0.0 == apart["behind"] and apart["learnt"] > 0.0, f"{name} in {form}: {apart}"
        assert merged["before"] > 0.0, f"{name} in {form}: the check cannot see a leak"
