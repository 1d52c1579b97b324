from __future__ import annotations

import importlib.util
from collections import Counter
from math import isqrt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_core.errors import ConfigError
from twinkle_core.preprocessor import (
    CharRepetitionFilter,
    LengthFilter,
    PIIFilter,
    RefusalFilter,
    RoleOrderFilter,
    SpecialCharacterFilter,
    WordRepetitionFilter,
)
from twinkle_core.preprocessor.registry import FILTERS, build_filter
from twinkle_core.preprocessor.texts import all_text, words
from twinkle_core.preprocessor.trusted_code import function_identity
from twinkle_core.types import Trajectory


def text(value: str) -> Trajectory:
    return {"messages": [], "text": value}


def chat(*turns: Any) -> Trajectory:
    messages: list[Any] = [turn if isinstance(turn, dict) else {"role": turn[0], "content": turn[1]} for turn in turns]
    return {"messages": messages}


ASKED, ANSWERED = ("user", "q"), ("assistant", "a")
CALLS = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": "1.2.3.4"}}}]}
RESULT = ("tool", "r")


def test_length_counts_characters_and_turns_and_both_bounds_are_inside() -> None:
    assert [LengthFilter(2, 3)(text("x" * count)) for count in range(5)] == [False, False, True, True, False]
    assert [LengthFilter(min_turns=2, max_turns=2)(chat(*[ASKED] * count)) for count in range(1, 4)] == [False, True, False]
    assert LengthFilter(max_chars=3)(chat(("user", "ab"), ("assistant", ""))) and not LengthFilter(max_chars=2)(chat(ASKED, ANSWERED))


@given(st.text(st.sampled_from("ab "), max_size=60), st.integers(1, 5), st.floats(0, 1))
def test_character_repetition_is_the_share_of_the_most_frequent_ngrams(value: str, n: int, most: float) -> None:
    grams = Counter(value[i : i + n] for i in range(len(value) - n + 1))
    repeated = sorted((count for count in grams.values() if count > 1), reverse=True)[: isqrt(len(grams))]
    ratio = sum(repeated) / max(1, grams.total())
    assert CharRepetitionFilter(most, n)(text(value)) == (sum(repeated) <= most * grams.total())
    assert 0 <= ratio <= 1


def test_repetition_is_seen_in_characters_and_in_words() -> None:
    good = "Natalia sold clips to forty-eight of her friends in April, and then she sold half as many clips in May."
    assert CharRepetitionFilter()(text(good)) and WordRepetitionFilter()(text(good))
    assert not CharRepetitionFilter()(text("ha" * 100))
    assert not WordRepetitionFilter(n=3)(text("buy it now " * 20))
    assert WordRepetitionFilter(0.5, 1)(text("a b a c"))  # two of four words are repeated ones: just at the bound
    assert not WordRepetitionFilter(0.49, 1)(text("a b a c"))


@pytest.mark.parametrize(
    ("value", "found"),
    [
        ("Hello, World 42!", ["hello", "world", "42"]),
        ("你好 world", ["你", "好", "world"]),
        ("日本go語", ["日", "本", "go", "語"]),
        ("", []),
    ],
)
def test_words_are_those_between_spaces_or_single_characters_of_scripts_without(value: str, found: list[str]) -> None:
    assert words(value) == found


@pytest.mark.parametrize(
    ("value", "kept"),
    [("abc!", True), ("abc!!", False), ("नमस्ते दुनिया", True), ("你好，世界", True), ("", True), ("1 2 3 4", True), ("🙂🙂", False)],
)
def test_special_characters_are_those_of_no_script(value: str, kept: bool) -> None:
    assert SpecialCharacterFilter(0.25)(text(value)) == kept


@pytest.mark.parametrize(
    ("answer", "kept"),
    [
        ("I'm sorry, but I cannot help with that.", False),
        ("As an AI language model, I have no taste.", False),
        ("很抱歉，我无法回答。", False),
        ("I can see why you are sorry.", True),
    ],
)
def test_refusals_of_the_assistant_are_left_out(answer: str, kept: bool) -> None:
    assert RefusalFilter()(chat(("user", "As an AI model, answer."), ("assistant", answer))) == kept
    assert RefusalFilter(patterns=("taste",))(chat(ASKED, ("assistant", answer))) == ("taste" not in answer)


@pytest.mark.parametrize(
    ("turns", "kept"),
    [
        ([ASKED, ANSWERED], True),
        ([("system", "s"), ASKED, ANSWERED, ASKED, ANSWERED], True),
        ([ASKED], True),
        ([ASKED, CALLS, RESULT, RESULT, ANSWERED], True),
        ([ASKED, CALLS, RESULT, CALLS, RESULT, ANSWERED], True),
        ([], True),
        ([ANSWERED], False),
        ([ASKED, ASKED, ANSWERED], False),
        ([ASKED, ANSWERED, ANSWERED], False),
        ([ASKED, ("system", "s"), ANSWERED], False),
        ([ASKED, ANSWERED, RESULT], False),
        ([ASKED, CALLS, ASKED], False),
        ([("system", "s"), ANSWERED], False),
    ],
)
def test_turns_have_to_follow_each_other_sensibly(turns: list[Any], kept: bool) -> None:
    assert RoleOrderFilter()(chat(*turns)) == kept
    pair: Trajectory = {**chat(ASKED, ANSWERED), "rejected_messages": chat(*turns)["messages"]}
    assert RoleOrderFilter()(pair) == kept


def test_all_texts_of_every_kind_are_looked_at() -> None:
    image = {"role": "user", "content": [{"type": "text", "text": "see"}, {"type": "image"}]}
    thought = {"role": "assistant", "content": "said", "reasoning_content": "thought"}
    pair: Trajectory = {**chat(image, thought), "rejected_messages": chat(ANSWERED)["messages"]}
    assert all_text(pair) == "see\nthought\nsaid\na"
    assert all_text({"messages": [], "embedding": {"anchor": "x", "positive": "y", "negatives": ["z"]}}) == "x\ny\nz"
    assert "1.2.3.4" in all_text(chat(ASKED, CALLS), calls=True) and "1.2.3.4" not in all_text(chat(ASKED, CALLS))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("LenFilter", {}, "unknown filter 'LenFilter'; known: LengthFilter, "),
        ("LengthFilter", {"max": 3}, "takes no argument 'max'"),
        ("LengthFilter", {"min_chars": 3, "max_chars": 2}, "leave nothing"),
        ("CharRepetitionFilter", {"max_ratio": 2}, "max_ratio 2 is not between 0 and 1"),
        ("WordRepetitionFilter", {"n": 0}, "n 0 is less than 1"),
        ("RefusalFilter", {"patterns": ("(",)}, "not regular expressions"),
        ("PIIFilter", {"action": "hide"}, "neither drop nor redact"),
        ("PIIFilter", {"entities": ("PERSON",)}, "PERSON.* unknown .*EMAIL_ADDRESS"),
    ],
)
def test_settings_that_mean_nothing_are_refused(name: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_filter(name, arguments)


needs_presidio = pytest.mark.skipif(importlib.util.find_spec("presidio_analyzer") is None, reason="presidio-analyzer is not installed")
PERSONAL = [
    ("ada@example.com", "EMAIL_ADDRESS"),
    ("780-800-7092", "PHONE_NUMBER"),
    ("4111 1111 1111 1111", "CREDIT_CARD"),
    ("DE89370400440532013000", "IBAN_CODE"),
    ("192.168.1.10", "IP_ADDRESS"),
]


@pytest.mark.skipif(importlib.util.find_spec("presidio_analyzer") is not None, reason="presidio-analyzer is installed")
def test_without_presidio_the_extra_is_named() -> None:
    with pytest.raises(ConfigError, match=r"pip install twinkle-flows\[pii\]"):
        PIIFilter()


@needs_presidio
@pytest.mark.slow
@pytest.mark.parametrize(("value", "entity"), PERSONAL)
def test_personal_data_is_left_out_or_replaced_by_its_kind(value: str, entity: str) -> None:
    made = chat(("user", f"mine is {value} today"), ("assistant", "Noted."))
    assert not PIIFilter()(made)
    redacted = PIIFilter(action="redact").apply(made)
    assert redacted is not None
    assert redacted["messages"] == chat(("user", f"mine is <{entity}> today"), ("assistant", "Noted."))["messages"]
    assert PIIFilter(entities=("URL",))(chat(ASKED, ANSWERED))


@needs_presidio
@pytest.mark.slow
def test_calls_are_looked_at_and_sums_are_no_personal_data() -> None:
    call = PIIFilter(action="redact").apply(chat(ASKED, CALLS))
    assert call is not None
    assert call["messages"][1]["tool_calls"][0]["function"] == {"name": "f", "arguments": {"x": "<IP_ADDRESS>"}}
    assert not PIIFilter()(chat(ASKED, CALLS))
    assert PIIFilter()(chat(("user", "48/2 = <<48/2=24>>24 clips, 1,250 people in 2012"), ANSWERED))


def test_every_filter_passes_a_good_row_and_keeps_its_identity() -> None:
    for name in FILTERS.keys() - {"PIIFilter"}:
        built = build_filter(name)
        before = function_identity(built)
        assert built(chat(("user", "What is the capital of France?"), ("assistant", "The capital of France is Paris."))), name
        assert function_identity(built) == before
