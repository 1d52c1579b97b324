"""Laws of tool-call styles; the renderers here are written from the formats' descriptions, apart from the parsers."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle_core.errors import ConfigError, DataError
from twinkle_core.template.tool_calls import STYLES, clean_tool_calls, detect_style, parse_tool_calls, scan_tool_calls

Call = dict[str, Any]


def call(name: str, arguments: dict[str, Any]) -> Call:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


def to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def hermes(name: str, arguments: dict[str, Any]) -> str:
    return f'<tool_call>\n{{"name": {to_json(name)}, "arguments": {to_json(arguments)}}}\n</tool_call>'


def qwen3_coder(name: str, arguments: dict[str, Any]) -> str:
    def text(value: Any) -> str:
        return to_json(value) if isinstance(value, (dict, list)) else str(value)

    parameters = "".join(f"<parameter={key}>\n{text(value)}\n</parameter>\n" for key, value in arguments.items())
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def deepseek_v3(name: str, arguments: dict[str, Any]) -> str:
    call = f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{to_json(arguments)}\n```<｜tool▁call▁end｜>"
    return f"<｜tool▁calls▁begin｜>{call}<｜tool▁calls▁end｜>"


def deepseek_v31(name: str, arguments: dict[str, Any]) -> str:
    return f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{to_json(arguments)}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"


def dsml(name: str, arguments: dict[str, Any]) -> str:
    lines = []
    for key, value in arguments.items():
        kind, text = ("true", value) if isinstance(value, str) else ("false", to_json(value))
        lines.append(f'<｜DSML｜parameter name="{key}" string="{kind}">{text}</｜DSML｜parameter>\n')
    return f'<｜DSML｜tool_calls>\n<｜DSML｜invoke name="{name}">\n{"".join(lines)}</｜DSML｜invoke>\n</｜DSML｜tool_calls>'


def vcp(name: str, arguments: dict[str, Any]) -> str:
    fields = [("tool_name", name), *arguments.items()]
    return "<<<[TOOL_REQUEST]>>>\n" + ",\n".join(f"{key}:「始」{value}「末」" for key, value in fields) + "\n<<<[END_TOOL_REQUEST]>>>"


def react(name: str, arguments: dict[str, Any]) -> str:
    return f"Action: {name}\nAction Input: {to_json(arguments)}\n"


def cline(name: str, arguments: dict[str, Any]) -> str:
    return f"<{name}>\n" + "".join(f"<{key}>\n{value}\n</{key}>\n" for key, value in arguments.items()) + f"</{name}>"


MARKS = ("<tool_call>", "</tool_call>", "</parameter>", "</function>", "「末」", "<｜tool▁call▁end｜>", "```", "Action: f", "</content>")
texts = st.one_of(st.text(st.characters(codec="utf-8"), max_size=20), st.sampled_from([f"a\n{mark}\nb" for mark in MARKS]))
scalars = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False), texts)
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3), max_leaves=6)
names = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,10}", fullmatch=True)
keys = st.from_regex(r"[a-z][a-z0-9_]{0,8}", fullmatch=True).filter(lambda key: key != "tool_name")
any_arguments = st.dictionaries(texts, values, max_size=4)


def texts_without(*marks: str) -> st.SearchStrategy[str]:
    return texts.filter(lambda text: not any(mark in text for mark in marks))


CASES: dict[str, tuple[str, Any, st.SearchStrategy[str], st.SearchStrategy[dict[str, Any]]]] = {
    "hermes_qwen": ("hermes_qwen", hermes, names, any_arguments),
    "qwen3_coder": ("qwen3_coder", qwen3_coder, names, st.dictionaries(keys, texts)),
    "qwen3_coder in hermes_qwen": ("hermes_qwen", qwen3_coder, names, st.dictionaries(keys, texts)),
    "deepseek v3": ("deepseek", deepseek_v3, names, any_arguments),
    "deepseek v3.1": ("deepseek", deepseek_v31, names, any_arguments),
    "dsml": ("dsml", dsml, names, st.dictionaries(keys, values)),
    "vcp": ("vcp", vcp, names, st.dictionaries(keys, texts_without("「末」"))),
    "react": ("react", react, names, any_arguments),
    "cline": ("cline", cline, keys.map(lambda key: f"do_{key}"), st.dictionaries(keys, texts_without("</content>"), min_size=1)),
}
"""Style, renderer, and what the format can carry. Values that hold the format's own closing tag and then an opening one cannot be told."""


def declared(calls: list[Call]) -> list[dict[str, Any]]:
    """Tools that declare every argument of the calls a string."""
    properties: dict[str, dict[str, Any]] = {}
    for one in calls:
        properties.setdefault(one["function"]["name"], {}).update({key: {"type": "string"} for key in one["function"]["arguments"]})
    return [{"type": "function", "function": {"name": name, "parameters": {"properties": found}}} for name, found in properties.items()]


@pytest.mark.parametrize("case", CASES)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_rendered_is_parsed_and_nothing_else_is_cut(case: str, data: st.DataObject) -> None:
    style, render, name, arguments = CASES[case]
    calls = [call(*pair) for pair in data.draw(st.lists(st.tuples(name, arguments), min_size=1, max_size=3))]
    tools = declared(calls) if "qwen3_coder" in case else []
    blocks = [render(one["function"]["name"], one["function"]["arguments"]) for one in calls]
    text = "Let me see.\n" + "\nand\n".join(blocks)
    assert parse_tool_calls(text, style, tools=tools) == calls
    between = "\n\nand\n" if case == "react" else "\nand\n"
    if case != "react" or len(calls) == 1:
        assert clean_tool_calls(text, style, tools=tools) == ("Let me see.\n" + between * (len(calls) - 1)).rstrip()
    assert scan_tool_calls(text, style, tools=tools)[0].start == len("Let me see.\n")


def test_types_of_arguments_without_types_come_from_the_tools() -> None:
    text = qwen3_coder("f", {"a": "3", "b": 3, "c": True, "d": None, "e": [1, {"x": "y"}], "g": "plain words"})
    properties = {
        "a": {"type": "string"},
        "b": {"type": "integer"},
        "c": {"type": "boolean"},
        "d": {"type": "null"},
        "e": {"type": "array"},
    }
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"properties": properties}}}]
    [parsed] = parse_tool_calls(text, "qwen3_coder", tools=tools)
    assert parsed["function"]["arguments"] == {"a": "3", "b": 3, "c": True, "d": None, "e": [1, {"x": "y"}], "g": "plain words"}
    [untyped] = parse_tool_calls(text, "qwen3_coder")
    assert untyped["function"]["arguments"] == {"a": 3, "b": 3, "c": "True", "d": "None", "e": [1, {"x": "y"}], "g": "plain words"}


@pytest.mark.parametrize(
    ("style", "text", "calls"),
    [
        ("hermes_qwen", '<tool_call>{"name": "now"}</tool_call>', [call("now", {})]),
        ("hermes_qwen", '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [call("f", {"a": 1})]),
        ("qwen3_coder", "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>", [call("f", {"a": 1})]),
        ("react", "Thought: I look.\nAction: Search[Apple Remote]\nObservation: …", [call("Search", {"input": "Apple Remote"})]),
        ("cline", "Reading.\n<read_file><path>src/foo.py</path></read_file>", [call("read_file", {"path": "src/foo.py"})]),
        ("cline", "if a <b> and <div><p>text</p></div> then <think>x</think>", []),
        ("vcp", "<<<[TOOL_REQUEST]>>>tool_name:「始」f「末」, text:「始ESCAPE」a「末」b「末ESCAPE」<<<[END_TOOL_REQUEST]>>>",
         [call("f", {"text": "a「末」b"})]),
        ("dsml", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜invoke>\n<｜DSML｜invoke name="g">\n</｜DSML｜invoke>\n'
         "</｜DSML｜function_calls>", [call("f", {}), call("g", {})]),
        ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>\n"
         '<｜tool▁call▁begin｜>g<｜tool▁sep｜>{"a":1}<｜tool▁call▁end｜>', [call("f", {}), call("g", {"a": 1})]),
    ],
)  # fmt: skip
def test_forms_in_use(style: str, text: str, calls: list[Call]) -> None:
    assert parse_tool_calls(text, style) == calls


BROKEN = [
    ("hermes_qwen", '<tool_call>{"name": "f", "arguments": {"a": 1}}', "expected </tool_call>"),
    ("hermes_qwen", '<tool_call>{"name": "f", "arguments": {"a": 1}</tool_call>', "no JSON value"),
    ("hermes_qwen", '<tool_call>{"arguments": {}}</tool_call>', 'no "name"'),
    ("hermes_qwen", '<tool_call>{"name": "f", "arguments": [1]}</tool_call>', "no JSON object but list"),
    ("hermes_qwen", '<tool_call>{"name": "f", "arguments": {"a": 1, "a": 2}}</tool_call>', "given twice"),
    ("hermes_qwen", '<tool_call>{"name": "f", "arguments": {"a": NaN}}</tool_call>', "NaN is no JSON"),
    ("hermes_qwen", "<tool_call>" + "[" * 100_000, "no JSON value"),
    ("hermes_qwen", "<tool_call>[]</tool_call>", 'no "name"'),
    ("qwen3_coder", "<tool_call><function=f><parameter=a>1</function></tool_call>", "expected <parameter=KEY>"),
    ("qwen3_coder", "<tool_call><function=f></function>", "expected </tool_call>"),
    ("qwen3_coder", '<tool_call>{"name": "f"}</tool_call>', "expected <function=NAME>"),
    ("deepseek", "<｜tool▁calls▁begin｜>f<｜tool▁calls▁end｜>", "expected <｜tool▁call▁begin｜>"),
    ("deepseek", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>3<｜tool▁call▁end｜>", "no JSON object but int"),
    ("dsml", "<｜DSML｜tool_calls>\n</｜DSML｜tool_calls>", "makes no call"),
    ("dsml", '<｜DSML｜tool_calls>\n<｜DSML｜invoke name="f">\n</｜DSML｜tool_calls>', "expected a parameter"),
    ("vcp", "<<<[TOOL_REQUEST]>>>a:「始」1「末」<<<[END_TOOL_REQUEST]>>>", "no tool_name"),
    ("vcp", "<<<[TOOL_REQUEST]>>>tool_name:「始」f「末」", "expected KEY"),
    ("react", "Action: f\nObservation: 3", "a line 'Action Input"),
    ("react", "Action: f\nAction Input: none", "no JSON value"),
    ("cline", "<read_file><path>a</path>", "expected <KEY>"),
]


@pytest.mark.parametrize(("style", "text", "reason"), BROKEN)
def test_a_broken_block_is_told_and_never_taken_for_no_call(style: str, text: str, reason: str) -> None:
    with pytest.raises(DataError, match=f"tool call block 1 \\({style}, at character 6\\) is broken"):
        parse_tool_calls("Sure. " + text if style != "react" else "Sure.\n" + text, style)
    [block] = scan_tool_calls(text, style)
    assert block.broken is not None
    assert reason in block.broken
    assert parse_tool_calls(text, style, strict=False) == []
    assert clean_tool_calls(text, style) == text, "what is not parsed is not cut"


def test_a_good_block_after_a_broken_one_is_found() -> None:
    text = "<tool_call>{oops</tool_call>\n" + hermes("f", {"a": 1})
    assert parse_tool_calls(text, "hermes_qwen", strict=False) == [call("f", {"a": 1})]
    assert clean_tool_calls(text, "hermes_qwen") == "<tool_call>{oops</tool_call>"


def test_only_the_tools_given_are_tags_of_cline() -> None:
    tools = [{"type": "function", "function": {"name": "label", "parameters": {}}}]
    text = "<read_file><path>a</path></read_file><label><of>b</of></label>"
    assert parse_tool_calls(text, "cline", tools=tools) == [call("label", {"of": "b"})]


def test_styles_are_told_apart_and_plain_text_is_none() -> None:
    told = {style: detect_style(render("do_it", {"a": "b"})) for style, render in {
        "hermes_qwen": hermes, "deepseek": deepseek_v31, "dsml": dsml, "vcp": vcp, "react": react, "cline": cline}.items()}  # fmt: skip
    assert told == {style: style for style in told}
    assert detect_style("Nothing to call, 1 < 2 and 3 > 2.") is None
    assert parse_tool_calls("Nothing to call.", "react") == []
    assert clean_tool_calls("Nothing to cut. \n", "react") == "Nothing to cut. \n"


def test_an_unknown_style_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="unknown tool call style 'xml'; known: " + ", ".join(STYLES)):
        parse_tool_calls("", "xml")


def test_a_long_text_of_openings_takes_no_quadratic_time() -> None:
    started = time.perf_counter()
    for style, opening in (("hermes_qwen", "<tool_call>"), ("vcp", "<<<[TOOL_REQUEST]>>>"), ("react", "Action: \n"), ("cline", "<a_b><c>")):
        scan_tool_calls(opening * 2000, style)
    assert time.perf_counter() - started < 5
