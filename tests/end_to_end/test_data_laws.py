"""From trajectories to batches no supervised token is lost or doubled: over truncation, packing, shards, shuffling, ranks and resume."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, event, given, settings
from hypothesis import strategies as st

from twinkle_core.config import PackingConfig, ShardConfig, TemplateConfig
from twinkle_core.dataloader import DataLoader
from twinkle_core.packing import plan
from twinkle_core.preprocessor.run import trajectory_line
from twinkle_core.sharding import EncodedDataset, PackedDataset, write_shards
from twinkle_core.template import Template, encode
from twinkle_core.types import IGNORE, EncodedSample, NoProgress, PackedRow, Trajectory

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
WHOLE = 1 << 20
SHORTEST = 12
"""Tokens of the lowest limit."""
Document = tuple[int, int, int]
"""(number of the document in its row, first token, the one after the last)."""
Target = tuple[int, int, int, int, float]
"""(line, document, position of the supervised token in the untruncated document, its id, its weight)."""


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|im_start|>", "<|im_end|>"], initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())
    )
    backend.train_from_iterator(["user assistant system word"], trainer)
    folder = tmp_path_factory.mktemp("tokenizer")
    made = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|im_end|>")
    made.chat_template = CHATML
    made.save_pretrained(folder)
    return folder


@dataclass(frozen=True, kw_only=True)
class Scene:
    rows: list[Trajectory]
    rule: str
    max_length: int
    over: int | None
    """So many tokens of the longest conversation or text are over the limit, whatever `max_length` says."""
    part_rows: int
    more_room: int
    """Tokens of a row beyond those of two documents."""
    algorithm: str
    rows_per_shard: int
    batch_size: int
    seed: int
    worlds: tuple[int, int]
    """Data ranks before and after the resume."""
    stop: float
    """Share of the steps before the resume."""

    def limited(self, wholes: Iterable[EncodedSample]) -> Scene:
        """The scene with the limit that `over` asks for."""
        longest = max((len(whole.input_ids) for whole in wholes if len(whole.seq_lens) == 1), default=0)
        if self.over is None or longest - self.over < SHORTEST:
            return self
        return replace(self, max_length=longest - self.over)


words = st.text("abcdefg é😀", min_size=1, max_size=12).filter(str.strip)


@st.composite
def trajectories(draw: st.DrawFn) -> Trajectory:
    def turns() -> list[Any]:
        made = []
        for _ in range(draw(st.integers(1, 2))):
            answer: dict[str, Any] = {"role": "assistant", "content": draw(words)}
            if draw(st.integers(0, 4)) == 0:
                answer["loss_weight"] = draw(st.sampled_from([0.0, 0.5, 2.0]))
            made += [{"role": "user", "content": draw(words)}, answer]
        return made

    kind = draw(st.sampled_from(["conversation"] * 4 + ["preference", "text"]))
    if kind == "text":
        return {"messages": [], "text": draw(words) * 3}
    trajectory: Trajectory = {"messages": turns(), "user_data": [("source", "rows")]}
    if kind == "preference":
        trajectory["rejected_messages"] = turns()
    return trajectory


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    return Scene(
        rows=draw(st.lists(trajectories(), min_size=1, max_size=12)),
        rule=draw(st.sampled_from(["delete", "left", "right", "split", "raise"])),
        max_length=draw(st.integers(SHORTEST, 120)),
        over=draw(st.sampled_from([None, None, 1, 2, 3])),
        part_rows=draw(st.integers(1, 5)),
        more_room=draw(st.integers(0, 60)),
        algorithm=draw(st.sampled_from(["best_fit_decreasing", "none"])),
        rows_per_shard=draw(st.integers(1, 4)),
        batch_size=draw(st.integers(1, 5)),
        seed=draw(st.integers(0, 9)),
        worlds=draw(st.tuples(st.integers(1, 3), st.integers(1, 3))),
        stop=draw(st.floats(0, 1)),
    )


def documents_of(sample: EncodedSample) -> list[np.ndarray]:
    """Of each document, the labels: what its tokens predict."""
    return np.split(sample.labels, np.cumsum(sample.seq_lens)[:-1])


def expected_pieces(whole: EncodedSample, rule: str, limit: int) -> list[list[Document]]:
    """What is to be left of a row: its samples, each a list of pieces of documents that predict something."""
    documents = documents_of(whole)
    lengths = [len(document) for document in documents]
    if max(lengths) <= limit:
        pieces = [[(number, 0, length) for number, length in enumerate(lengths)]]
    elif rule in ("raise", "delete") or (rule == "split" and len(lengths) > 1):
        pieces = []
    elif rule == "split":
        cuts = [*range(0, lengths[0], limit), lengths[0]]
        cuts[-2] -= cuts[-1] - cuts[-2] == 1 and documents[0][-2] != IGNORE  # the last token is learnt: let one before it predict it
        pieces = [[(0, start, end)] for start, end in zip(cuts, cuts[1:], strict=False)]
    else:
        pieces = [[(n, max(0, t - limit), t) if rule == "left" else (n, 0, min(t, limit)) for n, t in enumerate(lengths)]]
    return [piece for piece in pieces if all((documents[n][start : end - 1] != IGNORE).any() for n, start, end in piece)]


def targets(line: int, whole: EncodedSample, piece: list[Document]) -> list[Target]:
    """Every supervised token of the piece."""
    starts = np.cumsum(whole.seq_lens) - whole.seq_lens
    found = []
    for number, start, end in piece:
        for position in range(start, end - 1):  # the last token of a piece predicts nothing
            at = int(starts[number]) + position
            if whole.labels[at] != IGNORE:
                weight = 1.0 if whole.loss_weights is None else float(whole.loss_weights[at])
                found.append((line, number, position, int(whole.labels[at]), weight))
    return found


def targets_of_row(row: PackedRow, places: dict[int, tuple[int, list[Document]]]) -> list[Target]:
    """Every supervised token of a packed row, told by where its sample came from."""
    ends = np.cumsum(row.seq_lens)
    found, seen = [], Counter[int]()
    for sample, end, length in zip(row.sample_ids.tolist(), ends.tolist(), row.seq_lens.tolist(), strict=True):
        line, piece = places[sample]
        number, start, stop = piece[seen[sample]]
        seen[sample] += 1
        assert stop - start == length
        for i, at in enumerate(range(end - length, end)):
            if row.labels[at] != IGNORE:
                weight = 1.0 if row.loss_weights is None else float(row.loss_weights[at])
                found.append((line, number, start + i, int(row.labels[at]), weight))
                assert row.labels[at] == row.input_ids[at + 1]
    return found


def run_pipeline(scene: Scene, template: Template, folder: Path) -> tuple[EncodedDataset, PackedDataset]:
    """Trajectories to shards, through the stages' own functions."""
    (folder / "train.jsonl").write_bytes(b"".join(map(trajectory_line, scene.rows)))
    (folder / "held_out.jsonl").write_bytes(b"")
    for name in ("encoded", "plan", "shards"):
        (folder / name).mkdir()
    report = encode(folder, template, folder / "encoded", NoProgress(), part_rows=scene.part_rows)["train"]
    assert report["conversations"] == len(scene.rows) == report["encoded"] + sum(report["dropped"].values()) + report["refused"]
    plan(
        folder / "encoded",
        PackingConfig(row_length=2 * scene.max_length + scene.more_room, algorithm=scene.algorithm),
        folder / "plan",
        NoProgress(),
    )  # type: ignore[arg-type]
    write_shards(folder / "encoded", folder / "plan", ShardConfig(rows_per_shard=scene.rows_per_shard), folder / "shards", NoProgress())
    encoded = EncodedDataset(folder / "encoded")
    assert report["samples"] == len(encoded)
    return encoded, PackedDataset(folder / "shards")


def rows_of_two_epochs(scene: Scene, packed: PackedDataset) -> list[PackedRow]:
    """All rows that all ranks are handed, in order, by a run that is stopped and goes on with other ranks."""

    def loaders(world_size: int) -> list[DataLoader]:
        return [
            DataLoader(packed, batch_size=scene.batch_size, seed=scene.seed, num_epochs=2, data_rank=rank, data_world_size=world_size)
            for rank in range(world_size)
        ]

    handed: list[PackedRow] = []
    first, second = scene.worlds
    before = loaders(first)
    stop = int(scene.stop * len(before[0]))
    consumed = 0
    for _, *batches in zip(range(stop), *before, strict=False):
        handed += [row for batch in batches for row in batch]
        (consumed,) = {loader.get_state()["consumed_train_samples"] for loader in before}
    after = loaders(second)
    for loader in after:
        loader.resume_from_checkpoint(consumed)
    for batches in zip(*after, strict=True):
        handed += [row for batch in batches for row in batch]
    return handed


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(scene=scenes())
def test_each_supervised_token_is_in_the_batches_of_an_epoch_once(scene: Scene, tokenizer: Path) -> None:
    untruncated = Template(tokenizer, TemplateConfig(max_length=WHOLE, on_bad_row="skip")).encoder().outcomes(scene.rows)
    wholes = {line: outcome.samples[0] for line, outcome in enumerate(untruncated) if outcome.samples}
    scene = scene.limited(wholes.values())
    template = Template(tokenizer, TemplateConfig(max_length=scene.max_length, truncation=scene.rule, on_bad_row="skip", num_proc=1))  # type: ignore[arg-type]
    pieces = [(line, piece) for line, whole in wholes.items() for piece in expected_pieces(whole, scene.rule, scene.max_length)]
    assume(pieces)
    event(f"{scene.rule}, {'cut' if any(len(whole.input_ids) > scene.max_length for whole in wholes.values()) else 'all fit'}")
    with TemporaryDirectory() as name:
        encoded, packed = run_pipeline(scene, template, Path(name))
        assert encoded.rows() == [line for line, _ in pieces]
        handed = rows_of_two_epochs(scene, packed)
        places = dict(enumerate(pieces))
        expected = Counter(target for line, piece in pieces for target in targets(line, wholes[line], piece))
        assert max(expected.values()) == 1
        assert len(handed) == 2 * len(packed)
        for epoch in (0, 1):
            rows = handed[epoch * len(packed) : (epoch + 1) * len(packed)]
            assert Counter(target for row in rows for target in targets_of_row(row, places)) == expected
            assert sum(len(row.input_ids) for row in rows) == sum(end - start for _, piece in pieces for _, start, end in piece)
