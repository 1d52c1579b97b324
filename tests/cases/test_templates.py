"""Public fault reports about chat templates and masks, with the right result (`../shared/cases`)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.template import kinds
from tests.tokenizers import tokenizer_files, train_tokenizer
from twinkle_core.config import TemplateConfig
from twinkle_core.errors import DataError
from twinkle_core.preprocessor.formats import convert
from twinkle_core.template import Outcome, Template
from twinkle_core.types import IGNORE, EncodedSample, Trajectory

CASES = Path(__file__).parents[3] / "shared" / "cases"
pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason="the shared cases are not here")


def text(case: str, file: str) -> str:
    return (CASES / case / file).read_text(encoding="utf-8")


def rows(case: str, file: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text(case, file).splitlines()]


def learnt(template: Template, sample: EncodedSample) -> list[str]:
    stretches: list[list[int]] = []
    for position, label in enumerate(sample.labels):
        if label == IGNORE:
            continue
        assert label == sample.input_ids[position + 1]
        if not position or sample.labels[position - 1] == IGNORE:
            stretches.append([])
        stretches[-1].append(int(label))
    return template.batch_decode(stretches)


@pytest.mark.parametrize("real", [True, False], ids=["qwen3", "made"])
def test_tm01_the_last_turns_thoughts_are_rendered_and_learnt(real: bool, tmp_path: Path) -> None:
    """The first turn, whose thoughts the template drops, is trained without them."""
    messages = json.loads(text("TM01", "messages.json"))["messages"]
    template = Template(tokenizer_files("qwen3") if real else train_tokenizer(tmp_path, kinds.DROPS_THINK))
    sample = template.encode({"messages": messages})
    assert sample.input_ids.tolist() == template.tokenizer.apply_chat_template(messages)["input_ids"]
    assert learnt(template, sample) == ["2<|im_end|>", "<think>\ntwo and two\n</think>\n\n4<|im_end|>"]
    assert "one and one" not in template.decode(sample.input_ids)


@pytest.mark.parametrize("file", ["no_generation_tags.jinja", "with_generation_tags.jinja"])
def test_tm03_with_and_without_tags_the_same_is_learnt(file: str, tmp_path: Path) -> None:
    specials = ("<|bos|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
    template = Template(train_tokenizer(tmp_path, text("TM03", file), specials))
    sample = template.encode(json.loads(text("TM03", "messages.json")))
    assert learnt(template, sample) == json.loads(text("TM03", "expected.json"))["supervised_text"]


def test_tm05_one_bos_in_encode_in_prompts_to_sample_from_and_in_those_to_evaluate(tmp_path: Path) -> None:
    template = Template(train_tokenizer(tmp_path, text("TM05", "bos.jinja")))
    bos = template.tokenizer.bos_token_id
    assert template.tokenizer("hello")["input_ids"][0] == bos
    asked: Any = [{"role": "user", "content": "hello"}]
    encoded = template.encode({"messages": [*asked, {"role": "assistant", "content": "there"}]}).input_ids.tolist()
    sampled = template.encode({"messages": asked}).input_ids.tolist()
    evaluated = template.render_prompt({"messages": [*asked, {"role": "assistant", "content": "there"}]})
    assert sampled == evaluated == template.tokenizer.apply_chat_template(asked, add_generation_prompt=True)["input_ids"]
    for ids in (encoded, sampled):
        assert ids[0] == bos
        assert ids.count(bos) == 1
    assert encoded[: len(sampled) - 3] == sampled[: len(sampled) - 3]


@pytest.mark.parametrize("real", [True, False], ids=["qwen3", "made"])
def test_tm10_parallel_results_are_one_user_turn_and_calls_are_learnt(real: bool, tmp_path: Path) -> None:
    messages = json.loads(text("TM10", "messages.json"))["messages"]
    template = Template(tokenizer_files("qwen3") if real else train_tokenizer(tmp_path, kinds.TOOLS))
    sample = template.encode({"messages": messages})
    assert sample.input_ids.tolist() == template.tokenizer.apply_chat_template(messages)["input_ids"]
    told = "".join(learnt(template, sample))
    assert "XX" not in told
    assert "YY" not in told
    assert all(wanted in told for wanted in ("x.txt", "y.txt", "Both read."))
    user = template.decode(sample.input_ids).split("<|im_start|>user")[-1].split("<|im_end|>")[0]
    assert "XX" in user
    assert "YY" in user


@pytest.mark.parametrize("rule", ["right", "left", "delete", "split"])
def test_tm14_truncation_that_leaves_no_label_stops_or_is_counted(rule: Any, tmp_path: Path) -> None:
    conversations: Any = rows("TM14", "all_cut.jsonl")
    template = Template(train_tokenizer(tmp_path, kinds.CHATML), TemplateConfig(max_length=32, truncation=rule))
    if rule == "right":
        with pytest.raises(DataError, match="conversation 1: no supervised token is left after truncation 'right'"):
            template.outcomes(conversations)
    elif rule == "delete":
        assert [outcome.dropped for outcome in template.outcomes(conversations)] == ["too_long"] * 8
    else:
        for outcome in template.outcomes(conversations):
            assert outcome.samples
            assert all(sample.num_loss_tokens for sample in outcome.samples)
            assert outcome.truncated_tokens == outcome.num_tokens - sum(len(sample.input_ids) for sample in outcome.samples) > 0
    skipping = Template(tmp_path, TemplateConfig(max_length=32, truncation="right", on_bad_row="skip"))
    assert all("no supervised token" in (outcome.refused or "") for outcome in skipping.outcomes(conversations))


def outcomes(template: Template, given: list[dict[str, Any]]) -> list[Outcome | str]:
    """What becomes of each row, through format and template; the reason where one of the two refuses it."""
    found: list[Outcome | str] = []
    for row in given:
        try:
            found += template.outcomes([convert(row, "messages")])
        except DataError as error:
            found.append(str(error))
    return found


def test_ds10_null_beside_a_call_is_the_empty_text_and_refused_without(tmp_path: Path) -> None:
    template = Template(train_tokenizer(tmp_path, kinds.TOOLS))
    given = rows("DS10", "null_content.jsonl")
    one, other, third, fourth = outcomes(template, given)
    assert isinstance(one, Outcome)
    assert isinstance(other, Outcome)
    assert one.samples[0].input_ids.tolist() == other.samples[0].input_ids.tolist()
    assert one.samples[0].labels.tolist() == other.samples[0].labels.tolist()
    assert "None" not in template.decode(one.samples[0].input_ids)
    assert isinstance(third, str)
    assert isinstance(fourth, str)
    with pytest.raises(DataError, match=r"conversation 2: turn 2 \(assistant\) has no content"):
        template.outcomes([given[0], given[2]])  # type: ignore[list-item]


def test_ds15_text_parts_encode_as_the_text_and_an_image_is_refused(tmp_path: Path) -> None:
    template = Template(train_tokenizer(tmp_path, kinds.CHATML))
    given = rows("DS15", "parts.jsonl")
    for found in (outcomes(template, given), [*template.outcomes(given[:2]), ""]):  # type: ignore[arg-type]
        one, other = found[:2]
        assert isinstance(one, Outcome)
        assert isinstance(other, Outcome)
        assert one.samples[0].input_ids.tolist() == other.samples[0].input_ids.tolist()
        assert one.samples[0].labels.tolist() == other.samples[0].labels.tolist()
        assert not any(bad in template.decode(other.samples[0].input_ids) for bad in ("[{", "'type'", "iVBOR"))
    refused = outcomes(template, given)[2]
    assert isinstance(refused, str)
    assert "image" in refused
    with pytest.raises(DataError, match="conversation 3: turn 1 has a part of type 'image_url'"):
        template.outcomes(given)  # type: ignore[arg-type]


def test_ds25_every_setting_that_changes_ids_or_labels_changes_them_and_is_in_the_recipe(tmp_path: Path) -> None:
    trajectory: Any = rows("DS25", "one.jsonl")[0]
    folder = train_tokenizer(tmp_path, text("DS25", "template_a.jinja"), ("<|bos|>", "</b>", "</a>"))
    base = TemplateConfig()
    changed = [
        TemplateConfig(chat_template=text("DS25", "template_b.jinja")),
        TemplateConfig(max_length=12, truncation="left"),
        TemplateConfig(learn="all"),
        TemplateConfig(default_system="be kind"),
    ]

    def made(config: TemplateConfig, row: Trajectory = trajectory) -> tuple[list[int], list[int]]:
        sample = Template(folder, config).encode(row)
        return sample.input_ids.tolist(), sample.labels.tolist()

    for config in changed:
        assert made(config) != made(base)
        assert config.recipe_dump() != base.recipe_dump()
    template = Template(folder, changed[0])
    assert template.decode(made(changed[0])[0]) == "<b:user>ping</b><b:assistant>pong</b>"
    prints_tools = TemplateConfig(chat_template="{% for t in tools or [] %}{{ t | tojson }}{% endfor %}" + text("DS25", "template_a.jinja"))
    tools: Any = {**trajectory, "tools": [{"type": "function", "function": {"name": "ping"}}]}
    assert made(prints_tools, tools) != made(prints_tools)


def test_pk01_each_rule_keeps_what_it_says_and_the_counts_add_up(tmp_path: Path) -> None:
    case, expected = json.loads(text("PK01", "lengths.json")), json.loads(text("PK01", "expected.json"))
    folder = train_tokenizer(tmp_path, kinds.CHATML)
    texts: Any = [{"messages": [], "text": "a" * (length - 2)} for length in case["lengths"]]  # and bos and eos
    lengths = [outcome.num_tokens for outcome in Template(folder).outcomes(texts)]
    assert lengths == case["lengths"]
    for rule, key in (("right", "truncate_policy"), ("left", "truncate_policy"), ("split", "split_policy"), ("delete", "drop_policy")):
        found = Template(folder, max_length=case["capacity"], truncation_strategy=rule).outcomes(texts)
        kept = sum(len(sample.input_ids) for outcome in found for sample in outcome.samples)
        dropped = [outcome for outcome in found if outcome.dropped]
        assert kept == expected[key]["kept"]
        assert kept + sum(o.truncated_tokens for o in found) + sum(o.num_tokens for o in dropped) == expected["total_tokens"]
        assert len(dropped) == expected[key].get("dropped_rows", 0)
        assert sum(o.truncated_tokens for o in found) == expected[key].get("lost", 0)
