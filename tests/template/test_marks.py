"""Matching a rendering against literals and texts is a proof: it reads so from its first to its last character, or there is no match."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.template import kinds
from twinkle_core.template import Template
from twinkle_core.template.marks import STEM, mark, match

words = st.text(st.sampled_from("ab \n<|"), max_size=6)


@given(st.lists(words, min_size=2, max_size=5), st.data())
def test_texts_are_found_where_they_stand(literals: list[str], data: st.DataObject) -> None:
    texts = [data.draw(words) for _ in literals[1:]]
    rendering = literals[0] + "".join(text + literal for text, literal in zip(texts, literals[1:], strict=True))
    places = match(literals, texts, rendering)
    assert places is not None
    assert [rendering[start:end] for start, end in places] == texts
    assert places[0][0] == len(literals[0])


def test_what_is_left_over_or_missing_or_changed_is_no_match() -> None:
    assert match(["<u>", "</u>"], ["x"], "<u>x</u>") == [(3, 4)]
    assert match(["<u>", "</u>"], [" x\n"], "<u>x</u>") == [(3, 4)]
    assert match(["<u>", '"'], ['say "x"'], '<u>say \\"x\\""') == [(3, 12)]
    for rendering in ("<u>x</u>!", "<u>x", "!<u>x</u>", "<u>y</u>", "<u>X</u>"):
        assert match(["<u>", "</u>"], ["x"], rendering) is None


def test_equal_shapes_are_equal_but_for_their_texts() -> None:
    one, other = (
        mark([{"role": "user", "content": text}, {"role": "assistant", "content": f"<think>{text}</think> {text}"}], STEM) for text in "xy"
    )
    assert (one.shape, one.messages) == (other.shape, other.messages)
    assert one.texts == ["x", "x", "x"]
    plain = mark([{"role": "user", "content": "x"}, {"role": "assistant", "content": "x"}], STEM)
    named = mark([{"role": "user", "content": "x", "name": "n"}, {"role": "assistant", "content": "x"}], STEM)
    blank = mark([{"role": "user", "content": " "}, {"role": "assistant", "content": "x"}], STEM)
    assert len({one.shape, plain.shape, named.shape, blank.shape}) == 4


def test_a_stop_mark_among_a_calls_arguments_does_not_end_its_turn(tokenizer_folder: Callable[[str], Path]) -> None:
    template = Template(tokenizer_folder(kinds.TOOLS))
    call = {"type": "function", "function": {"name": "read", "arguments": {"p": "x", "<|im_end|>": 1}}}
    messages = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r"},
        {"role": "assistant", "content": "y"},
    ]
    (document,) = template.encoder().planner.plan({"messages": messages}).documents  # type: ignore[typeddict-item]
    assert [document.text[start:end] for start, end, _ in document.spans] == kinds.written_tools(messages)
