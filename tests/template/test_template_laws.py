"""Over random conversations: the ids of the tokenizer's own one-shot rendering; learnt is what the assistant writes, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.template import conversations as said
from tests.template import kinds
from tests.tokenizers import tokenizer_files
from twinkle_core.template import Template
from twinkle_core.template.base import _load_tokenizer
from twinkle_core.types import IGNORE, Trajectory

Messages = said.Messages


@dataclass(frozen=True)
class Law:
    """A chat template with conversations that it takes, and what the assistant writes in them."""

    name: str
    conversations: st.SearchStrategy[Messages]
    written: Callable[[Messages], list[str]]
    tools: bool = False
    thinking: bool | None = None
    real: str | None = None


REAL = [
    Law("qwen3", said.conversations(calls_a_turn=2, thinks=True), said.qwen3, tools=True, real="qwen3"),
    Law("qwen3-thinking", said.conversations(calls_a_turn=2, thinks=True), said.qwen3, True, thinking=True, real="qwen3"),
    Law("qwen3-not-thinking", said.conversations(thinks=True), said.qwen3_not_thinking, True, thinking=False, real="qwen3"),
    Law("llama3_1", said.conversations(), said.stripped("<|eot_id|>"), real="llama3_1"),
    Law("deepseek_v3", said.conversations(), said.whole("<｜end▁of▁sentence｜>"), real="deepseek_v3"),
]
LARGE = [
    Law("gemma3", said.conversations(), said.stripped("<end_of_turn>"), real="gemma3"),
    Law("gptoss", said.conversations(calls_a_turn=1, thinks=True), said.harmony, tools=True, real="gptoss"),
]
MADE = [
    Law("CHATML", said.conversations(), said.whole("<|im_end|>")),
    Law("TAGGED", said.conversations(), said.whole("<|im_end|>")),
    Law("TAGGED_WITHOUT_STOP", said.conversations(), said.whole("<|im_end|>")),
    Law("STRIPS", said.conversations(), said.stripped("<|im_end|>")),
    Law("BOS", said.conversations(), said.whole("<|im_end|>")),
    Law("INST", said.conversations(), lambda m: [" " + a["content"].strip() + " <|im_end|>" for a in m if a["role"] == "assistant"]),
    Law("NO_SYSTEM", said.conversations(system=False), said.whole("<|im_end|>")),
    Law("DROPS_THINK", said.conversations(thinks=True), kinds.written_drops_think),
    Law("TOOLS", said.conversations(calls_a_turn=2), kinds.written_tools, tools=True),
    Law("LOOKS_INTO_USER", said.conversations(), said.whole("<|im_end|>")),
    Law("REWRITES", said.conversations(), lambda m: [a["content"].upper() + "<|im_end|>" for a in m if a["role"] == "assistant"]),
    Law("ENDS_WITH_NEXT_ROLE", said.conversations(), kinds.written_next_role),
]

_FEW = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))
_MANY = settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))


def obeys(law: Law, template: Template, few: bool) -> None:
    checked = [0, 0]

    @(_FEW if few else _MANY)
    @given(law.conversations, st.one_of(st.none(), said.tools_lists) if law.tools else st.none())
    def check(messages: Messages, tools: Any) -> None:
        trajectory: Trajectory = {"messages": messages}  # type: ignore[typeddict-item]
        if tools is not None:
            trajectory["tools"] = tools
        own: dict[str, Any] = {} if law.thinking is None else {"enable_thinking": law.thinking}
        text = template.tokenizer.apply_chat_template(messages, tools=tools, tokenize=False, **own)
        ids = template.tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, **own)["input_ids"]
        (document,) = template.encoder().planner.plan(trajectory).documents
        assert document.text == text
        assert [text[start:end] for start, end, _ in document.spans] == law.written(messages)
        assert all(a[1] <= b[0] for a, b in zip(document.spans, document.spans[1:], strict=False))
        sample = template.encode(trajectory)
        assert sample.input_ids.tolist() == ids
        offsets = template.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)["offset_mapping"]
        supervised = [any(start < b and a < end for a, b, _ in document.spans) for start, end in offsets]
        assert (sample.labels[:-1] != IGNORE).tolist() == supervised[1:]
        assert sample.labels[-1] == IGNORE
        checked[0] += 1
        checked[1] += len(document.spans)

    check()
    assert checked[0] >= 20
    assert checked[1] >= checked[0]


@pytest.mark.parametrize("law", MADE, ids=lambda law: law.name)
def test_templates_of_each_construct(law: Law, tokenizer_folder: Callable[[str], Path]) -> None:
    obeys(law, Template(tokenizer_folder(getattr(kinds, law.name)), max_length=10**6), few=True)


@pytest.mark.slow
@pytest.mark.parametrize("law", MADE, ids=lambda law: law.name)
def test_templates_of_each_construct_at_length(law: Law, tokenizer_folder: Callable[[str], Path]) -> None:
    obeys(law, Template(tokenizer_folder(getattr(kinds, law.name)), max_length=10**6), few=False)


@cache
def own_tokenizer(real: str) -> Any:
    """The tokenizer that a template is held to, loaded once for all laws (it takes a second, and nothing is set on it)."""
    return _load_tokenizer(tokenizer_files(real), None)


def real_template(law: Law) -> Template:
    assert law.real is not None
    template = Template(tokenizer_files(law.real), max_length=10**6, enable_thinking=law.thinking)
    template.tokenizer = own_tokenizer(law.real)
    return template


@pytest.mark.parametrize("law", [*REAL, *(pytest.param(law, marks=pytest.mark.slow) for law in LARGE)], ids=lambda law: law.name)
def test_real_tokenizers(law: Law) -> None:
    obeys(law, real_template(law), few=True)


@pytest.mark.slow
@pytest.mark.parametrize("law", [*REAL, *LARGE], ids=lambda law: law.name)
def test_real_tokenizers_at_length(law: Law) -> None:
    obeys(law, real_template(law), few=False)


@pytest.mark.slow
def test_smollm2(smollm2: Path) -> None:
    obeys(Law("smollm2", said.conversations(), said.whole("<|im_end|>")), Template(smollm2, max_length=10**6), few=False)
