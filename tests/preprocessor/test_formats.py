from __future__ import annotations

from typing import Any

import pytest

from twinkle_core.errors import DataError
from twinkle_core.preprocessor.formats import convert, detect, unused_keys

BAD_CALL = [{"function": {"name": "f", "arguments": "x"}}]
PAIR = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]


@pytest.mark.parametrize(
    "row",
    [
        {"messages": PAIR},
        {"messages": PAIR, "conversations": None},
        {"conversations": PAIR, "messages": None},
        {"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]},
        {"conversations": [{"from": "user", "value": "2+2?"}, {"role": "assistant", "content": "4"}]},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]}, PAIR[1]]},
        {"instruction": "2+2?", "input": "", "output": "4"},
        {"prompt": "2+2?", "completion": "4"},
        {"prompt": PAIR[:1], "completion": PAIR[1:]},
        {"query": "2+2?", "response": "4"},
        {"question": "2+2?", "answer": "4"},
    ],
)
def test_all_layouts_of_one_exchange_are_one_trajectory(row: dict[str, Any]) -> None:
    assert convert(row, detect(row)) == {"messages": PAIR}


def test_system_history_and_input_are_kept_in_order() -> None:
    row = {"instruction": "i", "input": "x", "output": "o", "system": "s", "history": [["a", "b"]]}
    said = [(m["role"], m["content"]) for m in convert(row, "alpaca")["messages"]]
    assert said == [("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "i\nx"), ("assistant", "o")]


def test_tools_and_calls_come_back_exactly_in_their_key_order() -> None:
    tool = {"type": "function", "function": {"name": "add", "parameters": {"properties": {"z": {}, "a": {}}}}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"z": 2, "a": 10**30}}}
    row = {
        "tools": [tool],
        "messages": [PAIR[0], {"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "tool", "name": "add", "content": "ok"}],
    }
    got = convert(row, "messages")
    assert repr(got["tools"]) == repr([tool])
    assert repr(got["messages"][1]["tool_calls"]) == repr([call])
    assert got["messages"][2] == {"role": "tool", "content": "ok", "name": "add"}


def test_null_content_with_calls_is_empty_and_textual_arguments_become_an_object() -> None:
    def row(content: Any, arguments: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "time", "arguments": arguments}}
        return {"messages": [PAIR[0], {"role": "assistant", "content": content, "tool_calls": [call]}]}

    assert convert(row(None, '{"zone": "UTC"}'), "messages") == convert(row("", {"zone": "UTC"}), "messages")


def test_function_call_and_observation_turns_become_calls_and_results() -> None:
    turns = [
        {"from": "human", "value": "weather?"},
        {"from": "function_call", "value": '{"name": "sky", "arguments": {}}'},
        {"from": "observation", "value": "clear"},
    ]
    messages = convert({"conversations": turns, "tools": '[{"name": "sky"}]'}, "sharegpt")
    assert messages["messages"][1]["tool_calls"] == [{"type": "function", "function": {"name": "sky", "arguments": {}}}]
    assert messages["messages"][2]["role"] == "tool"
    assert messages["tools"] == [{"type": "function", "function": {"name": "sky"}}]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [PAIR[0], {"role": "assistant", "content": None}]}, "turn 2: the assistant turn's content is null"),
        ({"messages": [{"role": "user", "content": None}, PAIR[1]]}, "turn 1: the user turn's content is null"),
        ({"messages": [PAIR[0], {"role": "moderator", "content": "x"}]}, "turn 2: unknown role 'moderator'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}, PAIR[1]]}, "turn 1: a content part of type 'image_url'"),
        ({"messages": PAIR[:1]}, "no assistant turn"),
        ({"messages": []}, "at least one message"),
        ({"messages": PAIR, "images": ["x.png"]}, "images are not supported"),
        ({"messages": PAIR, "label": False}, "judged good or bad"),
        ({"messages": PAIR, "chosen": {}, "rejected": {"a": 1}}, "preference pair"),
        ({"messages": [PAIR[0], {**PAIR[1], "loss_weight": 0.0}]}, "'loss_weight' 0.0"),
        ({"messages": [PAIR[0], {"role": "assistant", "content": "", "tool_calls": BAD_CALL}]}, "JSON object"),
        ({"query": "a", "response": 3}, "'response' must be text"),
    ],
)  # fmt: skip
def test_what_would_be_learnt_wrongly_is_refused_with_its_reason(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        convert(row, detect(row))


def test_an_unknown_layout_names_its_keys_and_unused_keys_are_listed() -> None:
    with pytest.raises(DataError, match=r"\['text'\]"):
        detect({"text": "x"})
    assert unused_keys({"messages": [{**PAIR[0], "mood": 1}], "id": 7}, "messages") == ["id", "messages[].mood"]
