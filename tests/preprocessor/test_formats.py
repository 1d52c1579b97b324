from __future__ import annotations

import json
from typing import Any

import pytest

from twinkle_core.errors import DataError
from twinkle_core.preprocessor.formats import FORMATS, convert, detect, unused_keys
from twinkle_core.types import kind_of

BAD_CALL = [{"function": {"name": "f", "arguments": "x"}}]
PAIR = [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
WRONG = [PAIR[0], {"role": "assistant", "content": "5"}]


@pytest.mark.parametrize(
    ("row", "layout"),
    [
        ({"messages": PAIR}, "messages"),
        ({"messages": PAIR, "conversations": None}, "messages"),
        ({"conversations": PAIR, "messages": None}, "sharegpt"),
        ({"conversations": [{"from": "human", "value": "2+2?"}, {"from": "gpt", "value": "4"}]}, "sharegpt"),
        ({"conversations": [{"from": "user", "value": "2+2?"}, {"role": "assistant", "content": "4"}]}, "sharegpt"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]}, PAIR[1]]},
            "messages",
        ),
        ({"messages": [PAIR[0], {"role": "assistant", "content": [{"type": "text", "value": "4"}]}]}, "messages"),
        ({"instruction": "2+2?", "input": "", "output": "4"}, "alpaca"),
        ({"prompt": "2+2?", "completion": "4"}, "prompt_completion"),
        ({"prompt": PAIR[:1], "completion": PAIR[1:]}, "prompt_completion"),
        ({"query": "2+2?", "response": "4"}, "query_response"),
        ({"question": "2+2?", "answer": "4"}, "query_response"),
    ],
)
def test_all_layouts_of_one_exchange_are_one_trajectory(row: dict[str, Any], layout: str) -> None:
    assert detect(row) == layout
    assert convert(row, layout) == {"messages": PAIR}


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


def test_reasoning_and_tool_call_parts_become_fields_of_the_message() -> None:
    parts = [
        {"type": "reasoning", "value": "think"},
        {"type": "tool_call", "value": '{"name": "f", "arguments": {"b": 1, "a": 2}}'},
        {"type": "tool_call", "value": '{"name": "g", "arguments": {}}'},
    ]
    message = convert({"messages": [PAIR[0], {"role": "assistant", "content": parts}]}, "messages")["messages"][1]
    calls = [{"name": "f", "arguments": {"b": 1, "a": 2}}, {"name": "g", "arguments": {}}]
    assert message == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": call} for call in calls],
        "reasoning_content": "think",
    }
    assert list(message["tool_calls"][0]["function"]["arguments"]) == ["b", "a"]


@pytest.mark.parametrize(
    ("given", "weight"),
    [({"loss": True}, 1.0), ({"loss": False}, 0.0), ({"weight": 0}, 0.0), ({"loss_weight": 0.5}, 0.5), ({"loss": True, "weight": 1}, 1.0)],
)
def test_what_a_message_says_of_its_loss_is_its_loss_weight(given: dict[str, Any], weight: float) -> None:
    messages = convert({"messages": [PAIR[0], {**PAIR[1], **given}]}, "messages")["messages"]
    assert messages == [PAIR[0], {**PAIR[1], "loss_weight": weight}]
    assert isinstance(messages[1]["loss_weight"], float)


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": "2+2?", "chosen": "4", "rejected": "5"},
        {"prompt": PAIR[:1], "chosen": PAIR[1:], "rejected": WRONG[1:]},
        {"chosen": PAIR, "rejected": WRONG},
        {"prompt": "2+2?", "chosen": PAIR, "rejected": WRONG},
        {
            "conversations": [{"from": "human", "value": "2+2?"}],
            "chosen": {"from": "gpt", "value": "4"},
            "rejected": {"from": "gpt", "value": "5"},
        },
        {"instruction": "2+2?", "input": "", "chosen": "4", "rejected": "5"},
        {"messages": PAIR, "rejected_messages": WRONG},
    ],
)
def test_all_layouts_of_a_preference_are_one_pair_of_whole_conversations(row: dict[str, Any]) -> None:
    got = convert(row, detect(row))
    assert got == {"messages": PAIR, "rejected_messages": WRONG}
    assert kind_of(got) == "preference"


def test_a_system_text_stands_before_both_sides_of_a_pair() -> None:
    got = convert({"chosen": PAIR, "rejected": WRONG, "system": "s"}, "preference")
    system = {"role": "system", "content": "s"}
    assert got == {"messages": [system, *PAIR], "rejected_messages": [system, *WRONG]}


@pytest.mark.parametrize("good", [True, False])
@pytest.mark.parametrize("key", ["label", "kto_tag", "desirable"])
@pytest.mark.parametrize("row", [{"messages": PAIR}, {"conversations": PAIR}, {"prompt": "2+2?", "completion": "4"}])
def test_a_judged_row_keeps_its_judgement(row: dict[str, Any], key: str, good: bool) -> None:
    judged = {**row, key: good}
    assert convert(judged, detect(judged)) == {"messages": PAIR, "desirable": good}


@pytest.mark.parametrize(
    ("row", "user_data"),
    [
        ({"prompt": "2+2?", "answer": "4"}, [("ground_truth", "4"), ("scorer", "last_number"), ("answer", "4")]),
        ({"question": "2+2?", "ground_truth": 4}, [("ground_truth", "4"), ("scorer", "last_number"), ("answer", "4")]),
        ({"messages": PAIR[:1], "solution": "so #### 4"},
         [("ground_truth", "so #### 4"), ("scorer", "last_number"), ("answer", "so #### 4")]),
        ({"prompt": PAIR[:1], "reward_model": {"style": "rule", "ground_truth": "x^2"}}, [("ground_truth", "x^2"), ("answer", "x^2")]),
        ({"prompt": "2+2?", "answer": "four", "scorer": "exact"}, [("ground_truth", "four"), ("scorer", "exact"), ("answer", "four")]),
        ({"prompt": "2+2?", "answer": ["4", "four"]}, [("ground_truth", '["4", "four"]'), ("answer", '["4", "four"]')]),
        ({"prompt": "2+2?", "answer": "4", "user_data": [["answer", "04"]]},
         [("answer", "04"), ("ground_truth", "4"), ("scorer", "last_number")]),
        ({"prompt": "2+2?"}, None),
    ],
)  # fmt: skip
def test_a_prompt_ends_with_the_question_and_keeps_the_right_answer(row: dict[str, Any], user_data: Any) -> None:
    got = convert(row, detect(row))
    assert (got["messages"], got.get("user_data"), kind_of(got)) == (PAIR[:1], user_data, "prompt")


def test_a_question_with_an_answer_is_an_exchange_unless_it_is_named_a_prompt() -> None:
    row = {"question": "2+2?", "answer": "4"}
    assert kind_of(convert(row, detect(row))) == "conversation"
    assert kind_of(convert(row, "prompt")) == "prompt"


@pytest.mark.parametrize(
    ("row", "negatives"),
    [
        ({"anchor": "a", "positive": "p"}, None),
        ({"anchor": "a", "positive": "p", "negative": "n"}, ["n"]),
        ({"anchor": "a", "positive": "p", "negative_1": "n", "negative_2": "m"}, ["n", "m"]),
        ({"query": "a", "pos": ["p", "q"], "neg": ["n", "m"]}, ["n", "m"]),
        ({"messages": [], "embedding": {"anchor": "a", "positive": "p", "negatives": ["n"]}}, ["n"]),
    ],
)
def test_embedding_rows_of_both_libraries_are_pairs(row: dict[str, Any], negatives: list[str] | None) -> None:
    pair = {"anchor": "a", "positive": "p"} | ({"negatives": negatives} if negatives else {})
    assert convert(row, detect(row)) == {"messages": [], "embedding": pair}
    assert unused_keys(row, detect(row)) == (["pos[1:]"] if "pos" in row else [])


def test_plain_text_is_kept_exactly() -> None:
    row = {"text": " a\n\u2028b ", "url": "u"}
    assert (convert(row, detect(row)), unused_keys(row, "text")) == ({"messages": [], "text": " a\n\u2028b "}, ["url"])


def test_every_kind_of_trajectory_comes_back_as_it_is() -> None:
    made = [
        {"messages": PAIR, "tools": [{"type": "function", "function": {"name": "f"}}], "user_data": [("a", "b")]},
        {"messages": PAIR, "rejected_messages": WRONG},
        {"messages": PAIR, "desirable": False},
        {"messages": PAIR[:1], "user_data": [("answer", "4")]},
        {"messages": [], "text": "t"},
        {"messages": [], "embedding": {"anchor": "a", "positive": "p"}},
        {"messages": [{"role": "user", "content": "<image>"}, PAIR[1]], "images": ["x.png"]},
    ]
    assert [convert(json.loads(json.dumps(one)), "trajectory") for one in made] == made


IMAGE_TURN = [{"type": "text", "text": "what "}, {"type": "image"}, {"type": "text", "text": "?"}]


@pytest.mark.parametrize(
    "content",
    [
        [IMAGE_TURN[0], {"type": "image_url", "image_url": {"url": "x.png"}}, IMAGE_TURN[2]],
        [IMAGE_TURN[0], {"type": "image", "image": "x.png"}, IMAGE_TURN[2]],
        [IMAGE_TURN[0], {"type": "image", "path": "x.png"}, IMAGE_TURN[2]],
        [IMAGE_TURN[0], {"type": "image_url", "image_url": "x.png"}, IMAGE_TURN[2]],
    ],
)
def test_image_parts_keep_their_place_and_their_reference(content: list[Any]) -> None:
    got = convert({"messages": [{"role": "user", "content": content}, PAIR[1]]}, "messages")
    assert got == {"messages": [{"role": "user", "content": IMAGE_TURN}, PAIR[1]], "images": ["x.png"]}


@pytest.mark.parametrize("images", [["a.png", "b.png"], [{"path": "a.png"}, {"bytes": None, "path": "b.png"}], [{"url": "a.png"}, "b.png"]])
def test_placeholders_and_references_go_together(images: list[Any]) -> None:
    row = {"query": "<image> or <image>?", "response": "the first", "images": images}
    got = convert(row, detect(row))
    assert got["images"] == ["a.png", "b.png"]
    assert got["messages"][0]["content"] == "<image> or <image>?"


def test_bytes_of_an_image_become_a_data_uri() -> None:
    row = {"query": "<image>", "response": "r", "image": {"bytes": b"\x89PNG\r\n", "path": "x.png"}}
    assert convert(row, "query_response")["images"] == ["data:image/png;base64,iVBORw0K"]


def test_a_tag_in_a_row_without_references_is_a_word() -> None:
    assert "videos" not in convert({"query": "what is <video> in HTML?", "response": "a tag"}, "query_response")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [PAIR[0], {"role": "assistant", "content": None}]}, "turn 2: the assistant turn's content is null"),
        ({"messages": [{"role": "user", "content": None}, PAIR[1]]}, "turn 1: the user turn's content is null"),
        ({"messages": [PAIR[0], {"role": "moderator", "content": "x"}]}, "turn 2: unknown role 'moderator'"),
        ({"messages": [{"role": "user", "content": [{"type": "hologram"}]}, PAIR[1]]}, "turn 1: a content part of type 'hologram'"),
        ({"messages": [{"role": "system", "content": "s"}]}, "no turn but the system's"),
        ({"messages": []}, "at least one message"),
        ({"messages": PAIR, "images": ["x.png"]}, "0 placeholders <image> or image parts, but 1 references"),
        ({"messages": [{"role": "user", "content": "<image>"}, PAIR[1]], "images": []}, "1 placeholders <image>"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}, PAIR[1]]}, "1 placeholders <image> or image parts, but 0"),
        ({"text": "t", "images": ["x.png"]}, "takes text only"),
        ({"messages": [PAIR[0], {**PAIR[1], "weight": -1}]}, "'weight' is -1"),
        ({"messages": [PAIR[0], {**PAIR[1], "weight": True}]}, "'weight' is True"),
        ({"messages": [PAIR[0], {**PAIR[1], "loss": 0.5}]}, "'loss' is 0.5: it must be true or false"),
        ({"messages": [PAIR[0], {**PAIR[1], "loss": True, "weight": 0}]}, "the turn's weights disagree"),
        ({"messages": [PAIR[0], {"role": "assistant", "content": "", "tool_calls": BAD_CALL}]}, "JSON object"),
        ({"messages": [{"role": "system", "content": "a"}, *PAIR], "system": "b"}, "two different system texts"),
        ({"query": "a", "response": 3}, "'response' must be text"),
        ({"chosen": PAIR, "rejected": PAIR}, "an answer of the assistant that the other side does not have"),
        ({"chosen": PAIR, "rejected": [*PAIR, *PAIR]}, "'chosen' must end with an answer"),
        ({"chosen": PAIR, "rejected": [{"role": "user", "content": "other?"}, PAIR[1]]}, "do not begin with the same question"),
        ({"chosen": "a", "rejected": "b"}, "no prompt, so 'chosen' must be a whole conversation"),
        ({"prompt": "q", "chosen": PAIR, "rejected": WRONG}, "begins with a user turn, but not with the prompt"),
        ({"messages": PAIR[:1], "label": True}, "ends with the assistant's answer"),
        ({"anchor": "a", "pos": []}, "no positive"),
        ({"text": ""}, "'text' is empty"),
    ],
)  # fmt: skip
def test_what_would_be_learnt_wrongly_is_refused_with_its_reason(row: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        convert(row, detect(row))


@pytest.mark.parametrize("layout", ["messages", "sharegpt", "alpaca", "prompt_completion", "query_response"])
def test_a_judgement_is_not_lost_by_reading_the_row_as_an_example(layout: str) -> None:
    row = {"messages": PAIR, "instruction": "i", "output": "o", "prompt": "p", "completion": "c", "query": "q", "response": "r"}
    assert convert(row, layout)
    with pytest.raises(DataError, match="layout 'judged'"):
        convert({**row, "label": False}, layout)
    with pytest.raises(DataError, match="a preference pair"):
        convert({**row, "chosen": "a", "rejected": "b"}, layout)


def test_an_unknown_layout_names_its_keys_and_unused_keys_are_listed() -> None:
    with pytest.raises(DataError, match=r"\['txt'\]"):
        detect({"txt": "x"})
    with pytest.raises(DataError, match=r"unknown format 'msgs'; known: messages, .*embedding"):
        convert({"messages": PAIR}, "msgs")
    assert unused_keys({"messages": [{**PAIR[0], "mood": 1}], "id": 7}, "messages") == ["id", "messages[].mood"]
    assert all(unused_keys({"system": "s", "tools": [], "user_data": []}, layout) == [] for layout in FORMATS if layout != "trajectory")


def test_a_question_after_the_last_answer_does_not_make_a_prompt_of_a_conversation() -> None:
    row = {"messages": [*PAIR, {"role": "user", "content": "Thanks"}]}
    assert kind_of(convert(row, "messages")) == "conversation"
    asked = convert(row, "prompt")
    assert (kind_of(asked), asked["messages"]) == ("prompt", row["messages"])
    assert kind_of(convert(asked, detect(asked))) == "prompt"


@pytest.mark.parametrize(("value", "said"), [(True, True), (0, False), (1, True), ("False", False), ("1", True), (2, None), ("good", None)])
def test_a_judgement_is_read_in_every_form_it_is_written_in(value: Any, said: bool | None) -> None:
    row = {"prompt": "2+2?", "completion": "5", "label": value}
    if said is None:
        assert kind_of(convert(row, "prompt_completion")) == "conversation"
        with pytest.raises(DataError, match="must be true or false"):
            convert(row, "judged")
        return
    assert convert(row, "judged")["desirable"] is said
    with pytest.raises(DataError, match="set format: judged"):
        convert(row, "prompt_completion")


def test_the_older_form_of_a_tool_call_is_one_too() -> None:
    call = {"name": "f", "arguments": '{"a": 1}'}
    turns = [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "b", "function_call": call},
        {"role": "function", "content": "r"},
    ]
    got = convert({"messages": [*turns, {"role": "assistant", "content": "done"}]}, "messages")["messages"]
    assert got[1]["tool_calls"] == [{"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]
    assert [message["role"] for message in got] == ["user", "assistant", "tool", "assistant"]
