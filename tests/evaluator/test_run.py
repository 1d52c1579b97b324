from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from twinkle_core.config import EvaluateConfig
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.evaluator.generate import generate
from twinkle_core.evaluator.run import choose_samples, content_hash, evaluate_model, source_of
from twinkle_core.types import IGNORE, EncodedSample, NoProgress, Trajectory


def row(source: str, index: int, *extra: tuple[str, str]) -> Trajectory:
    messages: Any = [{"role": "user", "content": f"{source} asks {index}" * (index % 3 + 1)}, {"role": "assistant", "content": str(index)}]
    return {"messages": messages, "user_data": [("source", source), *extra]}


def encoded(count: int) -> list[EncodedSample]:
    samples = []
    for seed in range(count):
        ids = np.random.RandomState(seed).randint(3, 200, size=8 + seed).astype(np.int32)
        labels = np.append(ids[1:], IGNORE).astype(np.int32)
        samples.append(EncodedSample(input_ids=ids, labels=labels))
    return samples


def test_samples_are_balanced_over_sources_whatever_the_order() -> None:
    rows = [row("a", index) for index in range(20)] + [row("b", index) for index in range(2)] + [row("c", index) for index in range(20)]
    chosen = choose_samples(rows, 9)
    assert [source_of(item) for item in chosen] == ["a", "b", "c", "a", "b", "c", "a", "c", "a"]
    hashes = [content_hash(item) for item in chosen if source_of(item) == "a"]
    assert hashes == sorted(content_hash(item) for item in rows[:20])[:4]
    random.Random(1).shuffle(rows)
    assert choose_samples(rows, 9) == chosen
    assert choose_samples(rows, 0) == []
    assert len(choose_samples(rows, 1000)) == 42


def test_a_conversation_without_an_answer_is_not_chosen() -> None:
    question: Trajectory = {"messages": [{"role": "user", "content": "?"}]}
    assert choose_samples([question, row("a", 1)], 5) == [row("a", 1)]


def test_answers_do_not_depend_on_the_batch(tiny_folder: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_folder).eval(), AutoTokenizer.from_pretrained(tiny_folder)
    prompts = [tokenizer.encode("x" * length + "y") for length in (3, 30, 9, 1, 17)]
    alone = generate(model, tokenizer, prompts, NoProgress(), max_new_tokens=12, batch_size=1)
    assert len({answer.text for answer in alone}) > 1
    for batch_size in (2, 3, 5):
        assert generate(model, tokenizer, prompts, NoProgress(), max_new_tokens=12, batch_size=batch_size) == alone


def test_generation_is_greedy_whatever_the_folder_says(tiny_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_folder, tmp_path / "model")
    settings = {"do_sample": True, "temperature": 5.0, "repetition_penalty": 3.0, "max_length": 3, "eos_token_id": [2]}
    (folder / "generation_config.json").write_text(json.dumps(settings))
    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompts = [tokenizer.encode("hello")]
    changed = generate(AutoModelForCausalLM.from_pretrained(folder), tokenizer, prompts, NoProgress(), max_new_tokens=9)
    plain = generate(AutoModelForCausalLM.from_pretrained(tiny_folder), tokenizer, prompts, NoProgress(), max_new_tokens=9)
    assert changed == plain


def test_every_stop_id_of_the_folder_ends_an_answer(tiny_folder: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_folder).eval(), AutoTokenizer.from_pretrained(tiny_folder)
    prompt = tokenizer.encode("hello")
    (free,) = generate(model, tokenizer, [prompt], NoProgress(), max_new_tokens=6)
    assert free.truncated
    model.generation_config.eos_token_id = [2, *range(3, 260)]
    (stopped,) = generate(model, tokenizer, [prompt], NoProgress(), max_new_tokens=6)
    assert (stopped.text, stopped.num_tokens, stopped.truncated) == ("", 1, False)


def test_a_prompt_beyond_the_positions_is_refused(tiny_folder: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(tiny_folder), AutoTokenizer.from_pretrained(tiny_folder)
    with pytest.raises(DataError, match="prompt 1 has 510 tokens"):
        generate(model, tokenizer, [[5], [5] * 510], NoProgress(), max_new_tokens=3)
    with pytest.raises(DataError, match="prompt 0 is empty"):
        generate(model, tokenizer, [[]], NoProgress(), max_new_tokens=3)


def test_the_result_is_plain_and_the_same_each_time_and_sums_up(tiny_folder: Path) -> None:
    rows = [row("sums", index, ("scorer", "last_number"), ("answer", "4")) for index in range(3)]
    rows += [row("talk", index) for index in range(2)]
    config = EvaluateConfig(max_samples=4, max_new_tokens=5, probes=("Who are you?",))
    sources = ["sums", "sums", "talk"]
    first = evaluate_model(tiny_folder, rows, encoded(3), config, NoProgress(), sources=sources)
    again = evaluate_model(tiny_folder, list(reversed(rows)), encoded(3), config, NoProgress(), sources=sources, batch_size=1)
    assert json.loads(json.dumps(first)) == first == again
    assert str(tiny_folder) not in json.dumps(first)
    numbers, by_source = first["numbers"]["all"], first["numbers"]["by_source"]
    assert (numbers["documents"], numbers["answers"], numbers["answers_scored"]) == (3, 4, 2)
    assert by_source["talk"]["answer_accuracy"] is None
    for key in ("documents", "loss_tokens", "answers", "answers_scored", "answers_correct"):
        assert sum(item[key] for item in by_source.values()) == numbers[key]
    total = sum(item["loss"] * item["loss_tokens"] for item in by_source.values())
    assert numbers["loss"] == pytest.approx(total / numbers["loss_tokens"], rel=1e-9)
    assert [probe["question"] for probe in first["probes"]] == ["Who are you?"]


def test_given_prompts_replace_the_folders_template(tiny_folder: Path) -> None:
    seen: list[Trajectory] = []

    def render(trajectory: Trajectory) -> list[int]:
        seen.append(trajectory)
        return [7, 8, 9]

    config = EvaluateConfig(max_samples=2, max_new_tokens=3)
    result = evaluate_model(tiny_folder, [row("a", 1), row("a", 2)], [], config, NoProgress(), sources=[], render_prompt=render)
    assert len(seen) == 2
    assert len({sample["answer"] for sample in result["samples"]}) == 1
    assert result["numbers"]["all"]["loss"] is None


def test_wrong_rows_and_folders_are_refused_before_anything_is_loaded(tiny_folder: Path, tmp_path: Path) -> None:
    config = EvaluateConfig()
    with pytest.raises(DataError, match="unknown scorer 'vibes'"):
        evaluate_model(tmp_path, [row("a", 1, ("scorer", "vibes"))], [], config, NoProgress(), sources=[])
    with pytest.raises(DataError, match="needs an 'answer'"):
        evaluate_model(tmp_path, [row("a", 1, ("scorer", "contains"))], [], config, NoProgress(), sources=[])
    with pytest.raises(DataError, match="2 encoded samples but 1 sources"):
        evaluate_model(tmp_path, [], encoded(2), config, NoProgress(), sources=["a"])
    with pytest.raises(ConfigError, match="config.json"):
        evaluate_model(tmp_path, [], [], config, NoProgress(), sources=[])


def test_a_conversation_that_the_model_cannot_read_gets_no_answer_and_is_told_of(tiny_folder: Path) -> None:
    long = row("sums", 1)
    long["messages"][0]["content"] = "word " * 5000
    config = EvaluateConfig(max_samples=4, max_new_tokens=4)
    result = evaluate_model(tiny_folder, [row("sums", 0), long], encoded(2), config, NoProgress(), sources=["sums", "sums"])
    assert result["numbers"]["all"]["answers"] == len(result["samples"]) == 1
    assert result["sampling_rule"].endswith("1 are longer than the model can read, and got no answer.")
