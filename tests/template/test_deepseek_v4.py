"""DeepSeek V4's chat format; the expected texts are written by hand from the description of the format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinkle_core.errors import ConfigError, DataError
from twinkle_core.template import Template
from twinkle_core.template.deepseek_v4 import DeepseekV4Template
from twinkle_core.template.tool_calls import parse_tool_calls
from twinkle_core.types import IGNORE, EncodedSample

BOS, EOS, USER, ASSISTANT = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"
TOOLS_FILE = 'import os\nTOOLS_TEMPLATE = """## Use\n\n<{dsml_token}tool_calls> after {thinking_end_token}\n\n{tool_schemas}\n\nEnd.\n"""\n'
TOOLS = [{"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("look", "count")]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte tokenizer with DeepSeek's special tokens, no chat template, and a description of tools."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token=BOS, eos_token=EOS, extra_special_tokens=[USER, ASSISTANT])
    tokenizer.add_tokens(["<think>", "</think>", "｜DSML｜"])
    made = tmp_path_factory.mktemp("deepseek_v4")
    tokenizer.save_pretrained(made)
    (made / "encoding").mkdir()
    (made / "encoding" / "encoding_dsv4.py").write_text(TOOLS_FILE, encoding="utf-8")
    return made


def two_turns() -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "2", "reasoning_content": "one and one"},
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4", "reasoning_content": "two and two"},
    ]


def with_calls() -> list[dict[str, Any]]:
    calls = [("c1", "look", {"at": 'a "cat"', "times": 2}), ("c2", "count", {})]
    return [
        {"role": "user", "content": "Look."},
        {"role": "assistant", "content": "Sure.", "reasoning_content": "r1", "tool_calls": [
            {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}} for id, name, arguments in calls]},
        {"role": "tool", "tool_call_id": "c2", "content": "three"},
        {"role": "tool", "tool_call_id": "c1", "content": "seen"},
        {"role": "user", "content": "And?"},
        {"role": "assistant", "content": "Done.", "reasoning_content": "r2"},
    ]  # fmt: skip


def text_of(template: Template, sample: EncodedSample) -> str:
    return template.decode(sample.input_ids)


def learnt(template: Template, sample: EncodedSample) -> list[str]:
    targets = np.flatnonzero(sample.labels != IGNORE)
    assert (sample.labels[targets] == sample.input_ids[targets + 1]).all()
    return [template.decode(sample.labels[run]) for run in np.split(targets, np.flatnonzero(np.diff(targets) != 1) + 1)]


def test_thinking_keeps_the_reasoning_after_the_last_question(folder: Path) -> None:
    template = DeepseekV4Template(folder, enable_thinking=True)
    sample = template.encode({"messages": two_turns()})  # type: ignore[typeddict-item]
    assert text_of(template, sample) == (
        f"{BOS}Be brief.{USER}1+1?{ASSISTANT}</think>2{EOS}{USER}2+2?{ASSISTANT}<think>two and two</think>4{EOS}"
    )
    assert learnt(template, sample) == [f"2{EOS}", f"two and two</think>4{EOS}"]


def test_chat_mode_leaves_reasoning_out(folder: Path) -> None:
    template = DeepseekV4Template(folder, enable_thinking=False)
    sample = template.encode({"messages": two_turns()})  # type: ignore[typeddict-item]
    assert text_of(template, sample) == f"{BOS}Be brief.{USER}1+1?{ASSISTANT}</think>2{EOS}{USER}2+2?{ASSISTANT}</think>4{EOS}"
    assert learnt(template, sample) == [f"2{EOS}", f"4{EOS}"]


def test_tools_stand_in_the_system_turn_and_calls_are_dsml_with_results_in_the_order_of_the_calls(folder: Path) -> None:
    template = DeepseekV4Template(folder, enable_thinking=True)
    sample = template.encode({"messages": with_calls(), "tools": TOOLS})  # type: ignore[typeddict-item]
    calls = (
        '\n\n<｜DSML｜tool_calls>\n<｜DSML｜invoke name="look">\n'
        '<｜DSML｜parameter name="at" string="true">a "cat"</｜DSML｜parameter>\n'
        '<｜DSML｜parameter name="times" string="false">2</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
        '<｜DSML｜invoke name="count">\n\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>'
    )
    assert text_of(template, sample) == (
        f"{BOS}\n\n## Use\n\n<｜DSML｜tool_calls> after </think>\n\n"
        '{"name": "look", "parameters": {"type": "object"}}\n{"name": "count", "parameters": {"type": "object"}}\n\nEnd.\n'
        f"{USER}Look.{ASSISTANT}<think>r1</think>Sure.{calls}{EOS}"
        f"{USER}<tool_result>seen</tool_result>\n\n<tool_result>three</tool_result>\n\nAnd?{ASSISTANT}<think>r2</think>Done.{EOS}"
    )
    assert learnt(template, sample) == [f"r1</think>Sure.{calls}{EOS}", f"r2</think>Done.{EOS}"]
    assert [call["function"] for call in parse_tool_calls(calls, "dsml")] == [
        call["function"] for call in with_calls()[1]["tool_calls"]
    ]  # fmt: skip


def test_arguments_given_as_json_text_are_the_same_calls(folder: Path) -> None:
    template, messages = DeepseekV4Template(folder, enable_thinking=True), with_calls()
    messages[1]["tool_calls"][0]["function"]["arguments"] = '{"at": "a \\"cat\\"", "times": 2}'
    messages[1]["tool_calls"][1]["function"]["arguments"] = "{}"
    as_text, as_objects = (template.encode({"messages": rows, "tools": TOOLS}) for rows in (messages, with_calls()))  # type: ignore[typeddict-item]
    assert as_text.input_ids.tolist() == as_objects.input_ids.tolist()


def test_reasoning_inside_the_content_is_the_same_reasoning(folder: Path) -> None:
    template = DeepseekV4Template(folder, enable_thinking=True)
    inline: Any = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "<think>why</think>so"}]
    apart: Any = [inline[0], {"role": "assistant", "content": "so", "reasoning_content": "why"}]
    one, other = template.encode({"messages": inline}), template.encode({"messages": apart})
    assert one.input_ids.tolist() == other.input_ids.tolist()


def test_reasoning_is_not_dropped_without_a_word(folder: Path) -> None:
    with pytest.raises(DataError, match="set enable_thinking true to learn it, or false to leave it out"):
        DeepseekV4Template(folder).encode({"messages": two_turns()})  # type: ignore[typeddict-item]
    plain: Any = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    template = DeepseekV4Template(folder)
    assert text_of(template, template.encode({"messages": plain})) == f"{BOS}{USER}q{ASSISTANT}</think>a{EOS}"


def test_tools_without_the_models_description_of_them_are_refused(folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    with pytest.raises(DataError, match=r"tools need encoding/encoding_dsv4.py in the folder of the model"):
        DeepseekV4Template(tmp_path, enable_thinking=True).encode({"messages": with_calls(), "tools": TOOLS})  # type: ignore[typeddict-item]
    for content, reason in (
        ("x = 1", "has no text TOOLS_TEMPLATE"),
        ("TOOLS_TEMPLATE = 'x'", "no place {tool_schemas}"),
        ("def", "cannot read"),
    ):
        (tmp_path / "encoding").mkdir(exist_ok=True)
        (tmp_path / "encoding" / "encoding_dsv4.py").write_text(content)
        with pytest.raises(ConfigError, match=reason):
            DeepseekV4Template(tmp_path)


def test_the_folders_code_is_not_run(folder: Path, tmp_path: Path) -> None:
    for path in folder.glob("*.json"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    (tmp_path / "encoding").mkdir()
    (tmp_path / "encoding" / "encoding_dsv4.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + TOOLS_FILE)
    DeepseekV4Template(tmp_path)
    assert not (tmp_path / "ran").exists()


def test_a_chat_template_of_the_config_goes_first(folder: Path) -> None:
    template = DeepseekV4Template(folder, chat_template="{% for m in messages %}{{ m.content }}<｜end▁of▁sentence｜>{% endfor %}")
    plain: Any = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    assert text_of(template, template.encode({"messages": plain})) == f"q{EOS}a{EOS}"
