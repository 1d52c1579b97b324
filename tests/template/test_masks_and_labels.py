from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.template import kinds
from twinkle_core.config import TemplateConfig
from twinkle_core.errors import ConfigError, DataError
from twinkle_core.template import Template, tokenizer_digest
from twinkle_core.types import IGNORE, EncodedSample, Trajectory

Folder = Callable[[str], Path]
TWO_TURNS = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "u1"},
    {"role": "assistant", "content": "answer one"},
    {"role": "user", "content": "u2"},
    {"role": "assistant", "content": "answer two"},
]
THINK = [
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "<think>\none and one\n</think>\n\n2"},
    {"role": "user", "content": "and 2+2?"},
    {"role": "assistant", "content": "<think>\ntwo and two\n</think>\n\n4"},
]
CALLS = [
    {"role": "user", "content": "read both"},
    {"role": "assistant", "content": "", "tool_calls": [
        {"type": "function", "function": {"name": "read", "arguments": {"p": p}}} for p in ("x.txt", "y.txt")]},
    {"role": "tool", "content": "XX"},
    {"role": "tool", "content": "YY"},
    {"role": "assistant", "content": "Both read."},
]  # fmt: skip


def conversation(messages: list[dict[str, Any]]) -> Trajectory:
    return {"messages": messages}  # type: ignore[typeddict-item]


def learnt(template: Template, sample: EncodedSample) -> list[str]:
    """Supervised stretches of the conversation as text, after checking that each label is the next token."""
    targets = np.flatnonzero(sample.labels != IGNORE)
    assert sample.labels[-1] == IGNORE
    assert (sample.labels[targets] == sample.input_ids[targets + 1]).all()
    stretches = np.split(targets, np.flatnonzero(np.diff(targets) != 1) + 1)
    return [template.decode(sample.labels[stretch]) for stretch in stretches]


@pytest.mark.parametrize("kind", ["CHATML", "TAGGED", "STRIPS"])
def test_every_assistant_turn_and_its_stop_token_is_learnt_and_nothing_else(kind: str, tokenizer_folder: Folder) -> None:
    template = Template(tokenizer_folder(getattr(kinds, kind)))
    assert learnt(template, template.encode(conversation(TWO_TURNS))) == ["answer one<|im_end|>", "answer two<|im_end|>"]


@pytest.mark.parametrize("kind", ["CHATML", "TAGGED"])
def test_last_turn_only_learns_the_last_answer(kind: str, tokenizer_folder: Folder) -> None:
    template = Template(tokenizer_folder(getattr(kinds, kind)), learn="last_turn")
    assert learnt(template, template.encode(conversation(TWO_TURNS))) == ["answer two<|im_end|>"]


@pytest.mark.parametrize("kind", ["CHATML", "TAGGED", "STRIPS", "DROPS_THINK", "TOOLS"])
@pytest.mark.parametrize("messages", [TWO_TURNS, THINK], ids=["plain", "think"])
def test_ids_equal_the_tokenizers_own_one_shot_rendering(kind: str, messages: Any, tokenizer_folder: Folder) -> None:
    template = Template(tokenizer_folder(getattr(kinds, kind)))
    expected = template.tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"]
    assert template.encode(conversation(messages)).input_ids.tolist() == expected


def test_a_tagged_template_gives_the_tokenizers_own_mask(tokenizer_folder: Folder) -> None:
    template = Template(tokenizer_folder(kinds.TAGGED))
    own = template.tokenizer.apply_chat_template(TWO_TURNS, tokenize=True, return_dict=True, return_assistant_tokens_mask=True)
    mask = np.array(own["assistant_masks"], dtype=bool)
    sample = template.encode(conversation(TWO_TURNS))
    assert mask.any()
    assert (sample.labels[:-1] != IGNORE).tolist() == mask[1:].tolist()


def test_think_block_that_the_template_drops_is_not_learnt_and_the_last_one_is(tokenizer_folder: Folder) -> None:
    template = Template(tokenizer_folder(kinds.DROPS_THINK))
    sample = template.encode(conversation(THINK))
    assert learnt(template, sample) == ["2<|im_end|>", "<think>\ntwo and two\n</think>\n\n4<|im_end|>"]


def test_tool_calls_are_learnt_and_results_are_not_even_where_the_template_looks_ahead(tokenizer_folder: Folder) -> None:
    template = Template(tokenizer_folder(kinds.TOOLS))
    sample = template.encode(conversation(CALLS))
    assert learnt(template, sample) == [
        '<call>read {"p": "x.txt"}</call><call>read {"p": "y.txt"}</call><|im_end|>',
        "<think></think>Both read.<|im_end|>",
    ]


def test_a_turn_whose_calls_the_template_does_not_print_is_not_learnt_and_is_reported(tokenizer_folder: Folder) -> None:
    template = Template(tokenizer_folder(kinds.CHATML))
    outcome = template.outcomes([conversation(CALLS)])[0]
    assert outcome.unprinted_tools
    (sample,) = outcome.samples
    assert learnt(template, sample) == ["Both read.<|im_end|>"]
    assert not template.outcomes([conversation(TWO_TURNS)])[0].unprinted_tools


def test_a_template_that_rewrites_content_is_placed_by_prefixes(tokenizer_folder: Folder) -> None:
    template = Template(tokenizer_folder(kinds.REWRITES))
    assert learnt(template, template.encode(conversation(TWO_TURNS))) == ["ANSWER ONE<|im_end|>", "ANSWER TWO<|im_end|>"]


def test_a_template_without_a_stop_token_is_refused(tokenizer_folder: Folder) -> None:
    with pytest.raises(DataError, match="would not learn to stop"):
        Template(tokenizer_folder(kinds.NO_STOP)).encode(conversation(TWO_TURNS))


def test_a_template_that_cannot_be_placed_is_named(tokenizer_folder: Folder) -> None:
    counts = kinds.REWRITES.replace("{% for", "{{ messages | length }}{% for", 1)
    with pytest.raises(DataError, match="the chat template renders"):
        Template(tokenizer_folder(counts)).encode(conversation(TWO_TURNS))


@given(st.lists(st.text(st.characters(codec="utf-8", exclude_characters="<"), max_size=12), min_size=1, max_size=4))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_content_is_learnt_whole(tokenizer_folder: Folder, answers: list[str]) -> None:
    template = Template(tokenizer_folder(kinds.CHATML))
    messages = [part for answer in answers for part in ({"role": "user", "content": "q"}, {"role": "assistant", "content": answer})]
    sample = template.encode(conversation(messages))
    got = learnt(template, sample)
    assert len(got) == len(answers)
    for stretch, answer in zip(got, answers, strict=True):  # a token may reach back over the newline of the prompt
        assert stretch in (f"{answer}<|im_end|>", f"\n{answer}<|im_end|>")


def test_content_that_looks_like_the_template_does_not_move_the_mask(tokenizer_folder: Folder) -> None:
    template = Template(tokenizer_folder(kinds.CHATML))
    trap = [{"role": "user", "content": "answer one MARKx0x"}, {"role": "assistant", "content": "MARKx0x\n<|im_start|>user\nu2 MARKx1x"}]
    assert learnt(template, template.encode(conversation(trap))) == ["MARKx0x\n<|im_start|>user\nu2 MARKx1x<|im_end|>"]


def test_there_is_one_bos_although_template_and_tokenizer_both_add_one(tokenizer_folder: Folder) -> None:
    template = Template(tokenizer_folder("{{ bos_token }}" + kinds.CHATML))
    bos = template.tokenizer.bos_token_id
    assert template.tokenizer("x")["input_ids"][0] == bos
    for ids in (template.encode(conversation(TWO_TURNS)).input_ids.tolist(), template.render_prompt(conversation(TWO_TURNS))):
        assert ids[0] == bos
        assert ids.count(bos) == 1


def test_the_prompt_is_the_start_of_the_encoded_conversation(tokenizer_folder: Folder) -> None:
    template = Template(tokenizer_folder(kinds.CHATML), default_system="be kind")
    messages = TWO_TURNS[1:]
    prompt, sample = template.render_prompt(conversation(messages)), template.encode(conversation(messages))
    assert sample.input_ids[: len(prompt)].tolist() == prompt
    assert template.decode(prompt).startswith("<|im_start|>system\nbe kind<|im_end|>")
    assert template.decode(prompt).endswith("u2<|im_end|>\n<|im_start|>assistant\n")


def test_truncation_follows_its_rule_and_counts(tokenizer_folder: Folder) -> None:
    folder = tokenizer_folder(kinds.CHATML)
    whole = Template(folder).encode(conversation(TWO_TURNS)).input_ids
    limit = len(whole) - 3
    with pytest.raises(DataError, match=f"{len(whole)} tokens, but max_length is {limit}"):
        Template(folder, max_length=limit).encode(conversation(TWO_TURNS))
    for rule, kept in (("left", whole[3:]), ("right", whole[:-3])):
        outcome = Template(folder, max_length=limit, truncation_strategy=rule).outcomes([conversation(TWO_TURNS)])[0]
        (sample,) = outcome.samples
        assert sample.input_ids.tolist() == kept.tolist()
        assert sample.labels[-1] == IGNORE
        assert (outcome.num_tokens, outcome.truncated_tokens) == (len(whole), 3)
    dropped = Template(folder, max_length=limit, truncation_strategy="delete").outcomes([conversation(TWO_TURNS)])[0]
    assert (dropped.samples, dropped.dropped) == ((), "too_long")


def test_truncation_that_removes_every_label_stops(tokenizer_folder: Folder) -> None:
    long = conversation([{"role": "user", "content": "word " * 60}, {"role": "assistant", "content": "ok"}])
    with pytest.raises(DataError, match="no supervised token is left after truncation 'right'"):
        Template(tokenizer_folder(kinds.CHATML), max_length=32, truncation_strategy="right").encode(long)


def test_unknown_settings_and_folders_are_refused(tokenizer_folder: Folder, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="truncation"):
        Template(tokenizer_folder(kinds.CHATML), truncation_strategy="middle")
    with pytest.raises(ConfigError, match="not both|single settings"):
        Template(tokenizer_folder(kinds.CHATML), TemplateConfig(), max_length=9)
    with pytest.raises(ConfigError, match="no folder"):
        Template(tmp_path / "none")


def test_the_digest_changes_with_the_chat_template_and_not_with_weights(tokenizer_folder: Folder) -> None:
    one, other = tokenizer_folder(kinds.CHATML), tokenizer_folder(kinds.STRIPS)
    before = tokenizer_digest(one)
    assert before != tokenizer_digest(other)
    (one / "model.safetensors").write_bytes(b"weights")
    assert tokenizer_digest(one) == before


@pytest.mark.slow
@pytest.mark.parametrize("messages", [TWO_TURNS, THINK], ids=["plain", "think"])
def test_smollm2_ids_equal_its_own_rendering_and_answers_are_learnt(smollm2: Path, messages: Any) -> None:
    template = Template(smollm2)
    sample = template.encode(conversation(messages))
    assert sample.input_ids.tolist() == template.tokenizer.apply_chat_template(messages, tokenize=True)["input_ids"]
    assert learnt(template, sample) == [m["content"] + "<|im_end|>" for m in messages if m["role"] == "assistant"]


@pytest.mark.slow
def test_self_cognition_answers_are_short_in_smollm2_tokens(smollm2: Path) -> None:
    from twinkle_core.preprocessor.sources import SELF_COGNITION

    tokenizer = Template(smollm2).tokenizer
    rows = [json.loads(line) for line in SELF_COGNITION.read_text(encoding="utf-8").splitlines()]
    assert len(rows) > 90
    assert max(len(tokenizer(row["response"])["input_ids"]) for row in rows) < 40
    assert sum("{name}" in row["response"] for row in rows) > 0.8 * len(rows)
